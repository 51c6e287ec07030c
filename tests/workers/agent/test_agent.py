"""The agent with a real Redis; each test stands in for the engine and sends it events."""

import asyncio
import sys
from dataclasses import replace

import pytest

import workers.agent.agent
import workers.agent.publish
from app.core import registration
from app.core.errors import RedisUnavailable
from app.core.events import Removed, Stored
from app.core.keys import METRICS_INTERVAL_S, METRICS_MAXLEN
from app.core.loads import Load
from app.core.types import Incarnation, SequenceHash, Tier, TierOverlap
from app.http import supervisor
from app.state import leases, reservations
from app.state.connect import connect
from app.state.scripts import ScriptRunner
from tests.eventually import eventually
from tests.fake_worker import fake_agent, running
from tests.workers.agent.harness import (
    CHAIN,
    KEYS,
    LATER,
    LEARNED,
    MEASURED,
    READ,
    SHARD,
    FaultyRunner,
    GatedRunner,
    Observer,
    info,
    new_agent,
    publishing,
)
from workers.agent.agent import Agent
from workers.agent.publish import Publisher
from workers.tasks import FAILURES


async def test_a_worker_whose_agent_started_is_routed_to(redis, observer):
    agent = new_agent(redis)
    assert await observer.live() == {}
    await agent.start()
    assert agent.incarnation == 1
    assert await observer.live() == {1: "w0:0"}
    assert registration.decode_info(await observer.redis.hget(KEYS["workers"], "1")) == info()


async def test_a_worker_whose_agent_stopped_is_no_longer_routed_to(redis, observer):
    agent = new_agent(redis)
    await agent.start()
    agent.notify([Stored(tuple(CHAIN), None)])
    published = asyncio.ensure_future(agent.published())
    await asyncio.sleep(0)
    await agent.stop()
    assert await observer.live() == {}
    # Nothing is published any more, so what goes now is not waited for.
    assert await published
    agent.notify([Removed(tuple(CHAIN))])
    assert await agent.published()
    assert await redis.exists(KEYS["current"], KEYS["leases"], KEYS["load"]) == 0


async def test_an_agent_that_never_started_has_nothing_to_stop(redis):
    await new_agent(redis).stop()
    assert await redis.keys() == []


async def test_a_worker_that_its_namespace_does_not_take_says_so_until_it_does(
    redis, observer, monkeypatch
):
    monkeypatch.setattr("workers.agent.agent.REGISTER_AGAIN_S", 0.5)
    await new_agent(redis, worker_id="w0", block_size=16, ttl_s=60.0).start()
    agent = new_agent(redis, worker_id="w1", block_size=32, ttl_s=60.0)

    async def refused():
        return agent.refused

    starting = asyncio.ensure_future(agent.start())
    assert await eventually(refused) == "worker w1:0 has block_size 32, but namespace agents has 16"
    await redis.flushall()
    await starting
    assert list((await observer.live()).values()) == ["w1:0"]
    assert agent.refused == ""


async def test_the_lease_is_renewed_while_the_agent_runs(redis, observer):
    async with running(new_agent(redis)):
        registered = await redis.zscore(KEYS["leases"], "1")
        assert registered is not None

        async def expiry_ms():
            return await redis.zscore(KEYS["leases"], "1") or 0.0

        # As long as it was, from each renewal on.
        await eventually(expiry_ms, lambda at: at >= registered + 900)
        assert await observer.live() == {1: "w0:0"}


class DeafRunner(ScriptRunner):
    """The first renewal gets no answer, and is given up after `patience_s`."""

    def __init__(self, redis, patience_s):
        super().__init__(redis, 5.0)
        self.num_renewals = 0
        self._patience_s = patience_s
        self._sleep = asyncio.sleep

    async def run_each(self, calls):
        if calls[0].name == "renew":
            self.num_renewals += 1
            if self.num_renewals == 1:
                await self._sleep(self._patience_s)
                raise RedisUnavailable("no answer")
        return await super().run_each(calls)


async def test_an_unanswered_renewal_is_retried_at_once(redis, observer, monkeypatch):
    """With a pause on top, an agent that missed one answer would lose its lease."""
    runner, pauses = DeafRunner(redis, patience_s=0.15), list[float]()
    sleep = asyncio.sleep

    async def noting(delay):
        if sys._getframe(1).f_code.co_name == "_keep_lease":
            pauses.append(delay)
        await sleep(delay)

    async def renewals():
        return runner.num_renewals

    monkeypatch.setattr("workers.agent.agent.asyncio.sleep", noting)
    async with running(new_agent(redis, runner=runner)):
        await eventually(renewals, lambda number: number >= 4)
        assert await observer.live() == {1: "w0:0"}
    assert 0 < pauses[0] <= 0.1
    assert pauses[1] <= 0


