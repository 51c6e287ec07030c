"""Engines of one model that take prompts of different lengths: each request goes where it fits."""

import asyncio
import contextlib
from contextlib import asynccontextmanager

import pytest

from app.door.answer_request import Api, output_room
from tests.door.conftest import replica, sick_worker, until_serving
from tests.door.test_answers import LLAMA, counted
from tests.eventually import eventually
from tests.fake_worker import KEYS
from tests.fakes.faults import Faults

SHORT, LONG = 300, 8000
ONE_WORD = {"role": "user", "content": "hi"}


@asynccontextmanager
async def fleet(server, redis, *, lengths=(SHORT, LONG), **settings):
    """A door, and workers w0, w1 … with these context lengths."""
    about = {"tokenizer": str(LLAMA), **settings.pop("about", {})}
    async with contextlib.AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(
                sick_worker(redis, f"w{n}", max_model_len=length, **about)
            )
            for n, length in enumerate(lengths)
        ]
        door = await stack.enter_async_context(replica(server.url, **settings))
        await until_serving(door, len(lengths))
        yield door, engines


async def places(door, path, times=12, **asked):
    """Which workers requests for that went to."""
    found = set()
    for _ in range(times):
        answer = await door.post(path, json={"model": "m", **asked})
        assert answer.status_code == 200, answer.text
        found.add(answer.headers["x-kvroute-worker"])
    return found


BOTH, LONGER = {"w0:0", "w1:0"}, {"w1:0"}


async def test_a_prompt_goes_where_it_fits_with_what_is_asked_for(one_redis_server, redis):
    async with fleet(one_redis_server, redis, policy="round_robin") as (door, _):
        path = "/v1/completions"

        async def went(num_tokens, **asked):
            return await places(door, path, prompt=[7] * num_tokens, **asked)

        assert await went(100) == BOTH
        assert await went(284) == BOTH  # and the 16 tokens that completions get by default
        assert await went(285) == LONGER
        assert await went(299, max_tokens=1) == BOTH
        assert await went(10, max_tokens=291) == LONGER
        assert await went(1000) == LONGER
        # How to shorten what fits nowhere is for the engine to say.
        assert await went(7999, max_tokens=4000) == LONGER
        answer = await door.post(path, json={"model": "m", "prompt": [7] * 8000})
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert "maximum context length is 8000 tokens" in answer.json()["error"]["message"]
        [card] = (await door.get("/v1/models")).json()["data"]
        assert card["max_model_len"] == LONG


@pytest.mark.parametrize(
    ("path", "asked", "where"),
    [
        ("/v1/chat/completions", {"messages": [ONE_WORD]}, BOTH),
        ("/v1/chat/completions", {"messages": [ONE_WORD], "max_tokens": 300}, LONGER),
        ("/v1/chat/completions", {"messages": [ONE_WORD], "max_completion_tokens": 300}, LONGER),
        ("/v1/messages", {"messages": [ONE_WORD], "max_tokens": 8}, BOTH),
        ("/v1/messages", {"messages": [ONE_WORD], "max_tokens": 300}, LONGER),
        ("/v1/responses", {"input": "hi"}, BOTH),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 300}, LONGER),
    ],
)
async def test_every_api_says_in_its_own_way_how_much_it_asks_for(
    one_redis_server, redis, path, asked, where
):
    about = {"engine": "vllm 0.33.0"}
    async with fleet(one_redis_server, redis, policy="round_robin", about=about) as (door, _):

        async def rendered():
            await places(door, path, 1, **asked)
            return await counted(door, 'tokens_from_total{model="m",source="router"}')

        await eventually(rendered)
        assert await places(door, path, 4, **asked) == where


