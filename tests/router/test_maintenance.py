"""What a router does besides decisions, on a real Redis."""

import asyncio
import logging
import time
from collections import Counter
from contextlib import asynccontextmanager
from types import SimpleNamespace

from app.core.errors import RedisUnavailable
from app.core.settings.router import RouterSettings
from app.core.types import SequenceHash
from app.router.fleet import Fleet
from app.router.history import History
from app.router.limiter import Limiter
from app.router.maintenance import RETIRE_GRACE_MS, Maintenance
from app.router.metrics import Telemetry
from app.router.replica import Replica, UsageTally
from app.state import reservations
from app.state.connect import connect
from app.state.predictions import PredictionSettings, predict, predicted
from app.state.scripts import Call, ScriptRunner
from tests.eventually import eventually
from tests.fake_worker import KEYS, NAMESPACE, SHARD, FakeWorkers


def maintenance_of(redis, runner=None, telemetry=None, predicted=None, fleet=None):
    replica = Replica(
        runner or ScriptRunner(redis, 5.0),
        KEYS,
        RouterSettings(namespace=NAMESPACE),
        fleet or Fleet(redis, KEYS, 5.0),
        telemetry or Telemetry(),
        UsageTally(KEYS, 35, lambda: None),
        Limiter(KEYS),
    )
    history = History(replica)
    if predicted is not None:
        history.predictions = predicted
    return Maintenance(replica, history)


class CountingRunner(ScriptRunner):
    """Counts what it is asked to run. While `down`, Redis cannot be reached through it."""

    def __init__(self, redis):
        super().__init__(redis, 5.0)
        self.ran = Counter()
        self.down = False

    async def run_each(self, calls):
        self.ran.update(c.name for c in calls)
        if self.down:
            return [RedisUnavailable("unreachable")] * len(calls)
        return await super().run_each(calls)

    async def runs_of(self, script, least):
        """Wait until it was asked `least` more times."""
        self.ran.clear()

        async def number():
            return self.ran[script]

        await eventually(number, lambda found: found >= least)


@asynccontextmanager
async def running(maintenance):
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(maintenance.run())
        try:
            yield
        finally:
            task.cancel()


async def test_more_incarnations_than_one_call_may_ask_about_are_swept(redis):
    await FakeWorkers(redis).register("w1")
    lost = {str(n): "0 nonce" for n in range(10, 9010)}
    await redis.hset(SHARD["applied"], mapping=lost)

    async def num_writers():
        return await redis.hlen(SHARD["applied"])

    async with running(maintenance_of(redis)):
        await eventually(num_writers, lambda number: number == 1)


async def test_an_expired_prediction_never_comes_back_however_short_its_lifetime(
    redis, monkeypatch
):
    """Slice letters repeat every 26 slices, 3.9 s here. With half of the buckets every minute, a
    round of pruning would take two."""
    monkeypatch.setattr("app.router.maintenance.MAINTENANCE_INTERVAL_S", 60.0)
    # A step may be late by half a second on a busy machine; of many, each would have to be sooner.
    monkeypatch.setattr("app.router.maintenance.PRUNE_BUCKETS", 1024)
    settings = PredictionSettings(lifetime_s=0.6, max_entries=65_536)
    inc = await FakeWorkers(redis).register("w1")
    runner, fleet = ScriptRunner(redis, 5.0), Fleet(redis, KEYS, 5.0)
    await fleet.view(await runner.one(reservations.loads(KEYS)))
    chains = [[SequenceHash(n << 56)] for n in range(256)]
    looks = [predicted(SHARD, chain, settings) for chain in chains]

    async def num_foreseen():
        return sum(map(len, await runner.run(looks)))

    calls = [predict(SHARD, inc, chain, settings, "1-aa", 600_000) for chain in chains]
    # Together, lest they expire before anybody looks.
    made = await runner.run([*calls, *looks])
    begun = time.monotonic()
    assert sum(map(len, made[len(calls) :])) == 256
    async with running(maintenance_of(redis, runner, predicted=settings, fleet=fleet)):
        await eventually(num_foreseen, lambda number: number == 0)
        while time.monotonic() - begun < 30 * settings.slice_ms / 1000:
            assert await num_foreseen() == 0