async def test_a_lease_that_is_made_to_lapse_is_renewed_soon_however_long_it_is(
    redis, observer, monkeypatch
):
    monkeypatch.setattr("workers.agent.agent.MAX_RENEWAL_S", 0.05)
    async with running(new_agent(redis)):
        await redis.zadd(KEYS["leases"], {"1": 1})
        await eventually(observer.live, lambda live: live == {1: "w0:0"})


async def test_the_more_workers_there_are_the_longer_an_agent_pauses(redis, monkeypatch):
    """Else the audits of 1,000 workers would take all of Redis's time."""
    pauses = {}
    sleep = asyncio.sleep

    async def noting(delay):
        pauses[sys._getframe(1).f_code.co_name] = delay
        await sleep(min(delay, 0.01))

    async def look():
        return pauses.get("_publish_metrics"), pauses.get("_audit")

    monkeypatch.setattr("workers.agent.agent.asyncio.sleep", noting)
    async with running(new_agent(redis)):
        await eventually(look, lambda now: now == (0.1, 2.0))
        await redis.zadd(KEYS["leases"], {str(n): LATER for n in range(2, 1025)})
        await eventually(look, lambda now: now == (pytest.approx(0.4), 64.0 / 2))


class RenewalRunner(ScriptRunner):
    """Notes of each renewal whether it has the load counted."""

    def __init__(self, redis):
        super().__init__(redis, timeout_s=1.0)
        self.thorough = []

    async def run_each(self, calls):
        self.thorough += [c.args[8] for c in calls if c.name == "renew"]
        return await super().run_each(calls)


async def test_loads_of_many_workers_are_counted_less_often(redis, monkeypatch):
    monkeypatch.setattr("workers.agent.agent.MAX_RENEWAL_S", 0.01)
    runner = RenewalRunner(redis)

    async def renewals():
        return runner.thorough

    async with running(new_agent(redis, runner=runner)):
        first = await eventually(renewals, lambda found: len(found) >= 6)
        assert first[:6] == [0, 0, 1] * 2
        await redis.zadd(KEYS["leases"], {str(n): LATER for n in range(2, 1025)})
        del first[:]
        later = await eventually(renewals, lambda found: len(found) >= 30)
    at = [i for i, thorough in enumerate(later) if thorough]
    assert at[-1] - at[-2] == 12


async def test_the_lease_lapses_without_renewals(redis, observer):
    await new_agent(redis, ttl_s=0.05).start()
    await eventually(observer.live, lambda live: live == {})


async def test_an_agent_whose_incarnation_was_retired_publishes_everything_again(redis, observer):
    async with running(new_agent(redis)) as agent:
        agent.notify([Stored(tuple(CHAIN[:6]), None), Stored((CHAIN[6],), CHAIN[5], Tier.HOST)])
        held = TierOverlap(device=6, host=1)
        await eventually(observer.overlaps, lambda o: o == {1: held})
        await observer.retire(Incarnation(1))
        await eventually(observer.overlaps, lambda o: o == {2: held})

        async def current():
            return await redis.hgetall(KEYS["current"])

        assert await current() == {b"w0:0": b"2"}
        # From now on it is 2 that renewals restore.
        await redis.delete(KEYS["current"])
        await eventually(current, lambda of_workers: of_workers == {b"w0:0": b"2"})
        # Further events are published under the new incarnation.
        agent.notify([Stored((CHAIN[6],), CHAIN[5])])
        await eventually(observer.overlaps, lambda o: o == {2: TierOverlap(device=7)})


async def test_requests_in_flight_outlive_a_lapsed_lease(redis, observer):
    async with running(new_agent(redis)):
        await observer.reserve(Incarnation(1), "req-1")
        await observer.lapse(Incarnation(1))
        # As routers do all the time.
        assert (
            await observer.runner.one(leases.retire_lapsed(KEYS, grace_ms=5000, heard_ms=LATER))
            == 0
        )
        await eventually(observer.live, lambda live: live == {1: "w0:0"})
        loads = (await observer.runner.one(reservations.loads(KEYS))).loads
        assert {inc: (load.requests, load.blocks) for inc, load in loads.items()} == {1: (1, 7)}
        assert await observer.runner.one(
            reservations.release(KEYS, [reservations.Release("req-1")])
        )


