"""Ids of prompts that engines are asked for: any engine of the model, the late ones last."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import httpx
import pytest

from app.door.prompts import engine_tokens
from app.door.prompts.engine_tokens import (
    ANSWER_S,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    MOST_ASKED,
    Late,
)
from tests.door.conftest import replica, sick_worker, until_serving
from tests.eventually import eventually
from tests.fakes.engine import FakeEngine
from tests.fakes.faults import HANG_S, Faults

HANGS = Faults(tokenize_s=HANG_S)


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def test_an_engine_that_was_late_is_asked_last_until_its_pause_is_over():
    clock = Clock()
    late = Late(clock, random.Random(7))
    late.note_late("a")
    assert [late.in_turn(["a", "b"]) for _ in range(5)] == [["b", "a"]] * 5
    assert late.in_turn(["a"]) == []
    clock.now_s += FIRST_PAUSE_S
    assert late.in_turn(["a"]) == ["a"]
    assert late.in_turn(["a"]) == []  # one request tries it, and no other meanwhile
    late.note_well("a")
    assert late.in_turn(["a"]) == ["a"]
    assert late.in_turn(["a"]) == ["a"]


def test_pauses_grow_with_each_time_that_it_was_tried_in_vain_and_not_with_others_who_wait():
    clock = Clock()
    late = Late(clock)
    pause_s = FIRST_PAUSE_S
    for _ in range(10):
        for _ in range(5):
            late.note_late("a")
        clock.now_s += pause_s - 0.1
        assert late.in_turn(["a"]) == []
        clock.now_s += 0.1
        assert late.in_turn(["a"]) == ["a"]
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def test_a_trial_of_which_nobody_tells_is_followed_by_another():
    clock = Clock()
    late = Late(clock)
    late.note_late("a")
    clock.now_s += FIRST_PAUSE_S
    assert late.in_turn(["a"]) == ["a"]
    clock.now_s += ANSWER_S
    assert late.in_turn(["a"]) == ["a"]


def test_of_many_engines_a_few_are_asked_each_as_often_as_others():
    late = Late(Clock(), random.Random(7))
    names = [f"e{n}" for n in range(8)]
    late.note_late("e0")
    asked = [late.in_turn(names) for _ in range(700)]
    assert {len(turns) for turns in asked} == {MOST_ASKED}
    first = [turns[0] for turns in asked]
    assert {name for name in names if 70 < first.count(name) < 130} == set(names[1:])
    assert not any("e0" in turns for turns in asked)


Door = httpx.AsyncClient
Sick = Callable[..., Awaitable[tuple[Door, list[FakeEngine]]]]


@pytest.fixture
async def sick(one_redis_server, redis):
    """Starts a replica, and engines that it must ask for ids, as their tokenizer is nowhere."""
    async with AsyncExitStack() as stack:

        async def start(*faults):
            engines = []
            for number, fault in enumerate(faults):
                worker = sick_worker(redis, f"w{number}")
                engines.append(await stack.enter_async_context(worker))
                engines[-1].faults = fault
            door = await stack.enter_async_context(replica(one_redis_server.url))
            await until_serving(door, len(faults))
            return door, engines

        yield start


async def ask(door):
    """Why the ids of a prompt were not known; "": they were."""
    body = {"model": "m", "prompt": "hello", "max_tokens": 1}
    answer = await door.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.headers.get("x-kvroute-tokens", "")


def num_asked(engine):
    return engine.requests["/tokenize"]


@pytest.mark.parametrize(
    "fault",
    [
        HANGS,
        Faults(tokenize_status=0),
        Faults(tokenize_status=404),
        Faults(tokenize_status=500),
    ],
    ids=["hangs", "resets", "404", "500"],
)
async def test_an_engine_that_cannot_tell_is_asked_once_and_the_others_tell(
    sick, fault, monkeypatch
):
    monkeypatch.setattr(engine_tokens, "ANSWER_S", 60.0)
    monkeypatch.setattr(engine_tokens, "FIRST_PAUSE_S", 300.0)
    door, (one, two) = await sick(fault, Faults())
    assert {await ask(door) for _ in range(20)} == {""}
    assert num_asked(one) <= 1
    assert num_asked(two) == 20


async def test_one_that_is_well_again_is_asked_again(sick, monkeypatch):
    monkeypatch.setattr(engine_tokens, "FIRST_PAUSE_S", 0.05)
    door, (one, _) = await sick(HANGS, Faults())

    async def asked():
        assert await ask(door) == ""
        return num_asked(one)

    await eventually(asked)
    one.faults = Faults()
    before = num_asked(one)
    await eventually(asked, lambda number: number > before + 5)


async def test_where_no_engine_can_tell_one_request_waits_for_that_and_the_next_do_not(
    sick, monkeypatch
):
    monkeypatch.setattr(engine_tokens, "ANSWER_S", 0.2)
    monkeypatch.setattr(engine_tokens, "FIRST_PAUSE_S", 600.0)
    monkeypatch.setattr(engine_tokens, "NEXT_S", 0.01)
    door, engines = await sick(HANGS, HANGS)
    assert {await ask(door) for _ in range(5)} == {"blind:engine"}
    assert [num_asked(engine) for engine in engines] == [1, 1]


async def test_what_every_engine_would_refuse_is_asked_of_one_and_is_no_fault_of_it(
    sick, monkeypatch
):
    monkeypatch.setattr(engine_tokens, "NEXT_S", 60.0)
    refuses = Faults(tokenize_status=400)
    door, engines = await sick(refuses, refuses)
    assert {await ask(door) for _ in range(10)} == {"blind:refused"}
    assert sum(map(num_asked, engines)) == 10


async def test_a_client_that_hangs_up_leaves_no_question_behind(sick, monkeypatch):
    monkeypatch.setattr(engine_tokens, "ANSWER_S", 60.0)
    door, (engine,) = await sick(HANGS)
    asking = asyncio.create_task(ask(door))

    async def asked():
        return num_asked(engine)

    await eventually(asked)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)

    async def tasks():
        return {str(task.get_coro()) for task in asyncio.all_tasks()}

    await eventually(tasks, lambda names: "EngineTokens._ask" not in str(names))
