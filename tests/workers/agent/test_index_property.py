"""Whatever engines do, a query of the index equals a scan of every worker's cache.

Random stores, removals, tier moves and clears, with holes, go through the agent's bookkeeping and
real Redis. Batches are cut anywhere, repeated, lost and sent out of order, while workers restart
and dead incarnations are swept. The model is a plain set per worker and tier.
"""

import asyncio
from dataclasses import dataclass, field
from itertools import cycle
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.core.chains import parse_owners
from app.core.events import Cleared, Ends, Removed, Stored
from app.core.keys import Keyspace
from app.core.overlaps import ReuseRule
from app.core.types import SequenceHash, Tier, TierOverlap
from app.http.server import run
from app.state import index, leases, overlap
from app.state.connect import connect
from app.state.index import Change
from app.state.round_trip import Node, round_trip
from app.state.scripts import ScriptRunner
from tests.fake_worker import FakeWorker, worker_info
from tests.workers.kv.cache_model import CacheModel
from workers.agent import ownership
from workers.agent.ownership import Ownership

KEYSPACE = Keyspace("property")
SHARD = KEYSPACE.of_shard(0)
GROUP = 2
"""The number of blocks in a group; small, so that these short chains have several groups."""
# A tree of prompts: one of 12 blocks, branches after its 6th and its first, and a second root.
PARENT = {n: n - 1 for n in (*range(1, 12), 13, 14, 16, 18, 19)} | {12: 5, 15: 0}
BLOCKS = [SequenceHash(n * 0x9E3779B97F4A7C15 % 2**64) for n in range(20)]
LEAVES = (11, 14, 16, 19)


def chain_to(n):
    return [*chain_to(PARENT[n]), n] if n in PARENT else [n]


CHAINS = [[BLOCKS[n] for n in chain_to(leaf)] for leaf in LEAVES]
RULES = (ReuseRule(), ReuseRule(3), ReuseRule(2, lookahead=1))
"""Of the first worker, the second, and so on."""
AHEAD = (0, 2, 1)
"""How far each looks ahead once it has told where it can go on."""


@dataclass
class Worker:
    """The model of a worker's cache, the worker's bookkeeping, and what it has sent to Redis."""

    fake: FakeWorker
    rule: ReuseRule
    ahead: int
    cache: CacheModel = field(default_factory=CacheModel)
    ownership: Ownership = field(init=False)
    undelivered: list[Change] = field(default_factory=list)
    sent: list[list[Change]] = field(default_factory=list)
    """Batches of this incarnation; the n-th has seq n + 1."""

    def __post_init__(self):
        self.ownership = Ownership(self.rule)

    def take(self, event):
        self.cache.take(event)
        self.ownership.apply([event])
        self.ownership.check()


