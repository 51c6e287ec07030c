"""Redis is unreachable for longer than leases last."""

import asyncio

from tests.e2e.test_healing import LEASE_S, short_intervals, world
from tests.eventually import eventually
from tests.redis_servers import stopped

short_intervals = short_intervals  # a fixture, which pytest finds by its name


async def test_every_request_is_routed_and_no_worker_has_to_republish(
    own_redis_server, monkeypatch
):
    monkeypatch.setattr("tests.e2e.test_healing.REDIS_TIMEOUT_S", 0.5)
    async with world(own_redis_server.url) as cluster:
        incarnations = {key: agent.incarnation for key, agent in cluster.agents.items()}
        degraded = []

        async def is_degraded():
            # Raises NoWorkers if no worker is left.
            degraded.append((await cluster.route(0, reserve=False)).degraded)
            return degraded[-1]

        with stopped(own_redis_server.pid):
            loop = asyncio.get_running_loop()
            end = loop.time() + 1.5 * LEASE_S
            while loop.time() < end:
                await is_degraded()
        await eventually(is_degraded, lambda found: not found)
        assert any(degraded)
        await cluster.heals("once Redis is back")
        assert {key: agent.incarnation for key, agent in cluster.agents.items()} == incarnations