async def test_a_drained_worker_is_not_back_in_service_after_redis_is_flushed(redis, observer):
    async with running(new_agent(redis)):
        assert await observer.runner.one(leases.drain(KEYS, info().key)) == 0

        async def lapses_ms():
            return await redis.zscore(KEYS["leases"], "1")

        seen_ms = await lapses_ms()
        for _ in range(2):  # only then the first renewal has been answered for sure
            seen_ms = await eventually(lapses_ms, lambda ms, seen_ms=seen_ms: ms != seen_ms)
        await redis.flushall()
        await eventually(lambda: redis.hgetall(KEYS["load"]))
        snapshot = await observer.runner.one(reservations.loads(KEYS))
        assert (snapshot.loads, snapshot.paused) == ({}, [Incarnation(1)])


async def test_the_index_is_restored_after_redis_is_flushed(redis, observer):
    async with publishing(redis, observer):
        await redis.flushall()
        # The agent learns of it from its next renewal, not from an event.
        await eventually(observer.overlaps, lambda o: o == {1: TierOverlap(device=8)})
        assert await observer.live() == {1: "w0:0"}


async def test_a_worker_that_redis_lost_says_so_until_it_has_published_again(redis, observer):
    runner = GatedRunner(redis, "apply")

    async def trust():
        infos = [registration.decode_info(t) for t in await redis.hvals(KEYS["workers"])]
        return {str(info.key): info.trust.value for info in infos}

    async with publishing(redis, observer, runner=runner):
        await eventually(trust, lambda found: found == {"w0:0": "exact"})
        runner.gate.clear()
        await redis.flushall()
        await eventually(observer.live, lambda live: live == {1: "w0:0"})

        async def lapses_ms():
            return await redis.zscore(KEYS["leases"], "1")

        for _ in range(3):
            assert await trust() == {"w0:0": "bound"}
            seen_ms = await lapses_ms()
            await eventually(lapses_ms, lambda ms, seen_ms=seen_ms: ms != seen_ms)
        runner.gate.set()
        await eventually(trust, lambda found: found == {"w0:0": "exact"})
        assert await observer.overlaps() == {1: TierOverlap(device=8)}


async def test_the_next_batch_notices_that_redis_was_flushed(redis, observer, monkeypatch):
    for others in ("AUDIT_INTERVAL_S", "MAX_RENEWAL_S"):
        monkeypatch.setattr(f"workers.agent.agent.{others}", 3600.0)
    async with publishing(redis, observer, 6) as agent:
        await redis.flushall()
        agent.notify([Stored(tuple(CHAIN[6:]), CHAIN[5])])
        await eventually(observer.overlaps, lambda o: o == {1: TierOverlap(device=8)})


async def test_a_batch_that_redis_lost_leads_to_a_resync(redis, observer):
    async with publishing(redis, observer, 4) as agent:
        await observer.reserve(Incarnation(1), "req-1")
        await redis.delete(*[key async for key in redis.scan_iter(match="*blocks:*")])
        await observer.lose_batches(1)
        agent.notify([Stored((CHAIN[4],), CHAIN[3])])
        await eventually(observer.overlaps, lambda o: o == {2: TierOverlap(device=5)})
        # Requests in flight are the new incarnation's.
        loads = (await observer.runner.one(reservations.loads(KEYS))).loads
        assert {inc: load.requests for inc, load in loads.items()} == {2: 1}


async def test_an_incarnation_with_a_refused_batch_is_not_activated(redis, observer, monkeypatch):
    monkeypatch.setattr("workers.agent.agent.AUDIT_INTERVAL_S", 3600.0)
    runner = FaultyRunner(redis)
    async with publishing(redis, observer, 4, runner=runner) as agent:
        runner.answers = [False, False]
        agent.notify([Stored(tuple(CHAIN[4:]), CHAIN[3])])
        await eventually(observer.overlaps, lambda o: o == {3: TierOverlap(device=8)})


async def test_a_resync_abandons_a_batch_that_is_still_under_way(redis, observer):
    runner = GatedRunner(redis, "apply")
    async with publishing(redis, observer, 4, runner=runner) as agent:
        runner.gate.clear()
        runner.reached.clear()
        agent.notify([Stored(tuple(CHAIN[4:]), CHAIN[3])])
        await runner.reached.wait()
        await observer.retire(Incarnation(1))
        await eventually(observer.live, lambda live: live == {2: "w0:0"})
        runner.gate.set()
        await eventually(observer.overlaps, lambda o: o == {2: TierOverlap(device=8)})


