"""Agents on a real Redis, what routers see of them, and faults between the two."""

import asyncio
from contextlib import asynccontextmanager

from app.core import registration
from app.core.errors import NamespaceMissing, RedisUnavailable
from app.core.events import Stored
from app.core.keys import Keyspace
from app.core.loads import Reservation
from app.core.types import SequenceHash, TierOverlap, WorkerKey
from app.core.worker_report import ForwardPassMetrics, GpuReadings, Speed, WorkerInfo
from app.state import leases, reservations
from app.state.overlap import match
from app.state.scripts import ScriptRunner
from tests.eventually import eventually
from tests.fake_worker import running
from workers.agent.agent import Agent, AgentSettings

LATER = 1 << 53
KEYS = Keyspace("agents")
SHARD = KEYS.of_shard(0)
CHAIN = [SequenceHash(0x1111_0000_0000_0000 + i) for i in range(8)]
"""Eight blocks of one prompt."""
MEASURED = ForwardPassMetrics(request_active_slots=3, kv_active_blocks=40, kv_total_blocks=100)
LEARNED = Speed(prefill_s_per_token=1e-4, mean_output_tokens=250.0)
READ = GpuReadings(utilisation=0.5, pcie_sent_bytes_per_s=7_000)


def info(worker_id="w0", block_size=16):
    return WorkerInfo(WorkerKey(worker_id), "http://10.0.0.1:8081", block_size, 100, 256)


def new_agent(redis, *, ttl_s=60.0, shards=1, runner=None, **changed):
    """One that renews its lease ten times a second: see conftest.py."""
    return Agent(
        runner or ScriptRunner(redis, timeout_s=5.0),
        KEYS,
        info(**changed),
        AgentSettings(lease_ttl_s=ttl_s, index_blocks=128, shards=shards),
        lambda: (MEASURED, LEARNED),
        lambda: READ,
    )


@asynccontextmanager
async def publishing(redis, observer, num=8, **options):
    """An agent of which routers see so many blocks of CHAIN."""
    async with running(new_agent(redis, **options)) as agent:
        agent.notify([Stored(tuple(CHAIN[:num]), None)])
        assert await agent.published()
        held = TierOverlap(device=num)
        await eventually(observer.overlaps, lambda o: o.get(agent.incarnation) == held)
        yield agent


class Observer:
    """What routers see, and faults of Redis."""

    def __init__(self, redis):
        self.redis = redis
        self.runner = ScriptRunner(redis, timeout_s=1.0)

    async def live(self):
        """The worker key of each incarnation that is routed to."""
        try:
            loads = (await self.runner.one(reservations.loads(KEYS))).loads
        except (NamespaceMissing, RedisUnavailable):
            return {}
        texts = [await self.redis.hget(KEYS["workers"], str(inc)) for inc in loads]
        return {
            inc: str(registration.decode_info(text).key)
            for inc, text in zip(loads, texts, strict=True)
            if text is not None
        }

    async def overlaps(self, chain=CHAIN):
        """The overlap of `chain` with each incarnation that is routed to."""
        live = await self.live()
        if not live:
            return {}
        found, _ = await match(self.runner, KEYS, [chain])
        return {inc: overlap for inc, overlap in found[0].items() if inc in live}

    async def blocks(self):
        """All entries of the index: sequence hash in hex -> owners."""
        entries = {}
        async for key in self.redis.scan_iter(match=SHARD["blocks:"].replace("{", r"\{") + "*"):
            entries |= await self.redis.hgetall(key)
        return entries

    async def applied(self, incarnation):
        """Number of the incarnation's last batch that Redis applied; None if it may not write."""
        text = await self.redis.hget(SHARD["applied"], str(incarnation))
        return int(text.split()[0]) if text else None

    async def lose_batches(self, incarnation):
        """As if Redis had failed over to a replica that got none of its batches."""
        _, nonce = (await self.redis.hget(SHARD["applied"], str(incarnation))).split()
        await self.redis.hset(SHARD["applied"], str(incarnation), b"0 " + nonce)

    async def lapse(self, incarnation):
        """Let its lease expire, as if it had not been renewed in time."""
        seconds, micros = await self.redis.time()
        just_now_ms = seconds * 1000 + micros // 1000 - 1
        await self.redis.zadd(KEYS["leases"], {str(incarnation): just_now_ms})

    async def retire(self, incarnation):
        """Retire it, as routers do some time after its lease has expired. It may renew that before
        they come, and then is not: until it is, it expires again."""

        async def retired():
            await self.lapse(incarnation)
            return await self.runner.one(leases.retire_lapsed(KEYS, grace_ms=0, heard_ms=LATER))

        await eventually(retired)

    async def reserve(self, incarnation, request_id):
        there = {"incarnation": incarnation, "max_requests": 256, "seen_total": 0}
        promised = Reservation(request_id, 100, 8500, 7, **there)
        reserve = reservations.reserve(KEYS, [promised], ttl_ms=60_000)
        assert await self.runner.one(reserve) == [None]


class FaultyRunner(ScriptRunner):
    """Gives these answers to the next calls of `apply`, which then do not reach Redis."""

    def __init__(self, redis):
        super().__init__(redis, timeout_s=1.0)
        self.answers = []

    async def run_each(self, calls):
        if self.answers and any(c.name == "apply" for c in calls):
            await asyncio.sleep(0)
            return [self.answers.pop(0)] * len(calls)
        return await super().run_each(calls)


class GatedRunner(ScriptRunner):
    """Holds back each call of `script` (`answer`: only its answer) while `gate` is not set."""

    def __init__(self, redis, script, *, answer=False):
        super().__init__(redis, timeout_s=1.0)
        self.reached = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()
        self._script = script
        self._answer = answer

    async def run_each(self, calls):
        gated = any(c.name == self._script for c in calls)
        replies = await super().run_each(calls) if not gated or self._answer else None
        if gated:
            self.reached.set()
            await self.gate.wait()
        return await super().run_each(calls) if replies is None else replies
