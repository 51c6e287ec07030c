"""A fleet on this machine whose planner starts and stops its workers, under load."""

import asyncio
import os
import signal
from pathlib import Path

import httpx
import pytest

from app.core.settings.planner import PlannerSettings
from app.core.settings.router import RouterSettings
from app.core.settings.worker import WorkerSettings
from app.local.child import running_workers
from app.local.cluster import Cluster
from app.state import planner
from app.state.connect import connect
from tests.eventually import eventually
from tests.fake_worker import NAMESPACE

BODY = {"prompt": list(range(5, 1005)), "max_tokens": 40, "ignore_eos": True}


@pytest.fixture
def cluster(own_redis_server):
    settings = PlannerSettings(
        scaling_policy="threshold",
        interval_s=1.0,
        grace_intervals=1,
        max_workers=3,
        lease_s=2.0,
        log_level="info",
    )
    with Cluster(
        num_workers=1,
        num_replicas=1,
        router=RouterSettings(namespace=NAMESPACE, log_level="warning"),
        worker=WorkerSettings(namespace=NAMESPACE, speedup=5.0, log_level="warning"),
        redis_url=own_redis_server.url,
        haproxy=False,
        planner=settings,
    ) as started:
        yield started


async def workers(http):
    try:
        listed = (await http.get("/v1/workers")).json()
    except httpx.HTTPError:
        return []
    return sorted(worker["worker_id"] for worker in listed.get("workers", []))


@pytest.mark.slow
async def test_workers_come_and_go_with_the_load_and_no_request_fails(cluster):
    statuses = []
    async with httpx.AsyncClient(base_url=cluster.balancer_url, timeout=60) as http:

        async def ask(number):
            prompt = [number, *BODY["prompt"]]
            asked = {**BODY, "model": cluster.model, "prompt": prompt}
            statuses.append((await http.post("/v1/completions", json=asked)).status_code)

        await eventually(lambda: workers(http), lambda seen: len(seen) == 1, within_s=30)
        load = asyncio.create_task(_keep_asking(ask, at_once=24))
        try:
            most = await eventually(lambda: workers(http), lambda seen: len(seen) > 1, within_s=60)
        finally:
            load.cancel()
            await asyncio.wait([load])
        await eventually(lambda: workers(http), lambda seen: len(seen) == 1, within_s=60)
        assert len(most) > 1
    assert len(statuses) > 24
    assert set(statuses) == {200}


async def _keep_asking(ask, at_once):
    stopped = asyncio.Event()

    async def one(number):
        while not stopped.is_set():
            await ask(number)
            number += at_once

    tasks = [asyncio.create_task(one(number)) for number in range(at_once)]
    try:
        await asyncio.Event().wait()
    finally:
        stopped.set()
        await asyncio.gather(*tasks)


async def test_a_planner_that_is_killed_and_a_redis_that_lost_all_leave_the_fleet_as_it_was(
    cluster, own_redis_server
):
    async with httpx.AsyncClient(base_url=cluster.balancer_url, timeout=60) as http:
        before = await eventually(lambda: workers(http), bool, within_s=30)
        assert cluster.planner is not None
        os.kill(cluster.planner.process.pid, signal.SIGKILL)
        cluster.planner.process.wait()
        own_redis_server.kill()
        own_redis_server.start()
        cluster.start_planner()
        await eventually(lambda: workers(http), lambda seen: seen == before, within_s=30)
        async with connect(own_redis_server.url) as redis:

            async def proposed():
                return await planner.proposals(redis, cluster.keyspace, 5)

            made = await eventually(proposed, within_s=30)
        assert [proposal["size"] for proposal in made] == [1] * len(made)
        assert await workers(http) == before
        folder = Path(cluster.planner_folder)
        assert sorted(await asyncio.to_thread(running_workers, folder)) == before
