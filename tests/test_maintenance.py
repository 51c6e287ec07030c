"""What a router keeps in order, in a real Redis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from app.core.config import RouterSettings
from app.core.predictions import PredictionSettings, foresee, predict
from app.core.scripts import ScriptRunner
from app.core.topology import Client
from app.core.types import SequenceHash
from app.fleet import Fleet
from app.maintenance import Maintenance
from app.telemetry import Telemetry
from tests.eventually import eventually
from tests.fake_workers import KEYS, NAMESPACE, SHARD, FakeWorkers


@asynccontextmanager
async def maintained(
    redis: Client, predicted: PredictionSettings | None = None
) -> AsyncIterator[None]:
    maintenance = Maintenance(
        ScriptRunner(redis, 5.0),
        KEYS,
        RouterSettings(namespace=NAMESPACE),
        Fleet(redis, KEYS, 5.0),
        Telemetry(),
        predicted,
    )
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(maintenance.run())
        try:
            yield
        finally:
            task.cancel()


async def test_more_incarnations_than_one_script_may_ask_of_are_swept(redis: Client) -> None:
    await FakeWorkers(redis).register("w1")
    lost = {str(n): "0 nonce" for n in range(10, 9010)}
    await redis.hset(SHARD["applied"], mapping=lost)

    async def num_writers() -> int:
        return await redis.hlen(SHARD["applied"])

    async with maintained(redis):
        await eventually(num_writers, lambda number: number == 1)


async def test_a_prediction_that_is_over_stays_so_however_short_its_life(redis: Client) -> None:
    """Letters of slices come round after 26 of them, 3.9 s here; at 64 of 2,048 buckets every
    250 ms a round would take 8 s."""
    settings = PredictionSettings(lifetime_s=0.6, max_entries=65_536)
    inc = await FakeWorkers(redis).register("w1")
    runner = ScriptRunner(redis, 5.0)
    chains = [[SequenceHash(n << 56)] for n in range(256)]

    async def num_foreseen() -> int:
        found = await runner.run([foresee(SHARD, chain, settings) for chain in chains])
        return sum(map(len, found))

    async with maintained(redis, settings):
        await runner.run([predict(SHARD, inc, chain, settings) for chain in chains])
        begun = time.monotonic()
        assert await num_foreseen() == 256
        await eventually(num_foreseen, lambda number: number == 0)
        while time.monotonic() - begun < 30 * settings.slice_ms / 1000:
            assert await num_foreseen() == 0