@pytest.mark.parametrize("drain_blocks", [workers.agent.publish.DRAIN_BLOCKS, 1])
async def test_routers_see_the_old_incarnation_until_the_new_one_is_complete(
    redis, observer, monkeypatch, drain_blocks
):
    monkeypatch.setattr(workers.agent.publish, "DRAIN_BLOCKS", drain_blocks)
    chain = [SequenceHash(0x3333_0000_0000_0000 + i) for i in range(40)]
    runner = GatedRunner(redis, "activate")

    async def overlap():
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

        async def expiry_ms():
            return await redis.zscore(KEYS["leases"], "2") or 0.0

        await eventually(expiry_ms, lambda at: at > before + 300)
        assert await overlap() == {1: TierOverlap(device=40)}

        runner.gate.set()
        await eventually(overlap, lambda o: o == {2: TierOverlap(device=39)})


async def test_a_worker_whose_agent_stops_during_activation_is_no_longer_routed_to(redis, observer):
    runner = GatedRunner(redis, "activate", answer=True)
    agent = new_agent(redis, runner=runner)
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


async def test_the_index_is_restored_after_redis_restarts_empty(own_redis_server):
    async with connect(own_redis_server.url) as redis:
        observer = Observer(redis)
        async with publishing(redis, observer, 6) as agent:
            own_redis_server.kill()
            agent.notify([Stored(tuple(CHAIN[6:]), CHAIN[5]), Removed((CHAIN[7],))])
            own_redis_server.start()
            await eventually(observer.overlaps, lambda o: o == {1: TierOverlap(device=7)})
            assert await observer.live() == {1: "w0:0"}


async def test_a_starting_agent_waits_for_an_unreachable_redis_and_logs_it(
    own_redis_server, caplog
):
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


async def test_stopping_without_redis_does_not_fail(own_redis_server):
    async with connect(own_redis_server.url) as redis:
        agent = new_agent(redis)
        await agent.start()
        agent.notify([Stored(tuple(CHAIN), None)])
        published = asyncio.ensure_future(agent.published())
        own_redis_server.kill()
        await agent.stop()
        assert not await published


async def test_a_second_process_with_the_same_key_takes_over_at_once(redis, observer):
    old = new_agent(redis)
    await old.start()
    old.notify([Stored(tuple(CHAIN), None)])
    await new_agent(redis).start()
    assert await observer.live() == {2: "w0:0"}
    assert await observer.overlaps() == {}


async def test_a_replaced_agent_waits_until_the_other_process_has_ended(
    redis, observer, monkeypatch
):
    monkeypatch.setattr("workers.agent.agent.REGISTER_AGAIN_S", 0.5)
    async with running(new_agent(redis)) as old:
        old.notify([Stored(tuple(CHAIN), None)])
        new = new_agent(redis)
        await new.start()

        async def refused():
            return old.refused

        assert await eventually(refused) == "another process has registered as worker w0:0"
        assert await observer.live() == {new.incarnation: "w0:0"}
        await new.stop()
        await eventually(observer.overlaps, lambda o: list(o.values()) == [TierOverlap(device=8)])
        assert await observer.live() == {old.incarnation: "w0:0"}


async def test_an_agent_is_back_once_its_namespace_has_its_block_size_again(
    redis, observer, monkeypatch
):
    monkeypatch.setattr("workers.agent.agent.REGISTER_AGAIN_S", 0.5)
    async with running(new_agent(redis)) as agent:

        async def refused():
            return agent.refused

        async with redis.pipeline(transaction=True) as pipe:
            pipe.delete(KEYS["writers"])
            pipe.hset(KEYS["meta"], "block_size", "4")
            await pipe.execute()
        assert "w0:0 has block_size 16" in await eventually(refused)
        await redis.hset(KEYS["meta"], "block_size", "16")
        await eventually(refused, lambda why: not why)
        await eventually(observer.live, lambda live: live == {agent.incarnation: "w0:0"})


async def test_a_worker_whose_engine_is_ill_gets_no_requests_and_keeps_its_blocks(redis, observer):
    await new_agent(redis, worker_id="other").start()
    async with publishing(redis, observer) as agent:
        agent.ill = "does not answer"
        await eventually(observer.live, lambda live: "w0:0" not in live.values())
        agent.ill = ""
        await eventually(observer.live, lambda live: live.get(agent.incarnation) == "w0:0")
        assert (await observer.overlaps())[agent.incarnation] == TierOverlap(device=8)


