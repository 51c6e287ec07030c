"""Requests wait in line in a cluster of real processes, while callers and routers vanish."""

import asyncio

import httpx
import pytest
from redis.asyncio import Redis

from app.core.settings.router import RouterSettings
from app.core.settings.worker import WorkerSettings
from app.local.cluster import Cluster
from app.ops import verify
from app.state.connect import connect
from tests.e2e.conftest import BLOCK_SIZE
from tests.eventually import eventually
from tests.fake_worker import KEYS, FakeWorkers
from tests.redis_servers import ClusterServers, default_kind, require_redis
from tests.router.test_router import request, running

NUM_REPLICAS = 3


@pytest.fixture
def cluster():
    """One worker that takes one request at a time, and three replicas at which requests wait."""
    require_redis(default_kind())
    with Cluster(
        num_workers=1,
        num_replicas=NUM_REPLICAS,
        haproxy=False,
        router=RouterSettings(wait_queue=50, wait_timeout_s=60.0, log_level="error"),
        worker=WorkerSettings(max_requests=1, block_size=BLOCK_SIZE, log_level="error"),
    ) as started:
        yield started


class Clients:
    """A client of each replica, and of Redis."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.http = [httpx.AsyncClient(base_url=m.url, timeout=60.0) for m in cluster.routers]
        self.redis = Redis.from_url(cluster.redis_url)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        for client in self.http:
            await client.aclose()
        await self.redis.aclose()

    async def route(self, replica, request_id, **options):
        body = {"token_ids": [1, 2, 3], "request_id": request_id}
        return await self.http[replica].post("/v1/route", json=body, **options)

    async def release(self, replica, request_id):
        answer = await self.http[replica].delete(f"/v1/requests/{request_id}")
        assert answer.json()["found"], request_id

    async def waiting(self):
        return int(await self.redis.zcard(self.cluster.keyspace["waiting:normal:"]))

    async def waiting_becomes(self, expected):
        await eventually(self.waiting, lambda found: found == expected)

    async def reserved(self):
        ids = await self.redis.hkeys(self.cluster.keyspace["reservations"])
        return {request_id.decode() for request_id in ids}


async def test_who_leaves_the_line_leaves_nothing_in_it_and_holds_up_no_other(cluster):
    async with Clients(cluster) as clients:
        await a_caller_hangs_up(clients)
        await a_replica_is_killed(clients)
        await a_replica_is_told_to_stop(clients)


async def a_replica_is_killed(clients):
    """The first."""
    assert (await clients.route(0, "first")).status_code == 200
    order = []

    async def wait(replica, request_id):
        try:
            answer = await clients.route(replica, request_id)
        except httpx.RemoteProtocolError:
            return
        assert answer.status_code == 200, answer.text
        order.append(request_id)
        await clients.release(replica, request_id)

    tasks = []
    for n in range(9):
        tasks.append(asyncio.ensure_future(wait(n % NUM_REPLICAS, f"r{n}")))
        await clients.waiting_becomes(n + 1)
    # The killed replica's request is the first in line.
    clients.cluster.routers[0].process.kill()
    await clients.release(1, "first")
    await asyncio.gather(*tasks)
    assert order == [f"r{n}" for n in range(9) if n % NUM_REPLICAS]
    names = [name async for name in clients.redis.scan_iter(match="*flows*")]
    assert names == []
    assert await clients.reserved() == set()
    async with connect(clients.cluster.redis_url) as redis:
        findings, _ = await verify.verify(redis, clients.cluster.keyspace, 1 << 10)
    assert findings == []


async def a_caller_hangs_up(clients):
    assert (await clients.route(0, "first")).status_code == 200
    hangs_up = asyncio.ensure_future(clients.route(1, "gone"))
    await clients.waiting_becomes(1)
    waits = asyncio.ensure_future(clients.route(2, "stays"))
    await clients.waiting_becomes(2)
    # The cancelled client closes its connection.
    hangs_up.cancel()
    await clients.waiting_becomes(1)
    await clients.release(0, "first")
    assert (await waits).status_code == 200
    assert await clients.reserved() == {"stays"}
    metrics = (await clients.http[1].get("/metrics")).text
    gone = 'kvroute_waits_total{outcome="gone",priority="normal",tenant="other"} 1.0'
    assert gone in metrics
    await clients.release(2, "stays")


async def a_replica_is_told_to_stop(clients):
    """The second; it refuses what waits there."""
    assert (await clients.route(2, "first")).status_code == 200
    waits = asyncio.ensure_future(clients.route(1, "r1"))
    await clients.waiting_becomes(1)
    clients.cluster.routers[1].process.terminate()
    answer = await waits
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    await clients.waiting_becomes(0)


async def test_requests_wait_in_line_on_a_redis_cluster_too():
    settings = {"wait_queue": 50, "wait_timeout_s": 60.0}
    with ClusterServers(default_kind()) as servers:
        async with (
            connect(servers.url) as redis,
            running(servers.url, **settings) as one,
            running(servers.url, **settings) as two,
        ):
            workers = FakeWorkers(redis)
            await workers.register("w1", max_requests=1)
            await workers.occupy("w1", "x")
            key = KEYS["waiting:normal:"]
            tasks = []
            for n, replica in enumerate((one, two, one)):
                tasks.append(asyncio.ensure_future(replica.route(request(f"r{n}"))))
                await eventually(lambda: redis.zcard(key), lambda found, n=n: found == n + 1)
            ended = "x"
            for n, task in enumerate(tasks):
                await two.release(ended)
                assert (await task).reserved
                ended = f"r{n}"
            await eventually(lambda: redis.exists(KEYS["flows"]), lambda found: not found)
