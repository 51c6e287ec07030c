"""Engines that others use, too: what they count beyond our own requests is load."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import pytest

from tests.door.conftest import MODEL, replica, until_serving, worker_here
from tests.e2e.engines import agent_here
from tests.eventually import eventually
from tests.fakes.engine import fake_engine
from tests.fakes.faults import WELL, Faults

FOREIGN = Faults(more_running=200, more_waiting=200, kv_usage=1.0)
AT_ONCE = 24


@asynccontextmanager
async def three_engines(url, memory, **settings):
    """Each with an agent, behind one replica."""
    async with AsyncExitStack() as opened:
        engines = []
        for name in "abc":
            engine = await opened.enter_async_context(fake_engine(prefill_s=0.02, token_s=0.005))
            engines.append(engine)
            beside = agent_here(engine.url, url, memory, name)
            await opened.enter_async_context(beside)
        door = await opened.enter_async_context(replica(url, **settings))
        await until_serving(door, 3)
        yield engines, door


async def play(door, begin):
    """Requests that share nothing, all at once."""

    async def ask(number):
        prompt = [1000 * number + i for i in range(100)]
        body = {"model": "m", "prompt": prompt, "max_tokens": 4}
        assert (await door.post("/v1/completions", json=body)).status_code == 200

    await asyncio.gather(*(ask(begin + number) for number in range(AT_ONCE)))


async def others(door):
    answer = await door.get("/v1/workers")
    if answer.status_code == 503:  # beside a real engine, Redis may answer late
        return []
    shown = answer.json()["workers"]
    by_name = sorted((worker["worker_id"], worker["others_requests"]) for worker in shown)
    return [number for _, number in by_name]


@pytest.mark.parametrize(
    "policy",
    [
        "latency",
        *(
            pytest.param(policy, marks=pytest.mark.slow)
            for policy in ("blocks", "least_loaded", "power_of_two")
        ),
    ],
)
async def test_an_engine_that_others_keep_busy_is_left_alone_and_then_gets_its_third(
    one_redis_server, tmp_path, policy
):
    async with three_engines(one_redis_server.url, tmp_path, policy=policy) as (engines, door):
        busy = engines[0]
        busy.faults = FOREIGN
        await eventually(lambda: others(door), lambda seen: seen[0] > 390)
        shown = (await door.get("/metrics")).text
        assert shown.count("\nkvroute_worker_others_requests{") == 1
        await play(door, 0)
        assert busy.started <= AT_ONCE // 12
        assert min(engine.started for engine in engines[1:]) >= AT_ONCE // 4
        asked = {"token_ids": [1] * 100, "reserve": False, "explain": True}
        explained = (await door.post("/v1/route", json=asked)).json()["candidates"]
        beyond = {one["worker_id"]: one["others_requests"] for one in explained}
        assert beyond["a"] > 390
        assert beyond["b"] == beyond["c"] == 0

        busy.faults = WELL
        await eventually(lambda: others(door), lambda seen: seen == [0, 0, 0])
        before = busy.started
        for turn in range(1, 4):
            await play(door, turn * AT_ONCE)
        assert busy.started - before >= 3 * AT_ONCE / 6, "half of a fair third, at least"


async def test_own_requests_are_nobody_elses(one_redis_server, tmp_path):
    async with three_engines(one_redis_server.url, tmp_path) as (engines, door):
        seen = []

        async def look():
            while True:
                seen.append(await others(door))
                await asyncio.sleep(0.05)

        looking = asyncio.create_task(look())
        for turn in range(5):
            for engine in engines:
                engine.faults = Faults(token_s=0.05 * turn)
            await play(door, turn * AT_ONCE)
        looking.cancel()
        await asyncio.wait([looking])
        assert sum(engine.finished for engine in engines) == 5 * AT_ONCE
        assert len(seen) > 10
        assert max(map(max, seen)) == 0


async def test_what_clients_send_to_our_own_worker_directly_is_load_of_others(one_redis_server):
    url = one_redis_server.url
    async with (
        worker_here(url, "a", speedup=1) as direct,
        worker_here(url, "b", speedup=1),
        replica(url) as door,
        httpx.AsyncClient(timeout=60) as http,
    ):
        await until_serving(door, 2)
        body = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 2000, "ignore_eos": True}
        asking = [
            asyncio.create_task(http.post(f"{direct}/v1/completions", json=body)) for _ in range(10)
        ]
        # One too many is forgiven.
        await eventually(lambda: others(door), lambda seen: seen == [9, 0])
        for task in asking:
            task.cancel()
        await asyncio.wait(asking)
        await eventually(lambda: others(door), lambda seen: seen == [0, 0])