async def test_nobody_is_retired_soon_after_a_start_or_an_outage(redis, monkeypatch):
    """Redis may have been unreachable until then, so that agents could renew no lease."""

    async def num_workers():
        return await redis.hlen(KEYS["workers"])

    clock = SimpleNamespace(ahead_s=0.0, monotonic=lambda: time.monotonic() + clock.ahead_s)
    monkeypatch.setattr("app.router.maintenance.time", clock)
    monkeypatch.setattr("app.router.fleet.time", clock)
    monkeypatch.setattr("app.router.maintenance.MAINTENANCE_INTERVAL_S", 0.01)
    workers, fleet, runner = FakeWorkers(redis), Fleet(redis, KEYS, 5.0), CountingRunner(redis)
    async with running(maintenance_of(redis, runner, fleet=fleet)):
        for outage in (False, True):
            inc = await workers.register("w1")
            if outage:
                fleet.note(RedisUnavailable("unreachable"))
            await redis.zadd(KEYS["leases"], {str(inc): 1})
            await runner.runs_of("expire", 5)
            assert "retire_lapsed" not in runner.ran
            clock.ahead_s += RETIRE_GRACE_MS / 1000
            await eventually(num_workers, lambda number: number == 0)


async def test_nobody_is_retired_soon_after_an_outage_that_only_maintenance_noticed(
    redis, monkeypatch
):
    clock = SimpleNamespace(now_s=time.monotonic(), monotonic=lambda: clock.now_s)
    monkeypatch.setattr("app.router.maintenance.time", clock)
    monkeypatch.setattr("app.router.fleet.time", clock)
    monkeypatch.setattr("app.router.maintenance.MAINTENANCE_INTERVAL_S", 0.01)
    runner = CountingRunner(redis)
    inc = await FakeWorkers(redis).register("w1")
    async with running(maintenance_of(redis, runner)):
        await runner.runs_of("expire", 2)
        clock.now_s += RETIRE_GRACE_MS / 1000
        await runner.runs_of("retire_lapsed", 1)
        runner.down = True
        await runner.runs_of("expire", 2)
        await redis.zadd(KEYS["leases"], {str(inc): 1})
        runner.down = False
        await runner.runs_of("expire", 5)
        assert "retire_lapsed" not in runner.ran
    assert await redis.hlen(KEYS["workers"]) == 1


async def test_a_worker_is_retired_only_some_time_after_its_lease_ran_out(redis, monkeypatch):
    clock = SimpleNamespace(ahead_s=0, monotonic=lambda: time.monotonic() + clock.ahead_s)
    monkeypatch.setattr("app.router.maintenance.time", clock)
    monkeypatch.setattr("app.router.maintenance.RETIRE_GRACE_MS", 3_600_000)
    monkeypatch.setattr("app.router.maintenance.MAINTENANCE_INTERVAL_S", 0.01)
    workers, runner = FakeWorkers(redis), CountingRunner(redis)
    inc = await workers.register("w1")
    await workers.occupy("w1", "r1")

    async def num_workers():
        return await redis.hlen(KEYS["workers"])

    async with running(maintenance_of(redis, runner)):
        await runner.runs_of("expire", 2)
        seconds, _ = await redis.time()
        await redis.zadd(KEYS["leases"], {str(inc): 1000 * (seconds - 60)})
        clock.ahead_s += 3_600
        await runner.runs_of("retire_lapsed", 3)
        assert await workers.reserved() == {"r1": "w1:0"}
        await redis.zadd(KEYS["leases"], {str(inc): 1000 * (seconds - 2 * 3600)})
        await eventually(num_workers, lambda number: number == 0)


async def test_everything_goes_on_after_an_outage(own_redis_server, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG, "app.router.maintenance")
    monkeypatch.setattr("app.router.maintenance.MAINTENANCE_INTERVAL_S", 0.01)
    monkeypatch.setattr("app.router.maintenance.FILL_INTERVAL_S", 0.01)
    telemetry = Telemetry()
    predicted = PredictionSettings(lifetime_s=0.6, max_entries=65_536)

    async def fill():
        return telemetry.registry.get_sample_value("kvroute_index_fill")

    async def fewest_failures():
        told = Counter(record.getMessage().split(":")[0] for record in caplog.records)
        return min(told[task] for task in ("maintenance", "prune", "sweep"))

    async with connect(own_redis_server.url) as redis:
        workers = FakeWorkers(redis)
        await workers.register("w1")
        await workers.publish("w1", range(256))
        async with running(maintenance_of(redis, telemetry=telemetry, predicted=predicted)):
            await eventually(fill)
            own_redis_server.kill()
            # More than once: each of them tried again.
            await eventually(fewest_failures, lambda number: number >= 3)
            own_redis_server.start()
            await FakeWorkers(redis).register("w1")
            await eventually(fill, lambda value: value == 0.0)