class World:
    """Some workers and one Redis."""

    def __init__(self, redis, num_workers):
        self.runner = ScriptRunner(redis, timeout_s=60.0)
        self.boundaries = overlap.Boundaries()
        self.workers = [
            Worker(
                FakeWorker(self.runner, KEYSPACE, worker_info(f"w{i}"), bucket_bits=2), rule, ahead
            )
            for i, rule, ahead in zip(range(num_workers), cycle(RULES), cycle(AHEAD), strict=False)
        ]

    async def restart(self, worker):
        """Replace the process, and with it the cache, by a new one that is empty."""
        worker.cache = CacheModel()
        worker.ownership = Ownership(worker.rule)
        worker.undelivered, worker.sent = [], []
        await worker.fake.register()
        await worker.fake.activate()

    async def resync(self, worker):
        old = worker.fake.incarnation
        registration = await worker.fake.register(resync=True)
        assert registration.predecessor_lives
        assert registration.incarnation != old
        worker.ownership.forget()
        worker.undelivered, worker.sent = worker.ownership.drain(0), []
        while worker.undelivered:
            await self.deliver(worker, 2)
        await worker.fake.activate()

    async def sweep(self, max_buckets):
        """One step of a sweep, which drops incarnations that have been retired."""
        call = index.sweep(SHARD, (), max_buckets=0, scrub_ms=60_000)
        writers = (await self.runner.one(call)).writers
        lost = await self.runner.one(leases.absent(KEYSPACE, writers)) if writers else []
        await self.runner.one(index.sweep(SHARD, lost, max_buckets=max_buckets, scrub_ms=60_000))

    async def deliver(self, worker, size):
        """Publish the next `size` changes as one batch."""
        if not worker.undelivered:
            worker.undelivered = worker.ownership.drain(0, at_least=3)
        batch, worker.undelivered = worker.undelivered[:size], worker.undelivered[size:]
        worker.sent.append(batch)
        await worker.fake.publish(batch)

    async def match_both_ways(self):
        """Query chains whole, and sampled as only long ones are, with learnt boundaries and
        without: all answers must be the same."""
        whole, _ = await overlap.match(self.runner, KEYSPACE, CHAINS)
        for boundaries in (None, self.boundaries):
            with mock.patch.object(overlap, "WHOLE_CHAIN", 1):
                sampled, _ = await overlap.match(
                    self.runner, KEYSPACE, CHAINS, boundaries=boundaries
                )
            assert sampled == whole
            assert [found.resumes for found in sampled] == [found.resumes for found in whole]
        with_learnt, _ = await overlap.match(
            self.runner, KEYSPACE, CHAINS, boundaries=self.boundaries
        )
        assert with_learnt == whole
        return whole

    async def check_exact(self):
        """Once everything is delivered, every query equals a scan of every worker's cache."""
        for worker in self.workers:
            while worker.undelivered or worker.ownership.num_pending:
                await self.deliver(worker, 100)
        answers = await self.match_both_ways()
        for chain, answer in zip(CHAINS, answers, strict=True):
            expected = {w.fake.incarnation: w.cache.scan(chain) for w in self.workers}
            live = {inc: answer.get(inc, TierOverlap()) for inc in expected}
            assert live == expected
            for worker in self.workers:
                inc = worker.fake.incarnation
                held = answer.get(inc, TierOverlap()).total
                resume = answer.resumes.get(inc)
                for most in range(len(chain) - 1, len(chain) + 1):
                    reused = resume.reused(most) if resume else worker.rule.reused(held, most)
                    assert reused == worker.cache.reused(chain, most, worker.rule)

    async def check_between_batches(self):
        """At any moment, a query equals a walk over the entries in Redis: it skips none."""
        answers = await self.match_both_ways()
        owners = await self.owners()
        for answer, chain in zip(answers, CHAINS, strict=True):
            for worker in self.workers:
                held = [owners.get((block, worker.fake.incarnation)) for block in chain]
                tiers = [tier for tier in held if tier is not None]
                walked = TierOverlap(*(tiers.count(tier) for tier in Tier))
                assert answer.get(worker.fake.incarnation, TierOverlap()) == walked
                # The invariant: published blocks form a prefix, and tiers get no faster along it.
                assert held == sorted(tiers) + [None] * (len(chain) - len(tiers))

    async def owners(self):
        """All entries of the index."""
        redis = self.runner.redis
        buckets = [key async for key in redis.scan_iter(match="*blocks:*", count=1000)]
        commands = [("HGETALL", bucket) for bucket in buckets]
        until_s = asyncio.get_running_loop().time() + 60
        found = await round_trip(Node(redis), commands, until_s)
        entries = {}
        for fields in found:
            for block, text in zip(fields[::2], fields[1::2], strict=True):
                for incarnation, tier in parse_owners(text):
                    entries[SequenceHash(int(block, 16)), incarnation] = tier
        return entries


Step = tuple[object, ...]

TIERS = st.sampled_from(Tier)
NODES = st.integers(0, len(BLOCKS) - 1)