@pytest.mark.parametrize(
    ("task", "owner", "method"),
    [
        ("lease", Agent, "_renew"),
        ("blocks", Publisher, "publish"),
        ("audit", Agent, "_audit"),
        ("measurements", Agent, "_publish_metrics"),
        ("models", Agent, "_announce"),
    ],
)
async def test_no_surprise_in_an_agent_ends_it(redis, observer, monkeypatch, task, owner, method):
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.01)
    surprises, does = [RecursionError(task)], getattr(owner, method)

    def fails_at_first(*given, **named):
        if surprises:
            raise surprises.pop()
        return does(*given, **named)

    async def failures():
        [metric] = FAILURES.collect()
        return sum(one.value for one in metric.samples if one.labels == {"task": task})

    before = await failures()
    monkeypatch.setattr(owner, method, fails_at_first)
    async with running(new_agent(redis)) as agent:
        await eventually(failures, lambda number: number == before + 1)
        agent.notify([Stored(tuple(CHAIN), None)])
        await eventually(observer.overlaps, lambda o: list(o.values()) == [TierOverlap(device=8)])
        assert await observer.live() == {agent.incarnation: "w0:0"}


async def test_a_process_is_not_replaced_by_an_ended_one_that_redis_brings_back(
    redis, observer, monkeypatch
):
    monkeypatch.setattr("workers.agent.agent.REGISTER_AGAIN_S", 0.5)
    await new_agent(redis).start()
    before = {key: await redis.dump(key) for key in await redis.keys()}
    async with running(new_agent(redis)) as agent:
        agent.notify([Stored(tuple(CHAIN), None)])
        async with redis.pipeline(transaction=True) as failover:
            failover.flushall()
            for key, value in before.items():
                failover.restore(key, 0, value or b"")
            await failover.execute()
        assert await observer.live() == {1: "w0:0"}
        await observer.lapse(Incarnation(1))
        await eventually(observer.live, lambda live: live == {agent.incarnation: "w0:0"})
        await eventually(observer.overlaps, lambda o: list(o.values()) == [TierOverlap(device=8)])


async def test_metrics_are_published_every_100_ms_with_all_fields(redis, observer):
    agent = new_agent(redis)
    agent.notify([Stored(tuple(CHAIN), None), Stored(tuple(CHAIN[:3]), None, Tier.HOST)])
    agent.notify([Removed(tuple(CHAIN[2:]))])
    shown = replace(MEASURED, device_blocks=2, host_blocks=1, disk_blocks=0).beside(Load())
    async with running(agent):

        async def entries():
            return await observer.redis.xrange(KEYS["metrics"])

        found = await eventually(entries, lambda seen: len(seen) >= 6)
    at_ms = [int(entry_id.split(b"-")[0]) for entry_id, _ in found[:6]]
    assert 5 * METRICS_INTERVAL_S * 1000 - 10 <= at_ms[5] - at_ms[0] <= 1500
    text = {name.decode(): value.decode() for name, value in found[0][1].items()}
    assert text == {
        "worker": "w0:0",
        "incarnation": "1",
        **registration.encode_metrics(shown, LEARNED, READ),
    }
    assert registration.decode_metrics(found[0][1]) == (shown, LEARNED, READ)


async def test_the_metrics_stream_is_trimmed(redis):
    async with redis.pipeline(transaction=False) as pipe:
        for _ in range(METRICS_MAXLEN + 1000):
            pipe.xadd(KEYS["metrics"], {"worker": "w9:0"})
        await pipe.execute()
    async with running(new_agent(redis)):

        async def length():
            return await redis.xlen(KEYS["metrics"])

        # Trimmed by whole nodes of 100 entries.
        await eventually(length, lambda seen: METRICS_MAXLEN <= seen <= METRICS_MAXLEN + 100)


async def test_an_incarnation_number_already_in_use_in_a_shard_is_given_back(redis, observer):
    await redis.hset(SHARD["applied"], mapping={"1": "5 stranger"})
    await redis.hset(KEYS.of_shard(1)["applied"], mapping={"2": "0 stranger"})
    agent = new_agent(redis, shards=2)
    await agent.start()
    assert await observer.live() == {3: "w0:0"}
    for name in ("workers", "writers", "load"):
        assert await redis.hkeys(KEYS[name]) == [b"3"]
    assert await redis.zrange(KEYS["leases"], 0, -1) == [b"3"]


async def test_a_worker_leaves_while_redis_is_away_once_its_engine_is_idle(own_redis_server):
    async with connect(own_redis_server.url) as client:
        agent = fake_agent(ScriptRunner(client, 1.0), KEYS, "w0", lease_ttl_s=0.5)
        await agent.start()
        own_redis_server.stop()
        idle = False

        def is_idle():
            return idle

        draining = asyncio.create_task(agent.drain(60.0, is_idle))
        done, _ = await asyncio.wait([draining], timeout=2.0)
        assert not done, "its engine still answers"
        idle = True
        assert await draining
