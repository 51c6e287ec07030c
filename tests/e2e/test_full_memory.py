"""Redis reaches maxmemory: new blocks are not published, which is logged; nothing else changes.

What was published stays exact, blocks that engines drop are withdrawn, leases and requests carry
on, and once there is memory again, everything is published.
"""

import asyncio
import logging

from tests.e2e.test_healing import CHAINS, KEYS, LEASE_S, WORKERS, short_intervals, world
from tests.eventually import eventually
from workers.agent import publish

short_intervals = short_intervals  # a fixture, which pytest finds by its name


async def fill_up(cluster):
    """Redis accepts no more data from now on."""
    await cluster.redis.config_set("maxmemory", 1)


async def make_room(cluster):
    await cluster.redis.config_set("maxmemory", 0)


async def test_a_full_redis_does_not_stop_routing_or_leave_overlaps_too_long(
    redis_server, monkeypatch, caplog
):
    monkeypatch.setattr(publish, "FULL_PAUSE_S", 0.02)
    async with world(redis_server.url) as cluster:
        before = {name: agent.incarnation for name, agent in cluster.agents.items()}
        try:
            await fill_up(cluster)
            caplog.clear()
            cluster.resume()
            await asyncio.sleep(1.5 * LEASE_S)  # all are renewed meanwhile
            await cluster.pause()
            # To be withdrawn, to be moved to the host, and not to be published.
            cluster.hold("w0", 0, 4, 0)
            cluster.hold("w1", 0, 4, 16)
            cluster.hold("w2", 1, 20, 0)

            async def shown():
                of_0, of_1 = await cluster.overlaps(0), await cluster.overlaps(1)
                assert of_0 is not None
                assert of_1 is not None
                return [of_0["w0"].total, (of_0["w1"].device, of_0["w1"].host), of_1["w2"].total]

            async def overlaps_too_long():
                found = []
                for n in range(len(CHAINS)):
                    for name, overlap in (await cluster.overlaps(n) or {}).items():
                        if overlap.total > cluster.held[name, n].total:
                            found.append(f"{name}, prompt {n}: {overlap}")
                return found

            await eventually(shown, lambda found: found == [4, (4, 16), 18])
            await eventually(overlaps_too_long, lambda found: not found)
            assert {name: agent.incarnation for name, agent in cluster.agents.items()} == before
            decision = await cluster.route(0)
            assert decision.reserved
            assert not decision.degraded
            cluster.in_flight.append(decision.request_id)
            assert decision.request_id in await cluster.records()
            assert await cluster.router.release(cluster.in_flight.pop())
            assert decision.request_id not in await cluster.records()
            errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
            assert {
                f"{name}:0: Redis is full: new blocks are not published" for name in WORKERS
            } == {*errors}
        finally:
            await make_room(cluster)
        await cluster.heals("with room again")


async def test_workers_reregister_and_old_incarnations_are_swept_in_a_full_redis(
    redis_server, monkeypatch
):
    monkeypatch.setattr(publish, "FULL_PAUSE_S", 0.02)
    async with world(redis_server.url) as cluster:
        try:
            await fill_up(cluster)
            agent = cluster.agents["w1"]
            old = agent.incarnation
            await cluster.redis.hdel(KEYS["writers"], str(old))

            async def reregistered():
                keys = await cluster.redis.keys(KEYS.pattern + ":blocks:*")
                values = [v for key in keys for v in await cluster.redis.hvals(key)]
                is_shown = any(v.startswith(b"%d" % old) for v in values)
                num_loads = await cluster.redis.hlen(KEYS["load"])
                return agent.incarnation != old, num_loads, is_shown

            await eventually(reregistered, lambda found: found == (True, 3, False))
            decision = await cluster.route(2, explain=True)
            assert decision.reserved
            assert len(decision.candidates) == 3
            cluster.in_flight.append(decision.request_id)
        finally:
            await make_room(cluster)
        await cluster.heals("with room again")
        assert (await cluster.overlaps(2) or {})["w1"].total == len(CHAINS[2]) - 2
