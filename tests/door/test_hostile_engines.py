"""Whatever an engine answers harms neither the door nor other requests."""

import asyncio

import pytest

from app.door.engine import upstream
from app.door.prompts import engine_tokens
from tests.attack.attack import answering, attack_from
from tests.attack.engine import hostile_worker, num_asked
from tests.door.conftest import replica, until_serving
from tests.door.test_answers import counted
from tests.door.test_failures import nothing_reserved
from tests.eventually import eventually
from tests.fake_worker import KEYS


def hostile(redis, name):
    return hostile_worker(redis, KEYS, name, "m")


def asked(how, **more):
    return {"model": "m", "prompt": [1, 2, 3], "max_tokens": 4, "user": how} | more


async def tokens(door, kind):
    return await counted(door, f'tokens_total{{kind="{kind}",model="m"}}')


async def test_what_an_engine_should_not_answer_costs_its_request_alone(one_redis_server, redis):
    problems = []
    async with (
        hostile(redis, "a") as engine,
        replica(one_redis_server.url, migrate=True, answer_timeout_s=60) as door,
    ):
        await until_serving(door, 1)
        async with answering([str(door.base_url.join("/health"))], problems):
            await attack_from(engine, "m", door, problems)
        assert problems == []
        await nothing_reserved(redis)
        assert await tokens(door, "output") < 1000
        assert await tokens(door, "prompt") < 1000
        await eventually(_async(lambda: engine.num_open), lambda number: number <= 1)


def _async(look):
    async def looked():
        return look()

    return looked


async def test_an_engine_that_hangs_when_it_is_asked_for_tokens_keeps_no_connections(
    one_redis_server, redis, monkeypatch
):
    monkeypatch.setattr(engine_tokens, "ANSWER_S", 0.3)
    monkeypatch.setattr(engine_tokens, "FIRST_PAUSE_S", 0.0)
    async with hostile(redis, "a") as engine, replica(one_redis_server.url) as door:
        await until_serving(door, 1)
        # Of a body without end, as much is read in time as an answer can have, or not.
        for how, why in (("hangs", ()), ("body without end", ("blind:refused",))):
            body = asked("good", prompt=how)
            answers = await asyncio.gather(
                *(door.post("/v1/completions", json=body) for _ in range(10))
            )
            assert {answer.status_code for answer in answers} == {200}
            told = {answer.headers["x-kvroute-tokens"] for answer in answers}
            assert told <= {"blind:engine", *why}
            assert {answer.headers["x-kvroute-trust"] for answer in answers} == {"blind"}
        await door.post("/v1/completions", json=asked("good"))
        # On a busy machine some are given up before they are sent.
        assert 0 < num_asked(engine, "hangs") <= 10
        await eventually(_async(lambda: engine.num_open), lambda number: number <= 10)
        await eventually(_async(lambda: engine.num_open), lambda number: number == 0)


async def test_a_request_that_kills_engines_kills_two_and_is_refused(
    one_redis_server, redis, monkeypatch
):
    # A connection that was kept may have been closed as it was used: the first try is sent anew.
    monkeypatch.setattr(upstream, "STALE_S", 60.0)
    async with (
        hostile(redis, "a") as one,
        hostile(redis, "b") as two,
        hostile(redis, "c") as three,
        replica(one_redis_server.url) as door,
    ):
        await until_serving(door, 3)
        body = asked("good")
        await asyncio.gather(*(door.post("/v1/completions", json=body) for _ in range(30)))
        answer = await door.post("/v1/completions", json=asked("resets"))
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (502, "repeated_failure"), error
        assert answer.headers["x-should-retry"] == "false"
        carried_out = sorted(num_asked(each, "resets") for each in (one, two, three))
        # Twice at the first one if a connection to it was kept.
        assert carried_out in ([0, 1, 1], [0, 1, 2])
        await nothing_reserved(redis)


@pytest.mark.parametrize("name", ["model", "stream_options", "prompt", "n", "user"])
async def test_deep_members_are_refused_or_passed_on(one_redis_server, redis, name):
    deep = 1
    for _ in range(300):
        deep = [deep]
    async with hostile(redis, "a"), replica(one_redis_server.url) as door:
        await until_serving(door, 1)
        for streams in (False, True):
            value = {"include_usage": deep} if name == "stream_options" else deep
            body = asked("good", stream=streams) | {name: value}
            answer = await door.post("/v1/completions", json=body)
            assert answer.status_code < 500, answer.text
