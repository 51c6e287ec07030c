"""Leases on KV that end: no wrong text, no worker left in service that may give some, and none
taken out of it for nothing. The engines only play vLLM; tests/engines has real ones."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

import httpx
import pytest
from redis.asyncio import Redis

from tests.door.conftest import replica, until_serving
from tests.e2e.engines import agent_here
from tests.eventually import eventually
from tests.fake_worker import KEYS
from tests.fakes.faults import WELL, Faults
from tests.fakes.nixl import PdEngine

LEASE_S = 3.0
pytestmark = pytest.mark.slow

FROZEN = Faults(how="stall")
COUNTED = 'kvroute_worker_kv_leases_ended{worker="p:0"}'


@dataclass
class Trio:
    """p computes prompts, d decodes, and e does both, without a way to hand KV on."""

    door: httpx.AsyncClient
    p: PdEngine
    d: PdEngine
    e: PdEngine
    redis: Redis
    agents: dict[str, Callable[[], AbstractAsyncContextManager[None]]]
    running: dict[str, AsyncExitStack]

    async def ask(self, prompt, **more):
        body = {"model": "m", "prompt": prompt, "max_tokens": 4, **more}
        return await self.door.post("/v1/completions", json=body)

    async def target_of(self, prompt):
        """Where /v1/route sends it, and from where."""
        asked = {"token_ids": prompt, "reserve": False}
        said = (await self.door.post("/v1/route", json=asked)).json()
        source = said.get("source")
        return said["worker_id"], source and source["worker_id"]

    async def tainted(self):
        records = await self.redis.hgetall(KEYS["verdicts"])
        return [name for name, text in records.items() if b"tainted" in text]

    async def begin_agent(self, name):
        await self.running[name].enter_async_context(self.agents[name]())

    async def lease_of_p(self):
        """As it is registered."""
        workers = (await self.door.get("/v1/workers")).json()["workers"]
        return next((one["kv_lease_s"] for one in workers if one["worker_id"] == "p"), 0.0)

    async def lease_ends(self):
        """Until p has let go of what d was to fetch."""
        await eventually(lambda: _value(len(self.p._kept)), lambda kept: not kept)


async def _value(value):
    return value


@asynccontextmanager
async def trio(redis, url, folder, *, kv_lease_s=LEASE_S, said_s=None, **of_each):
    """said_s: how long they are, as operators say; None: as they are."""
    async with AsyncExitStack() as opened:
        engines, three = [], Trio(*[None] * 4, redis, {}, {})
        alike = {
            "kv_transfer": "nixl",
            "kv_lease_s": said_s or kv_lease_s,
            "kv_compatible": "fakes",
        }
        for name, about in {
            "p": {"role": "prefill", **alike},
            "d": {"role": "decode", **alike},
            "e": {},
        }.items():
            engine = PdEngine(kv_lease_s=kv_lease_s, **of_each)
            await opened.enter_async_context(engine.serving(0))
            engines.append(engine)
            three.agents[name] = partial(agent_here, engine.url, url, folder / name, name, **about)
            three.running[name] = await opened.enter_async_context(AsyncExitStack())
            await three.begin_agent(name)
        three.p, three.d, three.e = engines
        three.door = await opened.enter_async_context(replica(url, policy="least_loaded"))
        await until_serving(three.door, 3)
        if of_each.get("counts", True):
            await eventually(lambda: _metrics(three.door), lambda text: COUNTED in text)
        if said_s is None:
            await eventually(three.lease_of_p, lambda lease_s: lease_s == kv_lease_s)
        yield three


async def _metrics(door):
    return (await door.get("/metrics")).text


def some_prompt(seed):
    return random.Random(seed).choices(range(1, 1000), k=200)


@pytest.mark.parametrize("tells_start", [True, False])
async def test_a_target_that_fetched_after_the_lease_is_out_until_its_engine_has_begun_anew(
    one_redis_server, redis, tmp_path, tells_start
):
    prompt = some_prompt(1)
    about = {"tells_start": tells_start}
    async with trio(redis, one_redis_server.url, tmp_path, **about) as three:
        three.d.faults = FROZEN
        asking = asyncio.create_task(three.ask(prompt))
        await eventually(lambda: _value(three.d.started), lambda number: number == 1)
        await three.lease_ends()
        three.d.faults = WELL
        answer = await asking
        assert answer.status_code == 200
        assert "wrong" not in answer.text
        assert answer.headers["x-kvroute-worker"] == "e:0"
        assert await three.tainted() == [b"d:0"]
        # It would answer that, and all that begins alike, wrongly: none of it ever goes there.
        for number in range(6):
            asked = prompt if number % 2 else prompt[:100] + some_prompt(number)
            answer = await three.ask(asked, stream=number > 2)
            assert answer.headers["x-kvroute-worker"] == "e:0"
            assert "wrong" not in answer.text
            assert await three.target_of(asked) == ("e", None)
        shown = (await three.door.get("/v1/workers")).json()
        assert "d" not in [one["worker_id"] for one in shown["workers"]]
        three.d.restart()
        await until_serving(three.door, 3)
        assert await three.tainted() == []
        for number in range(6):
            answer = await three.ask(some_prompt(10 + number))
            assert "wrong" not in answer.text
        assert three.d.transferred > 1


async def test_an_engine_whose_cache_can_be_reset_is_back_by_itself(
    one_redis_server, redis, tmp_path
):
    prompt = some_prompt(2)
    async with trio(redis, one_redis_server.url, tmp_path, reset=True) as three:
        three.d.faults = FROZEN
        asking = asyncio.create_task(three.ask(prompt))
        await eventually(lambda: _value(three.d.started), lambda number: number == 1)
        await three.lease_ends()
        three.d.faults = WELL
        assert "wrong" not in (await asking).text
        await eventually(three.tainted, lambda names: not names)
        await until_serving(three.door, 3)
        answers = [await three.ask(prompt) for _ in range(6)]
        assert all("wrong" not in answer.text for answer in answers)
        assert {answer.headers["x-kvroute-worker"] for answer in answers} == {"d:0"}


async def test_a_stream_that_has_not_begun_is_given_up(one_redis_server, redis, tmp_path):
    async with trio(redis, one_redis_server.url, tmp_path) as three:
        three.d.faults = FROZEN
        answer = await three.ask(some_prompt(3), stream=True)
        assert answer.status_code == 200
        assert answer.headers["x-kvroute-worker"] == "e:0"
        await eventually(lambda: _value(three.d.running), lambda number: number == 0)
        assert await three.tainted() == []


@pytest.mark.parametrize("who", ["door", "client"])
async def test_what_is_fetched_late_though_it_was_given_up_taints_as_well(
    one_redis_server, redis, tmp_path, who
):
    """An engine that stands still hears of that too late."""
    prompt = some_prompt(8)
    async with trio(redis, one_redis_server.url, tmp_path, is_deaf=True) as three:
        three.d.faults = FROZEN
        if who == "door":
            assert (await three.ask(prompt, stream=True)).headers["x-kvroute-worker"] == "e:0"
        else:
            asking = asyncio.create_task(three.ask(prompt))
            await eventually(lambda: _value(three.d.started), lambda number: number == 1)
            asking.cancel()
            await eventually(lambda: _value(three.d.running), lambda number: number == 0)
            await three.lease_ends()
        assert await three.tainted() == []
        three.d.faults = WELL
        for _ in range(4):
            answer = await three.ask(prompt)
            assert answer.status_code == 200
            assert "wrong" not in answer.text
            assert answer.headers["x-kvroute-worker"] == "e:0"
        assert three.d.transferred > 0
        await eventually(three.tainted, lambda names: names == [b"d:0"])


async def test_clients_that_leave_taint_nobody(one_redis_server, redis, tmp_path):
    async with trio(redis, one_redis_server.url, tmp_path, slots=1) as three:
        for number in range(3):
            three.d.faults = Faults(token_s=60.0)
            asking = asyncio.create_task(three.ask(some_prompt(20 + number)))
            await eventually(lambda: _value(three.d.started), lambda n, had=number: n == had + 1)
            asking.cancel()
            await eventually(lambda: _value(three.d.running), lambda running: running == 0)
        three.d.faults = WELL
        await three.lease_ends()
        answer = await three.ask(some_prompt(30))
        assert answer.headers["x-kvroute-source"] == "p:0"
        assert await three.tainted() == []


@pytest.mark.parametrize("how", ["whole", "queued", "computed long"])
async def test_what_takes_longer_than_the_lease_counts(one_redis_server, redis, tmp_path, how):
    """A long answer that is not streamed, a long wait in the target's queue, and a long prompt."""
    slots = {"slots": 1} if how == "queued" else {}
    async with trio(redis, one_redis_server.url, tmp_path, **slots) as three:
        long = {"max_tokens": 16}
        if how == "whole":
            three.d.faults = Faults(token_s=2 * LEASE_S / 15)
        elif how == "computed long":
            three.p.faults = Faults(prefill_s=1.5 * LEASE_S)
        else:
            three.d.faults = Faults(token_s=2 * LEASE_S / 15)
            body = {"model": "m", "prompt": [1, 2, 3], **long}
            other = asyncio.create_task(
                httpx.AsyncClient(timeout=30).post(f"{three.d.url}/v1/completions", json=body)
            )
            await eventually(lambda: _value(three.d.running))
            three.d.faults = WELL
        answer = await three.ask(some_prompt(4), stream=how != "whole", **long)
        assert answer.status_code == 200
        assert answer.headers["x-kvroute-worker"] == "d:0"
        assert answer.headers["x-kvroute-source"] == "p:0"
        assert "wrong" not in answer.text
        assert await three.tainted() == []
        assert three.p._counters["nixl_num_kv_expired_reqs_total"] == 0
        if how == "queued":
            await other


