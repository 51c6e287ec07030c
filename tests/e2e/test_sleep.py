"""A model whose last worker leaves, and that the next request wakes: real processes."""

import asyncio

import httpx
import pytest

from app.core.settings.planner import PlannerSettings
from app.core.settings.router import RouterSettings
from app.core.settings.worker import WorkerSettings
from app.local.cluster import Cluster
from tests.e2e.test_planner import workers
from tests.eventually import eventually
from tests.fake_worker import NAMESPACE


@pytest.fixture
def cluster(own_redis_server):
    with Cluster(
        num_workers=0,
        num_replicas=1,
        router=RouterSettings(
            namespace=NAMESPACE, log_level="warning", wait_queue=100, wait_timeout_s=60.0
        ),
        worker=WorkerSettings(namespace=NAMESPACE, speedup=5.0, log_level="warning"),
        redis_url=own_redis_server.url,
        haproxy=False,
        planner=PlannerSettings(interval_s=1.0, idle_s=1.0, lease_s=2.0, log_level="info"),
    ) as started:
        yield started


async def test_a_model_without_a_worker_is_woken_by_requests_on_every_path(cluster):
    async with httpx.AsyncClient(base_url=cluster.balancer_url, timeout=90) as http:
        asked = {"model": cluster.model, "prompt": "to be or not", "max_tokens": 4}
        for path, body in (
            ("/v1/completions", asked),
            ("/v1/route", {"token_ids": list(range(40))}),
        ):
            await eventually(lambda: workers(http), bool, within_s=60)
            await eventually(lambda: workers(http), lambda seen: not seen, within_s=60)
            assert (await http.get("/readiness")).status_code == 200
            several = await asyncio.gather(*(http.post(path, json=body) for _ in range(5)))
            assert [one.status_code for one in several] == [200] * 5, several[0].text
            for routed in (one.json() for one in several if path == "/v1/route"):
                await http.delete(f"/v1/requests/{routed['request_id']}")
        unknown = await http.post("/v1/completions", json=asked | {"model": "nobody's"})
        assert unknown.status_code == 404
