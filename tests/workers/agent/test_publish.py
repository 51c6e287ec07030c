"""Publishing on a real Redis: batches, retries, audits, and what is waited for."""

import asyncio
import re

import pytest
import stamina

import workers.agent.agent
import workers.agent.publish
from app.core.errors import IncarnationLost, RedisFull, RedisUnavailable
from app.core.events import Cleared, Removed, Stored
from app.core.types import Incarnation, SequenceHash, Tier, TierOverlap
from app.state.connect import connect
from app.state.scripts import ScriptRunner
from tests.eventually import eventually
from tests.fake_worker import running
from tests.redis_servers import stopped
from tests.workers.agent.harness import (
    CHAIN,
    KEYS,
    LATER,
    SHARD,
    FaultyRunner,
    GatedRunner,
    Observer,
    info,
    new_agent,
    publishing,
)
from workers.agent.ownership import Ownership
from workers.agent.publish import BATCH_BLOCKS, Publisher


async def test_the_index_shows_what_the_engine_reported(redis, observer):
    async with publishing(redis, observer, 6) as agent:
        agent.notify(
            [Stored((CHAIN[4], CHAIN[5]), CHAIN[3], Tier.HOST), Removed((CHAIN[4], CHAIN[5]))]
        )
        await eventually(observer.overlaps, lambda o: o == {1: TierOverlap(device=4, host=2)})
        agent.notify([Removed((CHAIN[2],))])
        await eventually(observer.overlaps, lambda o: o == {1: TierOverlap(device=2)})
        agent.notify([Stored((CHAIN[2],), CHAIN[1])])
        await eventually(observer.overlaps, lambda o: o == {1: TierOverlap(device=4, host=2)})
        agent.notify([Cleared()])
        await eventually(observer.blocks, lambda blocks: blocks == {})


@pytest.mark.parametrize("drain_blocks", [workers.agent.publish.DRAIN_BLOCKS, 256])
async def test_events_beyond_one_round_trip_or_drain_are_all_published(
    redis, observer, monkeypatch, drain_blocks
):
    # One round trip takes 8 batches of 256 blocks; these 10 batches need a second one.
    monkeypatch.setattr(workers.agent.publish, "DRAIN_BLOCKS", drain_blocks)
    chain = [SequenceHash(0x2222_0000_0000_0000 + i) for i in range(BATCH_BLOCKS * 9 + 1)]
    async with running(new_agent(redis)) as agent:
        agent.notify([Stored(tuple(chain), None)])

        async def overlap():
            return await observer.overlaps(chain)

        await eventually(overlap, lambda o: o == {1: TierOverlap(device=len(chain))})
        assert await observer.applied(1) == 10


class BatchRunner(ScriptRunner):
    """Notes how many batches each round trip has; calls `on_trip` at each."""

    def __init__(self, redis, on_trip):
        super().__init__(redis, timeout_s=5.0)
        self.batches = []
        self._on_trip = on_trip

    async def run_each(self, calls):
        if calls[0].name == "apply":
            self.batches.append(len(calls))
            self._on_trip(len(self.batches))
        return await super().run_each(calls)


@pytest.mark.parametrize(
    ("busy_from", "expected", "num_pauses"),
    [(99, [1, 2, 4, 8, 8, 8, 1], 0), (3, [1, 2, 4, *[1] * 25], 25)],
)
async def test_the_busier_redis_is_the_less_an_agent_sends_together_and_the_less_often(
    redis, monkeypatch, busy_from, expected, num_pauses
):
    def on_trip(number):
        monkeypatch.setattr("workers.agent.publish.BUSY_S", -1.0 if number >= busy_from else 60.0)

    delays = []
    sleep = asyncio.sleep

    async def noting(delay):
        delays.append(delay)
        await sleep(delay)

    monkeypatch.setattr("workers.agent.publish.BATCH_BLOCKS", 4)
    monkeypatch.setattr("workers.agent.publish.BUSY_PAUSES", 1e9)
    monkeypatch.setattr("workers.agent.publish.MAX_PAUSE_S", 0.00123)
    monkeypatch.setattr("workers.agent.agent.asyncio.sleep", noting)
    runner = BatchRunner(redis, on_trip)
    agent = new_agent(redis, runner=runner)
    blocks = tuple(SequenceHash(n) for n in range(1, 129))
    agent.notify([Stored(blocks, None)])
    async with running(agent):
        assert await agent.published()
    assert runner.batches == expected
    assert delays.count(0.00123) == num_pauses