async def test_every_shard_is_swept_and_pruned(redis):
    settings = PredictionSettings(lifetime_s=0.6, max_entries=65_536)
    inc = await FakeWorkers(redis).register("w1")
    await redis.hset(KEYS["meta"], "shards", 2)
    last = KEYS.of_shard(1)
    await redis.hset(last["applied"], mapping={str(inc): "0 nonce-w1", "7": "0 gone"})
    chains = [[SequenceHash(n << 56)] for n in range(256)]
    await ScriptRunner(redis, 5.0).run(
        [predict(last, inc, chain, settings, "1-aa", 600_000) for chain in chains]
    )

    async def left():
        return len(await redis.keys(last["predicted:"] + "*")) + await redis.hlen(last["applied"])

    assert await left() > 2
    async with running(maintenance_of(redis, predicted=settings)):
        await eventually(left, lambda number: number == 1)


async def test_a_release_that_arrives_while_a_full_queue_is_being_released_is_made_too(
    redis, monkeypatch
):
    later = ["r3"]

    class Runner(ScriptRunner):
        """Has another request released while it releases the first ones."""

        async def run_each(self, calls):
            replies = await super().run_each(calls)
            if later and any(c.name == "release" for c in calls):
                maintenance.release_soon(later.pop())
            return replies

    monkeypatch.setattr("app.router.maintenance.MAX_REPORTS", 2)
    workers, telemetry = FakeWorkers(redis), Telemetry()
    await workers.register("w1")
    await workers.occupy("w1", "r0", "r1", "r2", "r3")
    maintenance = maintenance_of(redis, Runner(redis, 5.0), telemetry)
    maintenance.release_soon("r0")  # until the queue is full
    maintenance.release_soon("r1")
    maintenance.release_soon("r2")
    async with running(maintenance):
        await eventually(workers.reserved, lambda reserved: reserved == {"r0": "w1:0"})

        async def counted():
            name = "kvroute_reservations_total"
            return telemetry.registry.get_sample_value(name, {"event": "released"})

        await eventually(counted, lambda number: number == 3)


async def test_a_report_that_always_fails_holds_up_no_other(redis, monkeypatch):
    monkeypatch.setattr("app.router.maintenance.MAINTENANCE_INTERVAL_S", 0.01)
    monkeypatch.setattr("app.router.maintenance.EXPIRE_LIMIT", 1)
    workers, fleet = FakeWorkers(redis), Fleet(redis, KEYS, 5.0)
    await workers.register("w1")
    await workers.occupy("w1", "r1", "r2")
    runner = CountingRunner(redis)
    maintenance = maintenance_of(redis, runner, fleet=fleet)
    maintenance.tell_soon(Call("release", (KEYS["meta"],), (), list, "ZCARD"))
    maintenance.release_soon("r1")
    maintenance.release_soon("r2")
    async with running(maintenance):
        await eventually(workers.reserved, lambda reserved: not reserved)
        await runner.runs_of("release", 2)
        assert not fleet.recovers


async def test_how_full_the_index_is_is_known_as_soon_as_its_shards_are(redis, monkeypatch):
    monkeypatch.setattr("app.router.maintenance.FILL_INTERVAL_S", 3600.0)
    workers, telemetry = FakeWorkers(redis), Telemetry()
    await workers.register("w1")
    await workers.publish("w1", range(256))

    async def fill():
        return telemetry.registry.get_sample_value("kvroute_index_fill")

    async with running(maintenance_of(redis, telemetry=telemetry)):
        await eventually(fill, lambda value: bool(value))


async def test_an_incarnation_whose_number_was_lost_with_the_data_is_not_swept(redis):
    workers, swept, emptied = FakeWorkers(redis), Counter[str](), asyncio.Event()
    lost = []

    class Runner(ScriptRunner):
        """Redis is unreachable, and comes back empty, once an incarnation has been found lost."""

        async def run(self, calls):
            names = {c.name for c in calls}
            if "sweep" in names and lost and not emptied.is_set():
                await redis.flushall()
                await workers.register("w1")
                assert await workers.register("w2") == 2
                await workers.publish("w2", range(40))
                emptied.set()
                raise RedisUnavailable("gone")
            replies = await super().run(calls)
            if "absent" in names and any(replies):
                lost.extend(replies[0])
            if "sweep" in names and emptied.is_set():
                swept["steps"] += 1
            return replies

    async def steps():
        return swept["steps"]

    await workers.register("w1")
    await redis.hset(SHARD["applied"], "2", "0 nonce")
    async with running(maintenance_of(redis, Runner(redis, 5.0))):
        async with asyncio.timeout(20.0):
            await emptied.wait()
        await eventually(steps, lambda n: n >= 3)
    assert await redis.hexists(SHARD["applied"], "2")
