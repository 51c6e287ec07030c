"""What a router does besides decisions, on a real Redis."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from app.core.config import RouterSettings
from app.core.errors import RedisUnavailable
from app.core.predictions import PredictionSettings, foresee, predict
from app.core.scripts import Call, ScriptRunner
from app.core.topology import Client
from app.core.types import SequenceHash
from app.fleet import Fleet
from app.maintenance import RETIRE_GRACE_MS, Maintenance
from app.telemetry import Telemetry
from tests.eventually import eventually
from tests.fake_workers import KEYS, NAMESPACE, SHARD, FakeWorkers


def maintenance_of(
    redis: Client,
    runner: ScriptRunner | None = None,
    telemetry: Telemetry | None = None,
    predicted: PredictionSettings | None = None,
    fleet: Fleet | None = None,
) -> Maintenance:
    return Maintenance(
        runner or ScriptRunner(redis, 5.0),
        KEYS,
        RouterSettings(namespace=NAMESPACE),
        fleet or Fleet(redis, KEYS, 5.0),
        telemetry or Telemetry(),
        predicted,
    )


@asynccontextmanager
async def running(maintenance: Maintenance) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(maintenance.run())
        try:
            yield
        finally:
            task.cancel()


async def test_more_incarnations_than_one_call_may_ask_about_are_swept(redis: Client) -> None:
    await FakeWorkers(redis).register("w1")
    lost = {str(n): "0 nonce" for n in range(10, 9010)}
    await redis.hset(SHARD["applied"], mapping=lost)

    async def num_writers() -> int:
        return await redis.hlen(SHARD["applied"])

    async with running(maintenance_of(redis)):
        await eventually(num_writers, lambda number: number == 1)


async def test_an_expired_prediction_never_comes_back_however_short_its_lifetime(
    redis: Client,
) -> None:
    """Slice letters repeat every 26 slices, 3.9 s here. With 64 of 2,048 buckets every 250 ms, a
    round of pruning would take 8 s."""
    settings = PredictionSettings(lifetime_s=0.6, max_entries=65_536)
    inc = await FakeWorkers(redis).register("w1")
    runner = ScriptRunner(redis, 5.0)
    chains = [[SequenceHash(n << 56)] for n in range(256)]

    async def num_foreseen() -> int:
        found = await runner.run([foresee(SHARD, chain, settings) for chain in chains])
        return sum(map(len, found))

    async with running(maintenance_of(redis, predicted=settings)):
        await runner.run([predict(SHARD, inc, chain, settings) for chain in chains])
        begun = time.monotonic()
        assert await num_foreseen() == 256
        await eventually(num_foreseen, lambda number: number == 0)
        while time.monotonic() - begun < 30 * settings.slice_ms / 1000:
            assert await num_foreseen() == 0


async def test_nobody_is_retired_soon_after_a_start_or_an_outage(
    redis: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis may have been unreachable until then, so that agents could renew no lease."""
    ran: Counter[str] = Counter()

    class Runner(ScriptRunner):
        async def run(self, calls: Sequence[Call[Any]]) -> list[Any]:
            ran.update(c.script.name for c in calls)
            return await super().run(calls)

    async def num_steps() -> int:
        return ran["expire"]

    async def num_workers() -> int:
        return await redis.hlen(KEYS["workers"])

    clock = SimpleNamespace(ahead_s=0.0, monotonic=lambda: time.monotonic() + clock.ahead_s)
    monkeypatch.setattr("app.maintenance.time", clock)
    monkeypatch.setattr("app.fleet.time", clock)
    monkeypatch.setattr("app.maintenance.MAINTENANCE_INTERVAL_S", 0.01)
    workers, fleet = FakeWorkers(redis), Fleet(redis, KEYS, 5.0)
    async with running(maintenance_of(redis, Runner(redis, 5.0), fleet=fleet)):
        for outage in (False, True):
            inc = await workers.register("w1")
            if outage:
                fleet.note(RedisUnavailable("unreachable"))
            await redis.zadd(KEYS["leases"], {str(inc): 1})
            ran.clear()
            await eventually(num_steps, lambda number: number >= 5)
            assert "lapse" not in ran
            clock.ahead_s += RETIRE_GRACE_MS / 1000
            await eventually(num_workers, lambda number: number == 0)


async def test_a_release_that_arrives_while_a_full_queue_is_being_released_is_made_too(
    redis: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = ["r3"]

    class Runner(ScriptRunner):
        """Has another request released while it releases the first ones."""

        async def run(self, calls: Sequence[Call[Any]]) -> list[Any]:
            replies = await super().run(calls)
            if later and any(c.script.name == "release" for c in calls):
                maintenance.release_soon(later.pop())
            return replies

    monkeypatch.setattr("app.maintenance.MAX_RELEASES", 2)
    workers, telemetry = FakeWorkers(redis), Telemetry()
    await workers.register("w1")
    await workers.occupy("w1", "r0", "r1", "r2", "r3")
    maintenance = maintenance_of(redis, Runner(redis, 5.0), telemetry)
    maintenance.release_soon("r0")  # until the queue is full
    maintenance.release_soon("r1")
    maintenance.release_soon("r2")
    async with running(maintenance):
        await eventually(workers.reserved, lambda reserved: reserved == {"r0": "w1:0"})

        async def counted() -> float | None:
            name = "kvroute_reservations_total"
            return telemetry.registry.get_sample_value(name, {"event": "released"})

        await eventually(counted, lambda number: number == 3)


async def test_how_full_the_index_is_is_known_as_soon_as_its_shards_are(
    redis: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.maintenance.FILL_INTERVAL_S", 3600.0)
    workers, telemetry = FakeWorkers(redis), Telemetry()
    await workers.register("w1")
    await workers.publish("w1", range(256))

    async def fill() -> float | None:
        return telemetry.registry.get_sample_value("kvroute_index_fill")

    async with running(maintenance_of(redis, telemetry=telemetry)):
        await eventually(fill, lambda value: bool(value))


async def test_an_incarnation_whose_number_was_lost_with_the_data_is_not_swept(
    redis: Client,
) -> None:
    workers, swept, emptied = FakeWorkers(redis), Counter[str](), asyncio.Event()
    lost: list[Any] = []

    class Runner(ScriptRunner):
        """Redis is unreachable, and comes back empty, once an incarnation has been found lost."""

        async def run(self, calls: Sequence[Call[Any]]) -> list[Any]:
            names = {c.script.name for c in calls}
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

    async def steps() -> int:
        return swept["steps"]

    await workers.register("w1")
    await redis.hset(SHARD["applied"], "2", "0 nonce")
    async with running(maintenance_of(redis, Runner(redis, 5.0))):
        async with asyncio.timeout(20.0):
            await emptied.wait()
        await eventually(steps, lambda n: n >= 3)
    assert await redis.hexists(SHARD["applied"], "2")