async def test_a_send_drains_until_nothing_is_pending_or_redis_is_full(
    redis, observer, monkeypatch
):
    monkeypatch.setattr(workers.agent.publish, "DRAIN_BLOCKS", 1)
    roots = [SequenceHash(n << 60) for n in range(1, 4)]  # each is drained on its own
    runner = FaultyRunner(redis)
    publisher = Publisher(runner, KEYS, info().key, "nonce", index_blocks=128)
    assert await publisher.open(Incarnation(1), 1)
    publisher.notify([Stored((root,), None) for root in roots])
    runner.answers = [RedisFull("out of memory")] * 100
    await publisher.publish_all(Incarnation(1))
    assert await observer.blocks() == {}
    assert len(runner.answers) == 99
    runner.answers.clear()
    await publisher.publish_all(Incarnation(1))
    assert len(await observer.blocks()) == 3


async def test_publishing_ends_once_a_shard_refuses_a_batch_or_the_agent_says_so(redis):
    runner = FaultyRunner(redis)
    publisher = Publisher(runner, KEYS, info().key, "nonce", index_blocks=128)
    assert await publisher.open(Incarnation(1), 2)
    publisher.notify([Stored(tuple(CHAIN), None)])
    runner.answers = [False]
    with pytest.raises(IncarnationLost, match="incarnation 1: a batch was refused"):
        await publisher.publish(Incarnation(1))
    publishing = asyncio.ensure_future(publisher.publish(Incarnation(1)))
    await asyncio.sleep(0)
    publisher.interrupt(IncarnationLost("incarnation 1 lapsed"))
    with pytest.raises(IncarnationLost, match="incarnation 1 lapsed"):
        await publishing


async def test_an_agent_that_retries_for_long_says_so_ever_more_rarely(own_redis_server, caplog):
    own_redis_server.kill()
    async with connect(own_redis_server.url) as redis:
        with stamina.set_testing(True, attempts=20), pytest.raises(RedisUnavailable):
            await new_agent(redis).start()
    told = re.findall(r"attempt (\d+) failed", caplog.text)
    assert told == ["1", "2", "4", "8", "16"]


async def test_events_during_an_outage_are_coalesced_and_published_after_it(own_redis_server):
    async with connect(own_redis_server.url) as redis:
        observer = Observer(redis)
        async with publishing(redis, observer, 4) as agent:
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


@pytest.fixture
def _frequent_audits(monkeypatch):
    monkeypatch.setattr(workers.agent.agent, "AUDIT_INTERVAL_S", 0.05)


@pytest.mark.usefixtures("_frequent_audits")
async def test_blocks_deleted_from_the_index_are_published_again(redis, observer):
    async with publishing(redis, observer):
        bucket, block = SHARD[f"blocks:{CHAIN[0] >> 60:x}"], f"{CHAIN[3]:016x}"
        assert await redis.hdel(bucket, block) == 1
        await eventually(observer.overlaps, lambda o: o == {2: TierOverlap(device=8)})


@pytest.mark.usefixtures("_frequent_audits")
async def test_blocks_added_to_the_index_by_others_are_dropped_by_a_resync(redis, observer):
    async with publishing(redis, observer, 4):
        bucket = SHARD[f"blocks:{CHAIN[0] >> 60:x}"]
        await redis.hset(bucket, f"{CHAIN[4]:016x}", "1d")
        await redis.hset(bucket, "junk", "1d")
        await eventually(observer.overlaps, lambda o: o == {2: TierOverlap(device=4)})


@pytest.mark.usefixtures("_frequent_audits")
async def test_a_shard_that_lost_the_incarnation_is_distinguished_from_one_that_lost_blocks(
    redis, observer, caplog
):
    async with publishing(redis, observer):
        await redis.delete(SHARD["applied"])
        await eventually(observer.overlaps, lambda o: o == {2: TierOverlap(device=8)})
    assert "incarnation 1: lost to shard 0; resyncing" in caplog.text
    assert "missing" not in caplog.text


class CountingRunner(ScriptRunner):
    """Counts the searches of the index for blocks that the worker does not hold."""

    searches = 0

    async def run_each(self, calls):
        self.searches += any(c.name == "audit" for c in calls)
        return await super().run_each(calls)


@pytest.mark.usefixtures("_frequent_audits")
async def test_an_audit_searches_at_most_once_a_round_and_leaves_correct_entries_alone(
    redis, monkeypatch
):
    runner = CountingRunner(redis, timeout_s=1.0)
    num_rounds, next_to_audit = 0, Ownership.next_to_audit

    def counted(ownership, count):
        nonlocal num_rounds
        num_rounds += 1
        return next_to_audit(ownership, count)

    monkeypatch.setattr(Ownership, "next_to_audit", counted)
    async with running(new_agent(redis, runner=runner)) as agent:

        async def searches():
            return runner.searches

        for n in range(1, 9):
            agent.notify([Stored(tuple(CHAIN[:n]), None), Removed(tuple(CHAIN[n - 2 : n - 1]))])
            await eventually(searches, lambda seen, n=n: seen >= n)
        assert agent.incarnation == 1
        assert runner.searches <= num_rounds


