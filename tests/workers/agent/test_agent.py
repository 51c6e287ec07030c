"""The agent with a real Redis; each test stands in for the engine and sends it events."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import stamina
from redis.asyncio import Redis

import workers.agent.agent
from app.core import worker_report
from app.core.errors import (
    NamespaceMismatch,
    NamespaceMissing,
    RedisFull,
    RedisUnavailable,
    WorkerReplaced,
)
from app.core.events import Cleared, Removed, Stored
from app.core.keys import METRICS_INTERVAL_S, METRICS_MAXLEN, Keyspace
from app.core.loads import Reservation, Wish
from app.core.types import Incarnation, SequenceHash, Tier, TierOverlap, WorkerInfo, WorkerKey
from app.core.worker_report import ForwardPassMetrics, GpuReadings, Speed
from app.local.redis_server import EmbeddedRedis
from app.state import leases, reservations
from app.state.client import Client
from app.state.connect import connect
from app.state.overlap import match
from app.state.scripts import Call, ScriptRunner
from tests.eventually import eventually
from tests.redis_servers import stopped
from workers.agent.agent import BATCH_BLOCKS, Agent, AgentSettings
from workers.agent.ownership import Ownership

LATER = 1 << 53
KEYS = Keyspace("agents")
SHARD = KEYS.of_shard(0)
CHAIN = [SequenceHash(0x1111_0000_0000_0000 + i) for i in range(8)]
"""Eight blocks of one prompt."""
MEASURED = ForwardPassMetrics(request_active_slots=3, kv_active_blocks=40, kv_total_blocks=100)
LEARNED = Speed(prefill_s_per_token=1e-4, mean_output_tokens=250.0)
READ = GpuReadings(utilisation=0.5, pcie_sent_bytes_per_s=7_000)


def info(worker_id: str = "w0", block_size: int = 16) -> WorkerInfo:
    return WorkerInfo(WorkerKey(worker_id), "http://10.0.0.1:8081", block_size, 100, 256)


def new_agent(
    redis: Redis,
    *,
    ttl_s: float = 0.3,
    shards: int = 1,
    runner: ScriptRunner | None = None,
    **changed: Any,
) -> Agent:
    return Agent(
        runner or ScriptRunner(redis, timeout_s=0.2),
        KEYS,
        info(**changed),
        AgentSettings(lease_ttl_s=ttl_s, index_blocks=128, shards=shards),
        lambda: (MEASURED, LEARNED),
        lambda: READ,
    )


@asynccontextmanager
async def running(agent: Agent) -> AsyncIterator[Agent]:
    """Start the agent and run it; its incarnation is not retired at the end."""
    await agent.start()
    task = asyncio.ensure_future(agent.run())
    try:
        yield agent
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


class Observer:
    """What routers see, and faults of Redis."""

    def __init__(self, redis: Redis) -> None:
        self.redis: Any = redis
        self.runner = ScriptRunner(redis, timeout_s=1.0)

    async def live(self) -> dict[Incarnation, str]:
        """The worker key of each incarnation that is routed to."""
        try:
            loads = (await self.runner.one(reservations.loads(KEYS))).loads
        except (NamespaceMissing, RedisUnavailable):
            return {}
        texts = [await self.redis.hget(KEYS["workers"], str(inc)) for inc in loads]
        return {
            inc: str(leases.decode_info(text).key)
            for inc, text in zip(loads, texts, strict=True)
            if text is not None
        }

    async def overlaps(
        self, chain: Sequence[SequenceHash] = CHAIN
    ) -> dict[Incarnation, TierOverlap]:
        """The overlap of `chain` with each incarnation that is routed to."""
        live = await self.live()
        if not live:
            return {}
        found, _ = await match(self.runner, KEYS, [chain])
        return {inc: overlap for inc, overlap in found[0].items() if inc in live}

    async def blocks(self) -> dict[bytes, bytes]:
        """All entries of the index: sequence hash in hex -> owners."""
        entries: dict[bytes, bytes] = {}
        async for key in self.redis.scan_iter(match=SHARD["blocks:"].replace("{", r"\{") + "*"):
            entries |= await self.redis.hgetall(key)
        return entries

    async def applied(self, incarnation: int) -> int | None:
        """Number of the incarnation's last batch that Redis applied; None if it may not write."""
        text = await self.redis.hget(SHARD["applied"], str(incarnation))
        return int(text.split()[0]) if text else None

    async def lose_batches(self, incarnation: int) -> None:
        """As if Redis had failed over to a replica that got none of its batches."""
        _, nonce = (await self.redis.hget(SHARD["applied"], str(incarnation))).split()
        await self.redis.hset(SHARD["applied"], str(incarnation), b"0 " + nonce)

    async def lapse(self, incarnation: Incarnation) -> None:
        """Let its lease expire, as if it had not been renewed in time."""
        seconds, micros = await self.redis.time()
        just_now_ms = seconds * 1000 + micros // 1000 - 1
        await self.redis.zadd(KEYS["leases"], {str(incarnation): just_now_ms})

    async def reserve(self, incarnation: Incarnation, request_id: str) -> None:
        reservation = Reservation(request_id, prefill_tokens=100, prefill_us=8500, blocks=7)
        wish = Wish(incarnation, reservation, max_requests=256, seen_total=0)
        reserve = reservations.reserve(KEYS, [wish], ttl_ms=60_000)
        assert await self.runner.one(reserve) == [None]


@pytest.fixture
def observer(redis: Redis) -> Observer:
    return Observer(redis)