async def test_where_the_length_is_not_known_only_an_engine_that_surely_takes_it_is_asked(
    one_redis_server, redis
):
    """As none of these tells its tokens, and the bodies do."""
    about = {"tokenizer": "", "engine": "sglang 0.5"}
    settings = {"policy": "round_robin", "about": about}
    lengths = (3000, LONG)
    async with fleet(one_redis_server, redis, lengths=lengths, **settings) as (door, engines):
        for engine in engines:
            engine.faults = Faults(tokenize_status=400)
        path = "/v1/messages"

        async def went(content):
            turns = [{"role": "user", "content": content}]
            return await places(door, path, 4, messages=turns, max_tokens=8)

        assert await went("short") == BOTH
        assert await went("word " * 600) == LONGER  # of which nobody knows that they are 600
        image = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
        assert await went([image]) == LONGER


async def test_no_retry_goes_where_it_does_not_fit(one_redis_server, redis):
    async with fleet(one_redis_server, redis) as (door, (short, long)):
        long.faults = Faults(status=500)
        asked = {"model": "m", "prompt": [7] * 1000}
        for _ in range(3):
            answer = await door.post("/v1/completions", json=asked)
            assert answer.status_code in (500, 502, 503), answer.text
        assert short.requests["/v1/completions"] == 0


async def test_one_that_does_not_say_how_much_it_takes_may_take_anything(one_redis_server, redis):
    async with fleet(one_redis_server, redis, lengths=(SHORT, 0)) as (door, _):
        assert await places(door, "/v1/completions", 3, prompt=[7] * 20_000) == LONGER
        [card] = (await door.get("/v1/models")).json()["data"]
        assert card["max_model_len"] == SHORT


async def test_a_client_that_carries_its_request_itself_is_sent_where_the_prompt_fits(
    one_redis_server, redis
):
    async with fleet(one_redis_server, redis) as (door, _):

        async def asked(num_tokens):
            return await door.post("/v1/route", json={"token_ids": [7] * num_tokens})

        for _ in range(6):
            answer = await asked(SHORT)
            assert answer.json()["worker_id"] == "w1", answer.text
        answer = await asked(LONG)
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "prompt_too_large")


async def test_a_long_request_that_waits_holds_up_nobody_who_fits_elsewhere(
    one_redis_server, redis
):
    settings = {"wait_queue": 10, "wait_timeout_s": 600.0, "about": {"max_requests": 1}}
    async with fleet(one_redis_server, redis, **settings) as (door, (_, long)):
        long.faults = Faults(how="hang")

        def ask(num_tokens):
            asked = {"model": "m", "prompt": [7] * num_tokens}
            return asyncio.create_task(door.post("/v1/completions", json=asked))

        async def waiting():
            return int(await redis.zcard(KEYS["flows"]))

        hanging, late = ask(1000), ask(1000)
        await eventually(waiting)
        for _ in range(3):
            assert (await ask(10)).headers["x-kvroute-worker"] == "w0:0"
        assert await waiting()
        for task in (hanging, late):
            task.cancel()
        await asyncio.gather(hanging, late, return_exceptions=True)


def test_what_is_no_number_of_tokens_asks_for_one():
    def room(value):
        return output_room(Api.CHAT, {"max_tokens": value})

    assert [room(v) for v in (7, 0, -5, True, "9", None, 1.5)] == [7, 1, 1, 1, 1, 1, 1]
    assert output_room(Api.EMBEDDINGS, {"max_tokens": 7}) == 0


async def test_a_length_that_an_engine_no_longer_has_costs_nobody_an_answer(
    one_redis_server, redis
):
    """As one that was started anew, before its agent has seen it."""
    lengths = (LONG, LONG, LONG)
    async with fleet(one_redis_server, redis, lengths=lengths) as (door, engines):
        engines[0].faults = engines[1].faults = Faults(max_model_len=SHORT)
        asked = {"model": "m", "prompt": [7] * 1000}
        for _ in range(9):
            answer = await door.post("/v1/completions", json=asked)
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-kvroute-worker"] == "w2:0"
        engines[2].faults = Faults(max_model_len=SHORT)
        answer = await door.post("/v1/completions", json=asked)
        assert answer.status_code == 400
        assert "maximum context length is 300 tokens" in answer.text
