"""A worker that is alive but fails its requests, seen by two replicas over its agent's renewals."""

from __future__ import annotations

from typing import Any

import httpx
from redis.asyncio import Redis

from app.local.redis_server import EmbeddedRedis
from app.state.scripts import ScriptRunner
from tests.edge.conftest import started_replica
from tests.eventually import eventually
from tests.fake_worker import KEYS, fake_agent, running


async def fail(client: httpx.AsyncClient) -> None:
    """Have worker `bad` fail a request, once it is routed to."""

    async def routed() -> Any:
        asked = {"token_ids": [1] * 8, "request_id": "r", "exclude": ["good:0"]}
        return (await client.post("/v1/route", json=asked)).status_code

    await eventually(routed, lambda status: status == 200, within_s=20.0)
    answer = await client.delete("/v1/requests/r?worker_failed=true")
    assert answer.json()["found"]


async def test_a_worker_that_fails_every_request_is_left_alone_for_longer_by_all_replicas(
    one_redis_server: EmbeddedRedis, redis: Redis
) -> None:
    runner = ScriptRunner(redis, 5.0)
    agents = [fake_agent(runner, KEYS, name, lease_ttl_s=0.6) for name in ("bad", "good")]
    async with (
        running(agents[0]) as bad,
        running(agents[1]),
        started_replica(one_redis_server.url) as one,
        started_replica(one_redis_server.url) as other,
    ):

        async def seen(by: httpx.AsyncClient = other) -> Any:
            answer = (await by.get("/v1/workers")).json()
            return answer["paused"], [worker["worker_id"] for worker in answer["workers"]]

        async def lease() -> Any:
            return await redis.zscore(KEYS["leases"], str(bad.incarnation))

        await fail(one)
        await fail(one)  # when it has renewed its lease
        await fail(other)  # two seconds later
        lapsed_ms = await lease()
        await eventually(lease, lambda expiry_ms: expiry_ms != lapsed_ms)
        for replica in (one, other):
            [paused], live = await seen(replica)
            assert live == ["good"]
            assert 2.0 < paused.pop("pause_s") <= 4.0
            assert paused == {
                "worker_id": "bad",
                "dp_rank": 0,
                "incarnation": bad.incarnation,
                "failures": 3,
                "draining": False,
            }
            shown = (await replica.get("/metrics")).text
            assert 'kvroute_worker_failures{worker="bad:0"} 3.0' in shown
            assert 'kvroute_worker_pause_seconds{worker="bad:0"}' in shown
        await eventually(seen, lambda found: found == ([], ["bad", "good"]), within_s=20.0)
        asked = {"token_ids": [1] * 8, "request_id": "r", "exclude": ["good:0"]}
        assert (await one.post("/v1/route", json=asked)).status_code == 200
        await one.post("/v1/requests/r/prefill_complete")
        await one.delete("/v1/requests/r")
        [failures] = [
            worker["failures"]
            for worker in (await other.get("/v1/workers")).json()["workers"]
            if worker["worker_id"] == "bad"
        ]
        assert failures == 2
