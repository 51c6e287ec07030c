"""Workers that are taken out of service under load: every request is answered at its first try."""

import asyncio
import random
from contextlib import asynccontextmanager
from itertools import count

import pytest

from app.core.types import WorkerKey
from app.state import leases
from app.state.connect import connect
from app.state.scripts import ScriptRunner
from loadtest.client import ClusterClient
from tests.e2e.conftest import prompt, small_cluster
from tests.eventually import eventually

IN_FLIGHT = 6


@asynccontextmanager
async def under_load(cluster):
    """IN_FLIGHT requests at any time; all have ended on exit."""
    outcomes = []
    stops = asyncio.Event()
    rng, numbers = random.Random(5), count()

    async def send(client):
        while not stops.is_set():
            tokens = prompt(rng.randrange(40), rng.randrange(100, 1000))
            name = f"r{next(numbers)}"
            outcomes.append(
                await client.send(name, lambda t=tokens: t, output_tokens=rng.randrange(1, 40))
            )

    async with ClusterClient(cluster.balancer_url) as client, asyncio.TaskGroup() as tasks:
        for _ in range(IN_FLIGHT):
            tasks.create_task(send(client))
        try:
            yield outcomes
        finally:
            stops.set()


def all_at_once(outcomes):
    assert len(outcomes) > IN_FLIGHT
    troubled = [o for o in outcomes if o.failure is not None or o.attempts != 1]
    assert troubled == []


async def test_a_worker_that_is_told_to_stop_loses_no_request():
    with small_cluster(num_workers=2, num_replicas=2, speedup=3.0, drain_s=60.0) as cluster:
        async with (
            under_load(cluster) as outcomes,
            ClusterClient(cluster.balancer_url) as client,
        ):
            await eventually(lambda: asyncio.sleep(0, len(outcomes)), lambda n: n > IN_FLIGHT)
            leaving = cluster.workers[0]
            leaving.process.terminate()
            assert await asyncio.to_thread(leaving.process.wait, 60) == 0
            cluster.start_worker(2)

            async def workers():
                return await client.workers()

            await eventually(workers, lambda found: "w2:0" in found)
        all_at_once(outcomes)


@pytest.mark.parametrize("drains", [3, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.timeout(600)
async def test_a_drained_worker_runs_nothing_and_no_request_is_lost(drains):
    rng = random.Random(7)
    with small_cluster(num_workers=2, num_replicas=2, speedup=3.0) as cluster:
        async with (
            connect(cluster.redis_url) as redis,
            under_load(cluster) as outcomes,
            ClusterClient(cluster.balancer_url) as client,
        ):
            runner = ScriptRunner(redis, 5.0)

            async def left(key):
                return await runner.one(leases.drain(cluster.keyspace, key))

            async def routed_to(key):
                return str(key) in await client.workers()

            for _ in range(drains):
                key = WorkerKey(f"w{rng.randrange(2)}")
                await eventually(lambda key=key: left(key), lambda found: found == 0)
                before = len(outcomes)
                await eventually(
                    lambda: asyncio.sleep(0, len(outcomes)), lambda n, b=before: n > b + 5
                )
                assert await left(key) == 0
                await runner.one(leases.drain(cluster.keyspace, key, undo=True))
                await eventually(lambda key=key: routed_to(key), bool)
        all_at_once(outcomes)
