"""A worker that is alive but fails its requests, seen by two replicas over its agent's renewals."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from app.local.redis_server import EmbeddedRedis
from app.state.scripts import ScriptRunner
from tests.edge.conftest import started_replica
from tests.eventually import eventually
from tests.fake_worker import KEYS, fake_agent, running


async def fail(client: httpx.AsyncClient) -> float:
    """Have worker `bad` fail a request, once it is routed to. Returns when: not before that, in
    monotonic seconds."""

    async def routed() -> Any:
        asked = {"token_ids": [1] * 8, "request_id": "r", "exclude": ["good:0"]}
        return (await client.post("/v1/route", json=asked)).status_code

    await eventually(routed, lambda status: status == 200)
    failed_s = time.monotonic()
    answer = await client.delete("/v1/requests/r?worker_failed=true")
    assert answer.json()["found"]
    return failed_s


async def test_a_worker_that_fails_every_request_is_left_alone_for_longer_by_all_replicas(
    one_redis_server: EmbeddedRedis, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.agent.agent.MAX_RENEWAL_S", 0.2)
    runner = ScriptRunner(redis, 5.0)
    agents = [fake_agent(runner, KEYS, name, lease_ttl_s=60.0) for name in ("bad", "good")]
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
        failed_s = await fail(other)  # two seconds later
        lapsed_ms = await lease()
        await eventually(lease, lambda expiry_ms: expiry_ms != lapsed_ms)
        for replica in (one, other):
            [paused], live = await seen(replica)
            assert live == ["good"]
            pause_s, since_s = paused.pop("pause_s"), time.monotonic() - failed_s
            assert 4.0 - since_s < pause_s <= 4.0
            assert 0.2 < paused.pop("failed_share") < 0.7
            assert paused == {
                "worker_id": "bad",
                "dp_rank": 0,
                "incarnation": bad.incarnation,
                "failures": 3,
                "cause": "reported",
                "draining": False,
                "ill": None,
                "tainted": False,
            }
            shown = (await replica.get("/metrics")).text
            assert 'kvroute_worker_failures{worker="bad:0"} 3.0' in shown
            assert 'kvroute_worker_pause_seconds{worker="bad:0"}' in shown
        await eventually(seen, lambda found: found == ([], ["bad", "good"]))
        asked = {"token_ids": [1] * 8, "request_id": "r", "exclude": ["good:0"]}
        assert (await one.post("/v1/route", json=asked)).status_code == 200
        await one.post("/v1/requests/r/prefill_complete")
        await one.delete("/v1/requests/r")
        [failures] = [
            worker["failures"]
            for worker in (await other.get("/v1/workers")).json()["workers"]
            if worker["worker_id"] == "bad"
        ]
        assert failures == 0