async def test_a_worker_whose_agent_started_is_routed_to(redis: Redis, observer: Observer) -> None:
    agent = new_agent(redis)
    assert await observer.live() == {}
    await agent.start()
    assert agent.incarnation == 1
    assert await observer.live() == {1: "w0:0"}
    assert leases.decode_info(await observer.redis.hget(KEYS["workers"], "1")) == info()


async def test_a_running_agent_follows_a_redis_that_moves_without_a_failed_call(
    one_redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    follows = asyncio.Event()

    async def follow(_: Client) -> None:
        follows.set()

    monkeypatch.setattr(Client, "follow", follow)
    async with connect(one_redis_server.url) as redis, running(new_agent(redis)):
        await follows.wait()


async def test_a_worker_whose_agent_stopped_is_no_longer_routed_to(
    redis: Redis, observer: Observer
) -> None:
    agent = new_agent(redis, ttl_s=60.0)
    await agent.start()
    agent.notify([Stored(tuple(CHAIN), None)])
    settled = asyncio.ensure_future(agent.settled())
    await asyncio.sleep(0)
    await agent.stop()
    assert await observer.live() == {}
    # Nothing is published any more, so what goes now is not waited for.
    assert await settled
    agent.notify([Removed(tuple(CHAIN))])
    assert await agent.settled()
    assert await redis.exists(KEYS["current"], KEYS["leases"], KEYS["load"]) == 0


async def test_an_agent_that_never_started_has_nothing_to_stop(redis: Redis) -> None:
    await new_agent(redis).stop()
    assert await redis.keys() == []


async def test_a_block_size_other_than_the_namespaces_is_refused(redis: Redis) -> None:
    await new_agent(redis, worker_id="w0", block_size=16).start()
    with pytest.raises(
        NamespaceMismatch, match="w1:0 has block_size 32, but namespace agents has 16"
    ):
        await new_agent(redis, worker_id="w1", block_size=32).start()


async def test_the_index_shows_what_the_engine_reported(redis: Redis, observer: Observer) -> None:
    async with running(new_agent(redis)) as agent:
        agent.notify([Stored(tuple(CHAIN[:6]), None)])
        await eventually(observer.overlaps, lambda o: o == {1: TierOverlap(device=6)})
        agent.notify(
            [
                Stored((CHAIN[4], CHAIN[5]), CHAIN[3], Tier.HOST),
                Removed((CHAIN[4], CHAIN[5])),
            ]
        )
        await eventually(observer.overlaps, lambda o: o == {1: TierOverlap(device=4, host=2)})
        agent.notify([Removed((CHAIN[2],))])
        await eventually(observer.overlaps, lambda o: o == {1: TierOverlap(device=2)})
        agent.notify([Stored((CHAIN[2],), CHAIN[1])])
        await eventually(observer.overlaps, lambda o: o == {1: TierOverlap(device=4, host=2)})
        agent.notify([Cleared()])
        await eventually(observer.blocks, lambda blocks: blocks == {})


@pytest.mark.parametrize("drain_blocks", [workers.agent.agent.DRAIN_BLOCKS, 256])
async def test_events_beyond_one_round_trip_or_drain_are_all_published(
    redis: Redis, observer: Observer, monkeypatch: pytest.MonkeyPatch, drain_blocks: int
) -> None:
    # One round trip takes 8 batches of 256 blocks; these 10 batches need a second one.
    monkeypatch.setattr(workers.agent.agent, "DRAIN_BLOCKS", drain_blocks)
    chain = [SequenceHash(0x2222_0000_0000_0000 + i) for i in range(BATCH_BLOCKS * 9 + 1)]
    async with running(new_agent(redis)) as agent:
        agent.notify([Stored(tuple(chain), None)])

        async def overlap() -> dict[Incarnation, TierOverlap]:
            return await observer.overlaps(chain)

        await eventually(overlap, lambda o: o == {1: TierOverlap(device=len(chain))})
        assert await observer.applied(1) == 10


async def test_the_lease_is_renewed_while_the_agent_runs(redis: Redis, observer: Observer) -> None:
    async with running(new_agent(redis, ttl_s=0.3)) as agent:
        registered = await redis.zscore(KEYS["leases"], "1")
        assert registered is not None

        async def expiry_ms() -> float:
            return await redis.zscore(KEYS["leases"], "1") or 0.0

        # Three lifetimes later; without renewals it would have lapsed long before.
        await eventually(expiry_ms, lambda at: at >= registered + 900)
        assert await observer.live() == {1: "w0:0"}
        assert agent.resyncs == 0


class BatchRunner(ScriptRunner):
    """Notes how many batches each round trip has; calls `on_trip` at each."""

    def __init__(self, redis: Redis, on_trip: Callable[[int], None]) -> None:
        super().__init__(redis, timeout_s=5.0)
        self.batches: list[int] = []
        self._on_trip = on_trip

    async def run_each(self, calls: Sequence[Call[Any]]) -> list[Any]:
        if calls[0].script.name == "apply":
            self.batches.append(len(calls))
            self._on_trip(len(self.batches))
        return await super().run_each(calls)


@pytest.mark.parametrize(
    ("busy_from", "expected", "num_pauses"),
    [(99, [1, 2, 4, 8, 8, 8, 1], 0), (3, [1, 2, 4, *[1] * 25], 25)],
)
async def test_the_busier_redis_is_the_less_an_agent_sends_together_and_the_less_often(
    redis: Redis,
    monkeypatch: pytest.MonkeyPatch,
    busy_from: int,
    expected: list[int],
    num_pauses: int,
) -> None:
    def on_trip(number: int) -> None:
        monkeypatch.setattr("workers.agent.agent.BUSY_S", -1.0 if number >= busy_from else 60.0)

    delays: list[float] = []
    sleep = asyncio.sleep

    async def noting(delay: float) -> None:
        delays.append(delay)
        await sleep(delay)

    monkeypatch.setattr("workers.agent.agent.BATCH_BLOCKS", 4)
    monkeypatch.setattr("workers.agent.agent.BUSY_PAUSES", 1e9)
    monkeypatch.setattr("workers.agent.agent.MAX_PAUSE_S", 0.00123)
    monkeypatch.setattr("workers.agent.agent.asyncio.sleep", noting)
    runner = BatchRunner(redis, on_trip)
    agent = new_agent(redis, ttl_s=30.0, runner=runner)
    blocks = tuple(SequenceHash(n) for n in range(1, 129))
    agent.notify([Stored(blocks, None)])
    async with running(agent):
        assert await agent.settled()
    assert runner.batches == expected
    assert delays.count(0.00123) == num_pauses


class DeafRunner(ScriptRunner):
    """The first renewal gets no answer and times out after `timeout_s`."""

    def __init__(self, redis: Redis, timeout_s: float) -> None:
        super().__init__(redis, timeout_s)
        self.renewed_at: list[float] = []
        self._patience_s = timeout_s

    async def run_each(self, calls: Sequence[Call[Any]]) -> list[Any]:
        if calls[0].script.name == "lease_renew":
            self.renewed_at.append(asyncio.get_running_loop().time())
            if len(self.renewed_at) == 1:
                await asyncio.sleep(self._patience_s)
                raise RedisUnavailable("no answer")
        return await super().run_each(calls)


async def test_an_unanswered_renewal_is_retried_before_the_lease_lapses(
    redis: Redis, observer: Observer
) -> None:
    # Sent at 0.2 s and timed out at 0.45 s; a further pause of 0.2 s would exceed the TTL of 0.6 s.
    runner = DeafRunner(redis, timeout_s=0.25)
    async with running(new_agent(redis, ttl_s=0.6, runner=runner)) as agent:

        async def renewals() -> list[float]:
            return runner.renewed_at

        first, second = (await eventually(renewals, lambda seen: len(seen) >= 2))[:2]
        assert 0.25 <= second - first < 0.35
        await eventually(renewals, lambda seen: len(seen) >= 4)
        assert agent.resyncs == 0
        assert await observer.live() == {1: "w0:0"}


async def test_a_lease_that_is_made_to_lapse_is_renewed_soon_however_long_it_is(
    redis: Redis, observer: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.agent.agent.MAX_RENEWAL_S", 0.05)
    async with running(new_agent(redis, ttl_s=600)):
        await redis.zadd(KEYS["leases"], {"1": 1})
        await eventually(observer.live, lambda live: live == {1: "w0:0"})


async def test_the_more_workers_there_are_the_longer_an_agent_pauses(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the audits of 1,000 workers would take all of Redis's time."""
    pauses: dict[str, float] = {}
    sleep = asyncio.sleep

    async def noting(delay: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        pauses[task.get_coro().__name__] = delay  # type: ignore[union-attr]
        await sleep(min(delay, 0.01))

    async def look() -> tuple[float | None, float | None]:
        return pauses.get("_publish_metrics"), pauses.get("_audit")

    monkeypatch.setattr("workers.agent.agent.asyncio.sleep", noting)
    async with running(new_agent(redis)):
        await eventually(look, lambda now: now == (0.1, 2.0))
        await redis.zadd(KEYS["leases"], {str(n): LATER for n in range(2, 1025)})
        await eventually(look, lambda now: now == (pytest.approx(0.4), 64.0 / 2))


class RenewalRunner(ScriptRunner):
    """Notes of each renewal whether it has the load counted."""

    def __init__(self, redis: Redis) -> None:
        super().__init__(redis, timeout_s=1.0)
        self.thorough: list[int] = []

    async def run_each(self, calls: Sequence[Call[Any]]) -> list[Any]:
        self.thorough += [c.args[-1] for c in calls if c.script.name == "lease_renew"]
        return await super().run_each(calls)


async def test_loads_of_many_workers_are_counted_less_often(redis: Redis) -> None:
    runner = RenewalRunner(redis)

    async def renewals() -> list[int]:
        return runner.thorough

    async with running(new_agent(redis, ttl_s=0.03, runner=runner)):
        first = await eventually(renewals, lambda found: len(found) >= 6)
        assert first[:6] == [0, 0, 1] * 2
        await redis.zadd(KEYS["leases"], {str(n): LATER for n in range(2, 1025)})
        del first[:]
        later = await eventually(renewals, lambda found: len(found) >= 30)
    at = [i for i, thorough in enumerate(later) if thorough]
    assert at[-1] - at[-2] == 12


async def test_the_lease_lapses_without_renewals(redis: Redis, observer: Observer) -> None:
    await new_agent(redis, ttl_s=0.05).start()
    await eventually(observer.live, lambda live: live == {})


async def test_an_agent_whose_incarnation_was_retired_publishes_everything_again(
    redis: Redis, observer: Observer
) -> None:
    async with running(new_agent(redis)) as agent:
        agent.notify([Stored(tuple(CHAIN[:6]), None), Stored((CHAIN[6],), CHAIN[5], Tier.HOST)])
        held = TierOverlap(device=6, host=1)
        await eventually(observer.overlaps, lambda o: o == {1: held})
        await observer.lapse(Incarnation(1))
        await observer.runner.one(leases.lapse(KEYS, grace_ms=0, heard_ms=LATER))
        await eventually(observer.overlaps, lambda o: o == {2: held})

        async def current() -> dict[bytes, bytes]:
            return await redis.hgetall(KEYS["current"])

        assert await current() == {b"w0:0": b"2"}
        # From now on it is 2 that renewals restore.
        await redis.delete(KEYS["current"])
        await eventually(current, lambda of_workers: of_workers == {b"w0:0": b"2"})
        # Further events are published under the new incarnation.
        agent.notify([Stored((CHAIN[6],), CHAIN[5])])
        await eventually(observer.overlaps, lambda o: o == {2: TierOverlap(device=7)})


async def test_requests_in_flight_outlive_a_lapsed_lease(redis: Redis, observer: Observer) -> None:
    async with running(new_agent(redis)):
        await observer.reserve(Incarnation(1), "req-1")
        await observer.lapse(Incarnation(1))
        # As routers do all the time.
        assert await observer.runner.one(leases.lapse(KEYS, grace_ms=5000, heard_ms=LATER)) == 0
        await eventually(observer.live, lambda live: live == {1: "w0:0"})
        loads = (await observer.runner.one(reservations.loads(KEYS))).loads
        assert {inc: (load.requests, load.blocks) for inc, load in loads.items()} == {1: (1, 7)}
        assert await observer.runner.one(reservations.release(KEYS, "req-1"))


async def test_the_index_is_restored_after_redis_is_flushed(
    redis: Redis, observer: Observer
) -> None:
    async with running(new_agent(redis)) as agent:
        agent.notify([Stored(tuple(CHAIN), None)])
        await eventually(observer.overlaps, lambda o: o == {1: TierOverlap(device=8)})
        await redis.flushall()
        # The agent learns of it from its next renewal, not from an event.
        await eventually(observer.overlaps, lambda o: o == {1: TierOverlap(device=8)})
        assert await observer.live() == {1: "w0:0"}


async def test_the_next_batch_notices_that_redis_was_flushed(
    redis: Redis, observer: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.agent.agent.AUDIT_INTERVAL_S", 3600.0)
    async with running(new_agent(redis, ttl_s=600.0)) as agent:
        agent.notify([Stored(tuple(CHAIN[:6]), None)])
        await eventually(observer.overlaps, lambda o: o == {1: TierOverlap(device=6)})
        await redis.flushall()
        agent.notify([Stored(tuple(CHAIN[6:]), CHAIN[5])])
        await eventually(observer.overlaps, lambda o: o == {1: TierOverlap(device=8)})
        assert agent.resyncs == 1


async def test_a_batch_that_redis_lost_leads_to_a_resync(redis: Redis, observer: Observer) -> None:
    async with running(new_agent(redis, ttl_s=600.0)) as agent:
        agent.notify([Stored(tuple(CHAIN[:4]), None)])
        await eventually(observer.overlaps, lambda o: o == {1: TierOverlap(device=4)})
        await observer.reserve(Incarnation(1), "req-1")
        await redis.delete(*[key async for key in redis.scan_iter(match="*blocks:*")])
        await observer.lose_batches(1)
        agent.notify([Stored((CHAIN[4],), CHAIN[3])])
        await eventually(observer.overlaps, lambda o: o == {2: TierOverlap(device=5)})
        assert agent.resyncs == 1
        # Requests in flight are the new incarnation's.
        loads = (await observer.runner.one(reservations.loads(KEYS))).loads
        assert {inc: load.requests for inc, load in loads.items()} == {2: 1}


class FaultyRunner(ScriptRunner):
    """Gives these answers to the next calls of `apply`, which then do not reach Redis."""

    def __init__(self, redis: Redis) -> None:
        super().__init__(redis, timeout_s=1.0)
        self.answers: list[bool | RedisFull] = []

    async def run_each(self, calls: Sequence[Call[Any]]) -> list[Any]:
        if self.answers and any(c.script.name == "apply" for c in calls):
            await asyncio.sleep(0)
            return [self.answers.pop(0)] * len(calls)
        return await super().run_each(calls)


async def test_an_incarnation_with_a_refused_batch_is_not_activated(
    redis: Redis, observer: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.agent.agent.AUDIT_INTERVAL_S", 3600.0)
    runner = FaultyRunner(redis)
    async with running(new_agent(redis, ttl_s=60.0, runner=runner)) as agent:
        agent.notify([Stored(tuple(CHAIN[:4]), None)])
        await agent.settled()
        runner.answers = [False, False]
        agent.notify([Stored(tuple(CHAIN[4:]), CHAIN[3])])
        await eventually(observer.overlaps, lambda o: o == {3: TierOverlap(device=8)})


async def test_a_send_drains_until_nothing_is_pending_or_redis_is_full(
    redis: Redis, observer: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers.agent.agent, "DRAIN_BLOCKS", 1)
    roots = [SequenceHash(n << 60) for n in range(1, 4)]  # each is drained on its own
    runner = FaultyRunner(redis)
    agent = new_agent(redis, ttl_s=60.0, runner=runner)
    await agent.start()
    agent.notify([Stored((root,), None) for root in roots])
    runner.answers = [RedisFull("out of memory")] * 100
    assert await agent._send(0, Incarnation(1))
    assert await observer.blocks() == {}
    assert len(runner.answers) == 99
    runner.answers.clear()
    assert await agent._send(0, Incarnation(1))
    assert len(await observer.blocks()) == 3


class GatedRunner(ScriptRunner):
    """Holds back each call of `script` (`answer`: only its answer) while `gate` is not set."""

    def __init__(self, redis: Redis, script: str, *, answer: bool = False) -> None:
        super().__init__(redis, timeout_s=1.0)
        self.reached = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()
        self._script = script
        self._answer = answer

    async def run_each(self, calls: Sequence[Call[Any]]) -> list[Any]:
        gated = any(c.script.name == self._script for c in calls)
        replies = await super().run_each(calls) if not gated or self._answer else None
        if gated:
            self.reached.set()
            await self.gate.wait()
        return await super().run_each(calls) if replies is None else replies


async def test_a_resync_abandons_a_batch_that_is_still_under_way(
    redis: Redis, observer: Observer
) -> None:
    runner = GatedRunner(redis, "apply")
    async with running(new_agent(redis, runner=runner)) as agent:
        agent.notify([Stored(tuple(CHAIN[:4]), None)])
        await agent.settled()
        runner.gate.clear()
        runner.reached.clear()
        agent.notify([Stored(tuple(CHAIN[4:]), CHAIN[3])])
        await runner.reached.wait()
        await observer.lapse(Incarnation(1))
        await observer.runner.one(leases.lapse(KEYS, grace_ms=0, heard_ms=LATER))
        await eventually(observer.live, lambda live: live == {2: "w0:0"})
        runner.gate.set()
        await eventually(observer.overlaps, lambda o: o == {2: TierOverlap(device=8)})
        assert agent.resyncs == 1


@pytest.mark.parametrize("drain_blocks", [workers.agent.agent.DRAIN_BLOCKS, 1])
async def test_routers_see_the_old_incarnation_until_the_new_one_is_complete(
    redis: Redis, observer: Observer, monkeypatch: pytest.MonkeyPatch, drain_blocks: int
) -> None:
    monkeypatch.setattr(workers.agent.agent, "DRAIN_BLOCKS", drain_blocks)
    chain = [SequenceHash(0x3333_0000_0000_0000 + i) for i in range(40)]
    runner = GatedRunner(redis, "activate")

    async def overlap() -> dict[Incarnation, TierOverlap]:
        return await observer.overlaps(chain)

    async with running(new_agent(redis, runner=runner)) as agent:
        agent.notify([Stored(tuple(chain), None)])
        await eventually(overlap, lambda o: o == {1: TierOverlap(device=40)})
        runner.gate.clear()
        runner.reached.clear()
        await observer.lose_batches(1)
        agent.notify([Removed((chain[39],))])
        await runner.reached.wait()

        # The blocks are published under 2 already, but routers see 1 until 2 is activated, even if
        # that takes longer than a lease.
        shown = await observer.blocks()
        assert [shown[b"%016x" % block] for block in chain[:39]] == [b"1d2d"] * 39
        before = await redis.zscore(KEYS["leases"], "2")
        assert before is not None

        async def expiry_ms() -> float:
            return await redis.zscore(KEYS["leases"], "2") or 0.0

        await eventually(expiry_ms, lambda at: at > before + 300)
        assert await overlap() == {1: TierOverlap(device=40)}

        runner.gate.set()
        await eventually(overlap, lambda o: o == {2: TierOverlap(device=39)})


async def test_a_worker_whose_agent_stops_during_activation_is_no_longer_routed_to(
    redis: Redis, observer: Observer
) -> None:
    runner = GatedRunner(redis, "activate", answer=True)
    agent = new_agent(redis, ttl_s=60.0, runner=runner)
    async with running(agent):
        runner.gate.clear()
        runner.reached.clear()
        agent.notify([Stored(tuple(CHAIN[:1]), None)])
        await eventually(observer.overlaps, lambda o: o == {1: TierOverlap(device=1)})
        await observer.lose_batches(1)
        agent.notify([Stored(tuple(CHAIN[1:]), CHAIN[0])])
        await runner.reached.wait()
        assert await observer.live() == {2: "w0:0"}
    await agent.stop()
    assert await observer.live() == {}


async def test_the_index_is_restored_after_redis_restarts_empty(
    own_redis_server: EmbeddedRedis,
) -> None:
    async with connect(own_redis_server.url) as redis:
        observer = Observer(redis)
        async with running(new_agent(redis)) as agent:
            agent.notify([Stored(tuple(CHAIN[:6]), None)])
            await eventually(observer.overlaps, lambda o: o == {1: TierOverlap(device=6)})
            own_redis_server.kill()
            agent.notify([Stored(tuple(CHAIN[6:]), CHAIN[5]), Removed((CHAIN[7],))])
            own_redis_server.start()
            await eventually(observer.overlaps, lambda o: o == {1: TierOverlap(device=7)})
            assert await observer.live() == {1: "w0:0"}


async def test_a_starting_agent_waits_for_an_unreachable_redis_and_logs_it(
    own_redis_server: EmbeddedRedis, caplog: pytest.LogCaptureFixture
) -> None:
    own_redis_server.kill()
    async with connect(own_redis_server.url) as redis:
        agent = new_agent(redis)
        starting = asyncio.ensure_future(agent.start())
        done, _ = await asyncio.wait([starting], timeout=0.3)
        assert not done
        own_redis_server.start()
        await starting
        assert await Observer(redis).live() == {1: "w0:0"}
    [first, *_] = [r.getMessage() for r in caplog.records if "retrying" in r.getMessage()]
    assert first.startswith("w0:0: attempt 1 failed, retrying: register: ConnectionError: ")
    assert f":{own_redis_server.port}" in first


async def test_an_agent_that_retries_for_long_says_so_ever_more_rarely(
    own_redis_server: EmbeddedRedis, caplog: pytest.LogCaptureFixture
) -> None:
    own_redis_server.kill()
    async with connect(own_redis_server.url) as redis:
        with stamina.set_testing(True, attempts=20), pytest.raises(RedisUnavailable):
            await new_agent(redis).start()
    told = re.findall(r"attempt (\d+) failed", caplog.text)
    assert told == ["1", "2", "4", "8", "16"]


async def test_stopping_without_redis_does_not_fail(own_redis_server: EmbeddedRedis) -> None:
    async with connect(own_redis_server.url) as redis:
        agent = new_agent(redis)
        await agent.start()
        agent.notify([Stored(tuple(CHAIN), None)])
        settled = asyncio.ensure_future(agent.settled())
        own_redis_server.kill()
        await agent.stop()
        assert not await settled


async def test_events_during_an_outage_are_coalesced_and_published_after_it(
    own_redis_server: EmbeddedRedis,
) -> None:
    async with connect(own_redis_server.url) as redis:
        observer = Observer(redis)
        async with running(new_agent(redis, ttl_s=60.0)) as agent:
            agent.notify([Stored(tuple(CHAIN[:4]), None)])
            await eventually(observer.overlaps, lambda o: o == {1: TierOverlap(device=4)})
            await agent.settled()  # else the outage may interrupt the first batch
            with stopped(own_redis_server.pid):
                agent.notify([Removed((CHAIN[3],))])
                # Time for the agent to send this batch, so that further events have to wait.
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.3):
                        await redis.ping()
                for _ in range(1000):
                    agent.notify([Stored(tuple(CHAIN[3:]), CHAIN[2])])
                    agent.notify([Removed(tuple(CHAIN[3:]))])
                agent.notify([Stored(tuple(CHAIN[3:5]), CHAIN[2])])
            await eventually(observer.overlaps, lambda o: o == {1: TierOverlap(device=5)})
            # The first batch, the one that the outage interrupted, and one for 2,001 events.
            assert await observer.applied(1) == 3
            assert agent.resyncs == 0


async def test_a_second_process_with_the_same_key_takes_over_at_once(
    redis: Redis, observer: Observer
) -> None:
    old = new_agent(redis, ttl_s=60.0)
    await old.start()
    old.notify([Stored(tuple(CHAIN), None)])
    await new_agent(redis, ttl_s=60.0).start()
    assert await observer.live() == {2: "w0:0"}
    assert await observer.overlaps() == {}


async def test_a_replaced_agent_stops_running(redis: Redis) -> None:
    old = new_agent(redis, ttl_s=0.6)
    await old.start()
    running_old = asyncio.ensure_future(old.run())
    new = new_agent(redis, ttl_s=60.0)
    await new.start()
    with pytest.raises(ExceptionGroup) as ended:
        await asyncio.wait_for(running_old, 10)
    assert ended.group_contains(WorkerReplaced, match="w0:0")


async def test_an_agent_that_resyncs_waits_for_others_to_correct_the_block_size(
    redis: Redis, observer: Observer
) -> None:
    async with (
        running(new_agent(redis, ttl_s=2.0)) as agent,
        running(new_agent(redis, worker_id="w1", ttl_s=2.0)),
    ):
        agent.notify([Stored(tuple(CHAIN[:4]), None)])
        await eventually(observer.overlaps, lambda o: o == {1: TierOverlap(device=4)})
        await redis.hset(KEYS["meta"], "block_size", "4")
        await observer.lose_batches(1)
        agent.notify([Stored(tuple(CHAIN), None)])
        await eventually(observer.overlaps, lambda o: o == {3: TierOverlap(device=8)})
        assert await redis.hget(KEYS["meta"], "block_size") == b"16"


async def test_an_agent_stops_running_if_the_namespace_keeps_another_block_size(
    redis: Redis,
) -> None:
    agent = new_agent(redis, ttl_s=0.6)
    await agent.start()
    running_agent = asyncio.ensure_future(agent.run())
    async with redis.pipeline(transaction=True) as pipe:
        pipe.delete(KEYS["writers"])
        pipe.hset(KEYS["meta"], "block_size", "4")
        await pipe.execute()
    with pytest.raises(ExceptionGroup) as ended:
        await asyncio.wait_for(running_agent, 10)
    assert ended.group_contains(NamespaceMismatch, match="w0:0 has block_size 16")


async def test_a_process_is_not_replaced_by_an_ended_one_that_redis_brings_back(
    redis: Redis, observer: Observer
) -> None:
    await new_agent(redis, ttl_s=0.6).start()
    before = {key: await redis.dump(key) for key in await redis.keys()}
    async with running(new_agent(redis, ttl_s=0.6)) as agent:
        agent.notify([Stored(tuple(CHAIN), None)])
        async with redis.pipeline(transaction=True) as failover:
            failover.flushall()
            for key, value in before.items():
                failover.restore(key, 0, value or b"")
            await failover.execute()
        assert await observer.live() == {1: "w0:0"}
        await eventually(observer.live, lambda live: live == {agent.incarnation: "w0:0"})
        await eventually(observer.overlaps, lambda o: list(o.values()) == [TierOverlap(device=8)])


async def test_metrics_are_published_every_100_ms_with_all_fields(
    redis: Redis, observer: Observer
) -> None:
    async with running(new_agent(redis)):

        async def entries() -> list[tuple[bytes, dict[bytes, bytes]]]:
            found: list[tuple[bytes, dict[bytes, bytes]]]
            found = await observer.redis.xrange(KEYS["metrics"])
            return found

        found = await eventually(entries, lambda seen: len(seen) >= 6)
    at_ms = [int(entry_id.split(b"-")[0]) for entry_id, _ in found[:6]]
    assert 5 * METRICS_INTERVAL_S * 1000 - 10 <= at_ms[5] - at_ms[0] <= 1500
    text = {name.decode(): value.decode() for name, value in found[0][1].items()}
    assert text == {
        "worker": "w0:0",
        "incarnation": "1",
        "request_active_slots": "3",
        "request_total_slots": "0",
        "kv_active_blocks": "40",
        "kv_total_blocks": "100",
        "num_requests_waiting": "0",
        "gpu_cache_usage_perc": "0",
        "gpu_prefix_cache_hit_rate": "0",
        "kv_idle_before_evict_s": "0",
        "prefill_s_per_token": "0.0001",
        "prefill_s_per_token2": "1.1e-09",
        "decode_s_per_kv_token": "3e-08",
        "decode_s_per_seq": "8e-05",
        "host_s_per_token": "2e-06",
        "disk_s_per_token": "2e-05",
        "mean_output_tokens": "250",
        "gpu_utilisation": "0.5",
        "gpu_pcie_sent_bytes_per_s": "7000",
    }
    assert worker_report.decode(found[0][1]) == (MEASURED, LEARNED, READ)


async def test_the_metrics_stream_is_trimmed(redis: Redis) -> None:
    async with redis.pipeline(transaction=False) as pipe:
        for _ in range(METRICS_MAXLEN + 1000):
            pipe.xadd(KEYS["metrics"], {"worker": "w9:0"})
        await pipe.execute()
    async with running(new_agent(redis)):

        async def length() -> int:
            return await redis.xlen(KEYS["metrics"])

        # Trimmed by whole nodes of 100 entries.
        await eventually(length, lambda seen: METRICS_MAXLEN <= seen <= METRICS_MAXLEN + 100)


@pytest.fixture
def _frequent_audits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers.agent.agent, "AUDIT_INTERVAL_S", 0.05)


@pytest.mark.usefixtures("_frequent_audits")
async def test_blocks_deleted_from_the_index_are_published_again(
    redis: Redis, observer: Observer
) -> None:
    async with running(new_agent(redis, ttl_s=60.0)) as agent:
        agent.notify([Stored(tuple(CHAIN), None)])
        await eventually(observer.overlaps, lambda o: o == {1: TierOverlap(device=8)})
        bucket, block = SHARD[f"blocks:{CHAIN[0] >> 60:x}"], f"{CHAIN[3]:016x}"
        assert await redis.hdel(bucket, block) == 1
        await eventually(observer.overlaps, lambda o: o == {2: TierOverlap(device=8)})
        assert agent.resyncs == 1


@pytest.mark.usefixtures("_frequent_audits")
async def test_blocks_added_to_the_index_by_others_are_dropped_by_a_resync(
    redis: Redis, observer: Observer
) -> None:
    async with running(new_agent(redis, ttl_s=60.0)) as agent:
        agent.notify([Stored(tuple(CHAIN[:4]), None)])
        await eventually(observer.overlaps, lambda o: o == {1: TierOverlap(device=4)})
        bucket = SHARD[f"blocks:{CHAIN[0] >> 60:x}"]
        await redis.hset(bucket, f"{CHAIN[4]:016x}", "1d")
        await redis.hset(bucket, "junk", "1d")
        await eventually(observer.overlaps, lambda o: o == {2: TierOverlap(device=4)})


@pytest.mark.usefixtures("_frequent_audits")
async def test_a_shard_that_lost_the_incarnation_is_distinguished_from_one_that_lost_blocks(
    redis: Redis, observer: Observer, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(new_agent(redis, ttl_s=60.0)) as agent:
        agent.notify([Stored(tuple(CHAIN), None)])
        await agent.settled()
        await redis.delete(SHARD["applied"])
        await eventually(observer.overlaps, lambda o: o == {2: TierOverlap(device=8)})
    assert "incarnation 1: lost to shard 0; resyncing" in caplog.text
    assert "missing" not in caplog.text


class CountingRunner(ScriptRunner):
    """Counts the searches of the index for blocks that the worker does not hold."""

    searches = 0

    async def run_each(self, calls: Sequence[Call[Any]]) -> list[Any]:
        self.searches += any(c.script.name == "claims" for c in calls)
        return await super().run_each(calls)


@pytest.mark.usefixtures("_frequent_audits")
async def test_an_audit_searches_at_most_once_a_round_and_leaves_correct_entries_alone(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = CountingRunner(redis, timeout_s=1.0)
    num_rounds, next_to_audit = 0, Ownership.next_to_audit

    def counted(ownership: Ownership, count: int) -> list[list[SequenceHash]]:
        nonlocal num_rounds
        num_rounds += 1
        return next_to_audit(ownership, count)

    monkeypatch.setattr(Ownership, "next_to_audit", counted)
    async with running(new_agent(redis, runner=runner)) as agent:

        async def searches() -> int:
            return runner.searches

        for n in range(1, 9):
            agent.notify([Stored(tuple(CHAIN[:n]), None), Removed(tuple(CHAIN[n - 2 : n - 1]))])
            await eventually(searches, lambda seen, n=n: seen >= n)
        assert agent.resyncs == 0
        assert runner.searches <= num_rounds


async def test_an_incarnation_number_already_in_use_in_a_shard_is_given_back(
    redis: Redis, observer: Observer
) -> None:
    await redis.hset(SHARD["applied"], mapping={"1": "5 stranger"})
    await redis.hset(KEYS.of_shard(1)["applied"], mapping={"2": "0 stranger"})
    agent = new_agent(redis, shards=2)
    await agent.start()
    assert await observer.live() == {3: "w0:0"}
    for name in ("workers", "writers", "load"):
        assert await redis.hkeys(KEYS[name]) == [b"3"]
    assert await redis.zrange(KEYS["leases"], 0, -1) == [b"3"]


async def test_once_settled_redis_no_longer_shows_removed_blocks(
    redis: Redis, observer: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.agent.agent.AUDIT_INTERVAL_S", 3600.0)
    agent = new_agent(redis)
    assert await agent.settled()  # not registered yet: Redis shows none of its blocks
    async with running(agent):
        agent.notify([Stored(tuple(CHAIN), None)])
        await agent.settled()
        assert await observer.overlaps() == {1: TierOverlap(device=8)}
        agent.notify([Removed(tuple(CHAIN[5:]))])
        agent.notify([Removed((SequenceHash(LATER),))])  # never stored: nothing to send
        await agent.settled()
        assert await observer.overlaps() == {1: TierOverlap(device=5)}
        agent.notify([Removed((SequenceHash(LATER),))])
        await agent.settled()


async def test_blocks_removed_during_a_batch_are_settled_with_the_next_batch(
    redis: Redis, observer: Observer
) -> None:
    runner = GatedRunner(redis, "apply")
    async with running(new_agent(redis, runner=runner)) as agent:
        agent.notify([Stored(tuple(CHAIN), None)])
        await agent.settled()
        runner.gate.clear()
        runner.reached.clear()
        agent.notify([Removed(tuple(CHAIN[5:]))])
        await runner.reached.wait()
        agent.notify([Removed(tuple(CHAIN[2:5]))])
        settled = asyncio.ensure_future(agent.settled())
        runner.reached.clear()
        runner.gate.set()
        await runner.reached.wait()
        assert not settled.done()
        await settled
        assert await observer.overlaps() == {1: TierOverlap(device=2)}


async def test_settling_does_not_wait_for_an_unreachable_redis(
    own_redis_server: EmbeddedRedis,
) -> None:
    async with connect(own_redis_server.url) as redis:
        observer = Observer(redis)
        async with running(new_agent(redis, ttl_s=60.0)) as agent:
            agent.notify([Stored(tuple(CHAIN), None)])
            assert await agent.settled()
            own_redis_server.kill()
            for block in reversed(CHAIN[4:]):
                agent.notify([Removed((block,))])
                assert not await agent.settled()
            own_redis_server.start()
            await eventually(agent.settled, lambda confirmed: confirmed)
            assert await observer.overlaps() == {1: TierOverlap(device=4)}


class PartitionedRunner(GatedRunner):
    """In addition, the first of two shards is unreachable while `is_partitioned` is set."""

    is_partitioned = False

    async def run_each(self, calls: Sequence[Call[Any]]) -> list[Any]:
        if self.is_partitioned and any(SHARD["applied"] in c.keys for c in calls):
            return [RedisUnavailable("partitioned")] * len(calls)
        return await super().run_each(calls)


async def test_settling_waits_for_a_reachable_shard_while_another_is_unreachable(
    redis: Redis,
) -> None:
    runner = PartitionedRunner(redis, "apply")
    first, second = SequenceHash(10), SequenceHash(11)  # one block in each shard
    async with running(new_agent(redis, ttl_s=60.0, shards=2, runner=runner)) as agent:
        agent.notify([Stored((first,), None), Stored((second,), None)])
        assert await agent.settled()
        runner.is_partitioned = True
        agent.notify([Removed((first,))])
        assert not await agent.settled()
        runner.gate.clear()
        runner.reached.clear()
        agent.notify([Removed((second,))])
        settled = asyncio.ensure_future(agent.settled())
        await runner.reached.wait()
        assert not settled.done()
        runner.gate.set()
        assert not await settled


async def test_a_resyncing_agent_settles_once_its_new_incarnation_is_active(
    redis: Redis, observer: Observer
) -> None:
    runner = GatedRunner(redis, "activate")
    async with running(new_agent(redis, runner=runner)) as agent:
        agent.notify([Stored(tuple(CHAIN), None)])
        await agent.settled()
        runner.gate.clear()
        runner.reached.clear()
        await observer.lose_batches(1)
        agent.notify([Removed(tuple(CHAIN[5:]))])
        settled = asyncio.ensure_future(agent.settled())
        await runner.reached.wait()
        assert not settled.done()
        assert await observer.overlaps() == {1: TierOverlap(device=8)}
        runner.gate.set()
        await settled
        assert await observer.overlaps() == {2: TierOverlap(device=5)}


async def test_a_redis_that_goes_away_amid_a_resync_is_not_waited_for_either(
    own_redis_server: EmbeddedRedis,
) -> None:
    async with connect(own_redis_server.url) as redis:
        observer = Observer(redis)
        runner = GatedRunner(redis, "register")
        runner.gate.set()
        async with running(new_agent(redis, ttl_s=60.0, runner=runner)) as agent:
            agent.notify([Stored(tuple(CHAIN), None)])
            assert await agent.settled()
            runner.gate.clear()
            runner.reached.clear()
            await redis.flushall()
            agent.notify([Removed((CHAIN[7],))])
            await runner.reached.wait()
            own_redis_server.kill()
            runner.gate.set()
            async with asyncio.timeout(10):
                assert not await agent.settled()
            own_redis_server.start()
            await eventually(agent.settled, lambda confirmed: confirmed)
            assert await observer.overlaps() == {1: TierOverlap(device=7)}
