"""What a router keeps in order, in a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from app.core.config import RouterSettings
from app.core.scripts import ScriptRunner
from app.core.topology import Client
from app.fleet import Fleet
from app.maintenance import Maintenance
from app.telemetry import Telemetry
from tests.eventually import eventually
from tests.fake_workers import KEYS, NAMESPACE, SHARD, FakeWorkers


@asynccontextmanager
async def maintained(redis: Client) -> AsyncIterator[None]:
    maintenance = Maintenance(
        ScriptRunner(redis, 5.0),
        KEYS,
        RouterSettings(namespace=NAMESPACE),
        Fleet(redis, KEYS, 5.0),
        Telemetry(),
        None,
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