async def test_a_lease_of_others_that_ends_meanwhile_spoils_no_long_answer(
    one_redis_server, redis, tmp_path
):
    async with trio(redis, one_redis_server.url, tmp_path) as three:
        three.d.faults = Faults(token_s=2.5 * LEASE_S / 15)
        asking = asyncio.create_task(three.ask(some_prompt(5), max_tokens=16))
        await eventually(lambda: _value(three.d.transferred))
        # Nobody ever fetches this.
        params = {"do_remote_decode": True}
        body = {"model": "m", "prompt": some_prompt(6), "kv_transfer_params": params}
        async with httpx.AsyncClient() as direct:
            await direct.post(f"{three.p.url}/v1/completions", json=body)
        answer = await asking
        assert answer.headers["x-kvroute-source"] == "p:0"
        assert three.p._counters["nixl_num_kv_expired_reqs_total"] == 1
        assert await three.tainted() == []


async def test_if_no_engine_counts_a_long_answer_is_given_up_in_time(
    one_redis_server, redis, tmp_path
):
    async with trio(redis, one_redis_server.url, tmp_path, counts=False) as three:
        three.d.faults = Faults(token_s=2 * LEASE_S / 15)
        answer = await three.ask(some_prompt(7), max_tokens=16)
        assert answer.status_code == 200
        assert answer.headers["x-kvroute-worker"] == "e:0"
        assert await three.tainted() == []


async def test_a_target_whose_transfers_fail_computes(one_redis_server, redis, tmp_path):
    async with trio(redis, one_redis_server.url, tmp_path, kv_lease_s=60.0) as three:
        three.d.fails_transfers = True
        for seed in range(100, 104):
            answer = await three.ask(some_prompt(seed))
            assert answer.headers["x-kvroute-source"] == "p:0"
            assert "wrong" not in answer.text
        assert three.d._counters["nixl_num_failed_transfers_total"] == 4
        assert await three.tainted() == []