async def test_once_settled_redis_no_longer_shows_removed_blocks(redis, observer, monkeypatch):
    monkeypatch.setattr("workers.agent.agent.AUDIT_INTERVAL_S", 3600.0)
    agent = new_agent(redis)
    assert await agent.published()  # not registered yet: Redis shows none of its blocks
    async with running(agent):
        agent.notify([Stored(tuple(CHAIN), None)])
        await agent.published()
        assert await observer.overlaps() == {1: TierOverlap(device=8)}
        agent.notify([Removed(tuple(CHAIN[5:]))])
        agent.notify([Removed((SequenceHash(LATER),))])  # never stored: nothing to send
        await agent.published()
        assert await observer.overlaps() == {1: TierOverlap(device=5)}
        agent.notify([Removed((SequenceHash(LATER),))])
        await agent.published()


async def test_blocks_removed_during_a_batch_are_settled_with_the_next_batch(redis, observer):
    runner = GatedRunner(redis, "apply")
    async with publishing(redis, observer, runner=runner) as agent:
        runner.gate.clear()
        runner.reached.clear()
        agent.notify([Removed(tuple(CHAIN[5:]))])
        await runner.reached.wait()
        agent.notify([Removed(tuple(CHAIN[2:5]))])
        published = asyncio.ensure_future(agent.published())
        runner.reached.clear()
        runner.gate.set()
        await runner.reached.wait()
        assert not published.done()
        await published
        assert await observer.overlaps() == {1: TierOverlap(device=2)}


async def test_settling_does_not_wait_for_an_unreachable_redis(own_redis_server):
    async with connect(own_redis_server.url) as redis:
        observer = Observer(redis)
        async with publishing(redis, observer) as agent:
            own_redis_server.kill()
            for block in reversed(CHAIN[4:]):
                agent.notify([Removed((block,))])
                assert not await agent.published()
            own_redis_server.start()
            await eventually(agent.published, lambda confirmed: confirmed)
            assert await observer.overlaps() == {1: TierOverlap(device=4)}


class PartitionedRunner(GatedRunner):
    """In addition, the first of two shards is unreachable while `is_partitioned` is set."""

    is_partitioned = False

    async def run_each(self, calls):
        if self.is_partitioned and any(SHARD["applied"] in c.keys for c in calls):
            return [RedisUnavailable("partitioned")] * len(calls)
        return await super().run_each(calls)


async def test_settling_waits_for_a_reachable_shard_while_another_is_unreachable(redis):
    runner = PartitionedRunner(redis, "apply")
    first, second = SequenceHash(10), SequenceHash(11)  # one block in each shard
    async with running(new_agent(redis, shards=2, runner=runner)) as agent:
        agent.notify([Stored((first,), None), Stored((second,), None)])
        assert await agent.published()
        runner.is_partitioned = True
        agent.notify([Removed((first,))])
        assert not await agent.published()
        runner.gate.clear()
        runner.reached.clear()
        agent.notify([Removed((second,))])
        published = asyncio.ensure_future(agent.published())
        await runner.reached.wait()
        assert not published.done()
        runner.gate.set()
        assert not await published


async def test_a_resyncing_agent_settles_once_its_new_incarnation_is_active(redis, observer):
    runner = GatedRunner(redis, "activate")
    async with publishing(redis, observer, runner=runner) as agent:
        runner.gate.clear()
        runner.reached.clear()
        await observer.lose_batches(1)
        agent.notify([Removed(tuple(CHAIN[5:]))])
        published = asyncio.ensure_future(agent.published())
        await runner.reached.wait()
        assert not published.done()
        assert await observer.overlaps() == {1: TierOverlap(device=8)}
        runner.gate.set()
        await published
        assert await observer.overlaps() == {2: TierOverlap(device=5)}


async def test_a_redis_that_goes_away_amid_a_resync_is_not_waited_for_either(own_redis_server):
    async with connect(own_redis_server.url) as redis:
        observer = Observer(redis)
        runner = GatedRunner(redis, "register")
        runner.gate.set()
        async with publishing(redis, observer, runner=runner) as agent:
            runner.gate.clear()
            runner.reached.clear()
            await redis.flushall()
            agent.notify([Removed((CHAIN[7],))])
            await runner.reached.wait()
            own_redis_server.kill()
            runner.gate.set()
            async with asyncio.timeout(10):
                assert not await agent.published()
            own_redis_server.start()
            await eventually(agent.published, lambda confirmed: confirmed)
            assert await observer.overlaps() == {1: TierOverlap(device=7)}
