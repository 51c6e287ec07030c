"""Whatever an engine answers harms neither the door nor other requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from app.door import prompts, upstream
from app.local.redis_server import EmbeddedRedis
from app.state.scripts import ScriptRunner
from tests.attack.engine import ANSWERS, HostileEngine
from tests.door.conftest import replica, until_serving
from tests.door.test_answers import counted
from tests.door.test_failures import nothing_reserved
from tests.eventually import eventually
from tests.fake_worker import KEYS, FakeWorker, worker_info


@asynccontextmanager
async def hostile(redis: Redis, name: str) -> AsyncIterator[HostileEngine]:
    """A worker of model `m` with such an engine."""
    async with HostileEngine.listening() as engine:
        info = replace(worker_info(name), address=engine.url, models=("m",), engine="vllm 0.32.0")
        info = replace(info, kv_total_blocks=100_000, max_model_len=4096)
        worker = FakeWorker(ScriptRunner(redis, 5.0), KEYS, info)
        await worker.register()
        await worker.activate()
        yield engine


def asked(how: str, **more: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": [1, 2, 3], "max_tokens": 4, "user": how} | more


async def tokens(door: httpx.AsyncClient, kind: str) -> float:
    return await counted(door, f'tokens_total{{kind="{kind}",model="m"}}')


ENDLESS = [how for how, answer in ANSWERS.items() if not isinstance(answer, bytes)]


@pytest.mark.parametrize("streams", [False, True])
async def test_what_an_engine_should_not_answer_costs_its_request_alone(
    one_redis_server: EmbeddedRedis, redis: Redis, streams: bool
) -> None:
    async with (
        hostile(redis, "a") as engine,
        replica(one_redis_server.url, migrate=True, answer_timeout_s=5) as door,
    ):
        await until_serving(door, 1)

        async def ask(how: str) -> tuple[int, str]:
            async with door.stream(
                "POST", "/v1/completions", json=asked(how, stream=streams)
            ) as it:
                if how in ENDLESS and it.status_code == 200:
                    return it.status_code, ""  # a client that has had enough
                return it.status_code, (await it.aread()).decode()

        for how in ANSWERS:
            status, text = await ask(how)
            assert status in (200, 204, 502), f"{how}: {status} {text}"
            assert '"code":"internal"' not in text, f"{how}: {text}"
            if how.startswith("usage"):
                assert (status, "hello" in text) == (200, True), f"{how}: {text}"
            if status == 502:
                assert '"code":"worker_failed"' in text, how

            async def routed() -> int:
                return (await ask("good"))[0]

            # A worker that failed is suspended for a while.
            await eventually(routed, lambda status: status == 200)
        await nothing_reserved(redis)
        assert await tokens(door, "output") < 1000
        assert await tokens(door, "prompt") < 1000
        await eventually(_async(lambda: engine.num_open), lambda number: number <= 1)


def _async(look: Any) -> Any:
    async def looked() -> Any:
        return look()

    return looked


async def test_an_engine_that_hangs_when_it_is_asked_for_tokens_keeps_no_connections(
    one_redis_server: EmbeddedRedis, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "ENGINE_TIMEOUT_S", 0.1)
    async with hostile(redis, "a") as engine, replica(one_redis_server.url) as door:
        await until_serving(door, 1)
        for how in ("hangs", "body without end"):
            body = asked("good", prompt=how)
            answers = await asyncio.gather(
                *(door.post("/v1/completions", json=body) for _ in range(10))
            )
            assert {answer.status_code for answer in answers} == {200}
            assert {answer.headers["x-kvroute-tokens"] for answer in answers} == {"blind:engine"}
        await door.post("/v1/completions", json=asked("good"))
        assert engine.requests["/tokenize hangs"] == 10
        await eventually(_async(lambda: engine.num_open), lambda number: number <= 10)
        await eventually(_async(lambda: engine.num_open), lambda number: number == 0)


async def test_a_request_that_kills_engines_kills_two_and_is_refused(
    one_redis_server: EmbeddedRedis, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        carried_out = sorted(each.requests["/v1/completions resets"] for each in (one, two, three))
        assert carried_out == [0, 1, 2]
        await nothing_reserved(redis)


@pytest.mark.parametrize("name", ["model", "stream_options", "prompt", "n", "user"])
async def test_deep_members_are_refused_or_passed_on(
    one_redis_server: EmbeddedRedis, redis: Redis, name: str
) -> None:
    deep: Any = 1
    for _ in range(300):
        deep = [deep]
    async with hostile(redis, "a"), replica(one_redis_server.url) as door:
        await until_serving(door, 1)
        for streams in (False, True):
            value = {"include_usage": deep} if name == "stream_options" else deep
            body = asked("good", stream=streams) | {name: value}
            answer = await door.post("/v1/completions", json=body)
            assert answer.status_code < 500, answer.text
