"""Prompts that one engine computes and another fetches: what each is asked, and what if one fails.

The engines here only say what vLLM's NixlConnector says; tests/engines has the real ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest
from aiohttp import web
from redis.asyncio import Redis

from app.core.worker_report import Role
from app.local.redis_server import EmbeddedRedis
from tests.door.conftest import completing, replica, until_serving
from tests.eventually import eventually
from tests.fake_worker import KEYS

PROMPT = list(range(40))
PARAMS = {"remote_engine_id": "e", "remote_block_ids": [[1, 2]], "remote_num_tokens": 40}
DO = {
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
    "do_remote_decode": True,
    "do_remote_prefill": False,
}


class Engine:
    """Answers as it is told, and keeps what it was asked."""

    def __init__(self, text: str, params: dict[str, Any] | None = None, status: int = 200) -> None:
        self.asked: list[dict[str, Any]] = []
        self.text, self.params, self.status = text, params, status
        self.holds_up = asyncio.Event()
        self.holds_up.set()

    async def complete(self, request: web.Request) -> web.Response:
        self.asked.append(await request.json())
        await self.holds_up.wait()
        usage = {"prompt_tokens": 40, "completion_tokens": 1, "total_tokens": 41}
        answer: dict[str, Any] = {"choices": [{"text": self.text}], "usage": usage}
        if self.params:
            answer["kv_transfer_params"] = self.params
        return web.json_response(answer, status=self.status)


@asynccontextmanager
async def pair(
    redis: Redis,
    url: str,
    source: Engine,
    target: Engine,
    *,
    registered_s: float = 0.0,
    **settings: Any,
) -> AsyncIterator[httpx.AsyncClient]:
    """A door before a worker that prefills and one that decodes; requests are always split.

    registered_s: the lease that both say they give.
    """
    about: dict[str, Any] = {"kv_transfer": "nixl", "kv_lease_s": registered_s}
    async with AsyncExitStack() as opened:
        for name, engine, role in (("p", source, Role.PREFILL), ("d", target, Role.DECODE)):
            worker = completing(redis, name, engine.complete, "vllm 0.32.0", role=role, **about)
            await opened.enter_async_context(worker)
        door = replica(url, policy="least_loaded", **settings)
        client = await opened.enter_async_context(door)
        await until_serving(client, 2)
        yield client


async def ask(door: httpx.AsyncClient, **more: Any) -> httpx.Response:
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 9, **more}
    return await door.post("/v1/completions", json=body)


async def blocks_reserved(redis: Redis) -> list[int]:
    loads: dict[bytes, bytes] = await redis.hgetall(KEYS["load"])
    return [int(load.split()[4]) for _, load in sorted(loads.items())]


async def test_the_source_is_asked_for_one_token_and_the_target_told_where_the_kv_is(
    one_redis_server: EmbeddedRedis, redis: Redis
) -> None:
    source, target = Engine("x", PARAMS), Engine("all of it")
    async with pair(redis, one_redis_server.url, source, target) as door:
        answer = await ask(door, min_tokens=3, temperature=0)
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["text"] == "all of it"
        assert answer.headers["x-kvroute-worker"] == "d:0"
        assert answer.headers["x-kvroute-source"] == "p:0"
        await eventually(lambda: blocks_reserved(redis), lambda blocks: blocks == [0, 0])
    [asked] = source.asked
    assert asked == {
        "model": "m",
        "prompt": PROMPT,
        "max_tokens": 1,
        "temperature": 0,
        "stream": False,
        "kv_transfer_params": DO,
    }
    [asked] = target.asked
    assert asked == {
        "model": "m",
        "prompt": PROMPT,
        "max_tokens": 9,
        "min_tokens": 3,
        "temperature": 0,
        "kv_transfer_params": PARAMS,
    }


@pytest.mark.parametrize(
    "more", [{"n": 2}, {"echo": True}, {"prompt_logprobs": 1}, {"prompt": [PROMPT, PROMPT]}]
)
async def test_what_cannot_be_split_goes_to_one_worker_alone(
    one_redis_server: EmbeddedRedis, redis: Redis, more: dict[str, Any]
) -> None:
    source, target = Engine("x", PARAMS), Engine("all of it")
    async with pair(redis, one_redis_server.url, source, target, strict_roles=True) as door:
        answer = await ask(door, **more)
        assert answer.status_code == 200
        assert "x-kvroute-source" not in answer.headers
    assert not source.asked
    assert "kv_transfer_params" not in target.asked[0]


@pytest.mark.parametrize("status", [500, 503])
async def test_without_its_source_a_request_is_answered_by_its_worker_alone(
    one_redis_server: EmbeddedRedis, redis: Redis, status: int
) -> None:
    source, target = Engine("x", PARAMS, status), Engine("all of it")
    async with pair(redis, one_redis_server.url, source, target) as door:
        answer = await ask(door)
        assert answer.json()["choices"][0]["text"] == "all of it"
        assert "x-kvroute-source" not in answer.headers
        await eventually(lambda: blocks_reserved(redis), lambda blocks: blocks == [0, 0])
    assert len(source.asked) == 1
    assert "kv_transfer_params" not in target.asked[0]


async def test_a_source_that_hands_on_nothing_costs_no_request(
    one_redis_server: EmbeddedRedis, redis: Redis
) -> None:
    source, target = Engine("x"), Engine("all of it")
    async with pair(redis, one_redis_server.url, source, target) as door:
        assert (await ask(door)).json()["choices"][0]["text"] == "all of it"
    assert "kv_transfer_params" not in target.asked[0]


@pytest.mark.parametrize(("own_s", "registered_s"), [(0.3, 0.0), (0.3, 30.0), (30.0, 0.3)])
async def test_no_answer_counts_that_began_after_the_lease_of_its_source(
    one_redis_server: EmbeddedRedis, redis: Redis, own_s: float, registered_s: float
) -> None:
    """Its text may be made of the KV of others, and so may the next one from that worker."""
    source, target, other = Engine("x", PARAMS), Engine("wrong"), Engine("right")
    target.holds_up.clear()
    url = one_redis_server.url
    leases = {"kv_lease_s": own_s, "registered_s": registered_s}
    async with pair(redis, url, source, target, **leases) as door:
        asking = asyncio.create_task(ask(door))
        await eventually(lambda: _len(target.asked))
        async with completing(redis, "e", other.complete, "vllm 0.32.0") as e:
            await until_serving(door, 3)
            await asyncio.sleep(0.5)  # past the lease
            target.holds_up.set()
            answer = await asking
            assert answer.json()["choices"][0]["text"] == "right"
            assert "x-kvroute-source" not in answer.headers
            await eventually(lambda: blocks_reserved(redis), lambda blocks: blocks == [0, 0, 0])
            await e.retire()
        assert "kv_transfer_params" not in other.asked[0]
        target.holds_up.clear()
        asking = asyncio.create_task(ask(door))
        await eventually(lambda: _len(target.asked), lambda number: number == 2)
        await asyncio.sleep(0.5)
        target.holds_up.set()
        answer = await asking
        assert answer.status_code == 502
        assert "worker d:0: may hold KV that is not its prompt's" in answer.text


async def test_a_source_that_was_held_up_is_not_believed(
    one_redis_server: EmbeddedRedis, redis: Redis
) -> None:
    """Its lease may have begun, and ended, long before it answered."""
    source, target = Engine("x", PARAMS), Engine("all of it")
    source.holds_up.clear()
    async with pair(redis, one_redis_server.url, source, target, kv_lease_s=0.6) as door:
        asking = asyncio.create_task(ask(door))
        await eventually(lambda: _len(source.asked))
        await asyncio.sleep(0.4)  # past a third of the lease
        source.holds_up.set()
        assert (await asking).json()["choices"][0]["text"] == "all of it"
    assert "kv_transfer_params" not in target.asked[0]


async def test_a_target_that_fails_takes_nobody_elses_blocks_with_it(
    one_redis_server: EmbeddedRedis, redis: Redis
) -> None:
    source, target, other = Engine("x", PARAMS), Engine("no", status=500), Engine("all of it")
    async with (
        pair(redis, one_redis_server.url, source, target) as door,
        completing(redis, "e", other.complete, "vllm 0.32.0", kv_transfer="nixl"),
    ):
        await until_serving(door, 3)
        answers = [await ask(door) for _ in range(4)]
        assert {answer.json()["choices"][0]["text"] for answer in answers} == {"all of it"}
    assert target.asked
    assert all(body["kv_transfer_params"] == PARAMS for body in other.asked)


async def test_a_client_that_hangs_up_between_the_steps_leaves_what_the_source_keeps(
    one_redis_server: EmbeddedRedis, redis: Redis
) -> None:
    source, target = Engine("x", PARAMS), Engine("all of it")
    target.holds_up.clear()
    async with pair(redis, one_redis_server.url, source, target, kv_lease_s=2.0) as door:
        asking = asyncio.create_task(ask(door))
        await eventually(lambda: _len(target.asked))
        asking.cancel()
        await eventually(lambda: blocks_reserved(redis), lambda blocks: blocks == [10, 0])
        await eventually(lambda: blocks_reserved(redis), lambda blocks: blocks == [0, 0])
        target.holds_up.set()


async def _len(asked: list[dict[str, Any]]) -> int:
    return len(asked)