def steps_of(num_workers):
    workers = st.integers(0, num_workers - 1)
    return st.one_of(
        st.tuples(st.just("store"), workers, st.sampled_from(LEAVES), st.integers(1, 12), TIERS),
        # A single block, whose ancestors may be missing.
        st.tuples(st.just("store_one"), workers, NODES, TIERS),
        st.tuples(st.just("remove"), workers, NODES, TIERS),
        st.tuples(st.just("move"), workers, NODES, TIERS, TIERS),
        st.tuples(st.just("ends"), workers, st.sets(NODES, max_size=6), st.booleans()),
        st.tuples(st.just("deliver"), workers, st.sampled_from((1, 2, 5, 100))),
        st.tuples(st.just("repeat"), workers, st.integers(1, 3)),
        # One strategy for all four, so that they are rare: they leave little state to test.
        st.tuples(st.sampled_from(("clear", "skip", "restart", "resync")), workers),
        st.tuples(st.just("sweep"), st.integers(1, 3)),
        st.tuples(st.just("check")),
    )


async def step(world, name, *args):
    worker = world.workers[args[0]] if args and name != "sweep" else None
    match (name, *args[1:]):
        case ("store", leaf, length, tier):
            chain = chain_to(leaf)[:length]
            worker.take(Stored(tuple(BLOCKS[n] for n in chain), None, tier))
        case ("store_one", n, tier):
            parent = BLOCKS[PARENT[n]] if n in PARENT else None
            worker.take(Stored((BLOCKS[n],), parent, tier))
        case ("remove", n, tier):
            worker.take(Removed((BLOCKS[n],), tier))
        case ("move", n, source, target):
            if source in worker.cache.tiers_of(BLOCKS[n]):
                parent = BLOCKS[PARENT[n]] if n in PARENT else None
                worker.take(Stored((BLOCKS[n],), parent, target))
                if source != target:
                    worker.take(Removed((BLOCKS[n],), source))
        case ("ends", nodes, are_ends):
            worker.take(Ends(tuple(BLOCKS[n] for n in nodes), are_ends, worker.ahead))
        case ("clear",):
            worker.take(Cleared())
        case ("deliver", size):
            await world.deliver(worker, size)
            await world.check_between_batches()
        case ("repeat", back) if back <= len(worker.sent):
            # A late or repeated batch: it was applied before and must not be applied again.
            assert await worker.fake.apply(len(worker.sent) + 1 - back, worker.sent[-back])
            await world.check_between_batches()
        case ("skip",):
            # A batch whose predecessor is missing is refused as a whole.
            foreign = [Change(block, Tier.DEVICE, block) for block in BLOCKS]
            assert not await worker.fake.apply(len(worker.sent) + 2, foreign)
        case ("restart",):
            await world.restart(worker)
        case ("resync",):
            await world.resync(worker)
        case ("sweep",):
            await world.sweep(args[0])
        case ("check",):
            await world.check_exact()


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    for module in (index, overlap, ownership):
        monkeypatch.setattr(module, "GROUP_BLOCKS", GROUP)


async def run_steps(url, num_workers, steps):
    async with connect(url) as redis:
        await redis.flushall()
        world = World(redis, num_workers)
        for worker in world.workers:
            await world.restart(worker)
        for one in steps:
            await step(world, *one)
        await world.check_exact()
        for _ in range(20):
            await world.sweep(4)
        await world.check_exact()
        live = {worker.fake.incarnation for worker in world.workers}
        assert await owners_left(redis) <= live


async def owners_left(redis):
    """All incarnations that have entries in the index."""
    owners = set()
    async for key in redis.scan_iter(match="*blocks:*"):
        for value in await redis.hvals(key):
            owners |= {inc for inc, _ in parse_owners(value)}
    return owners


def examples(count):
    return settings(
        max_examples=count,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


@pytest.mark.timeout(600)
@examples(80)
@given(steps=st.lists(steps_of(3), min_size=40, max_size=60))
def test_queries_equal_scans_of_every_workers_cache(redis_server, steps):
    run(run_steps(redis_server.url, 3, steps))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_workers", [3, 4, 5])
@examples(400)
@given(data=st.data())
def test_queries_equal_scans_through_long_histories_of_more_workers(
    redis_server, num_workers, data
):
    """Takes about 6 minutes on each kind of server."""
    steps = data.draw(st.lists(steps_of(num_workers), min_size=200, max_size=400))
    run(run_steps(redis_server.url, num_workers, steps))
