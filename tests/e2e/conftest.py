"""Whole clusters of real processes on this machine, small and with short TTLs."""

from __future__ import annotations

import socket
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
from redis.asyncio import Redis

from app.core.chains import parse_owners
from app.core.settings.router import RouterSettings
from app.core.settings.worker import WorkerSettings
from app.local.cluster import Cluster
from tests.eventually import eventually
from tests.redis_servers import default_kind, require_redis

LEASE_TTL_S = 1.0
RESERVATION_TTL_S = 2.0
BLOCK_SIZE = 16


def small_cluster(
    *,
    num_workers,
    num_replicas,
    haproxy=None,
    speedup=20.0,
    drain_s=2.0,
    lease_ttl_s=30.0,
    reservation_ttl_s=60.0,
):
    """A cluster, not started yet; the test is skipped if there is no Redis. Nothing in it lapses,
    because the machine is busy, unless told otherwise."""
    require_redis(default_kind())
    return Cluster(
        num_workers=num_workers,
        num_replicas=num_replicas,
        haproxy=haproxy,
        router=RouterSettings(
            reservation_ttl_s=reservation_ttl_s,
            redis_timeout_ms=5000,
            drain_s=drain_s,
            log_level="error",
        ),
        worker=WorkerSettings(
            speedup=speedup,
            drain_s=drain_s,
            block_size=BLOCK_SIZE,
            lease_ttl_s=lease_ttl_s,
            # 1,024 blocks per worker make an index of about 340 buckets, swept in a moment.
            kv_pool_tokens=1024 * BLOCK_SIZE,
            log_level="error",
        ),
    )


def prompt(seed, num_tokens):
    """Raw token ids of a prompt that shares no block with the prompt of any other seed."""
    tokens = np.random.default_rng(seed).integers(0, 2**32, num_tokens, np.uint32)
    return tokens.astype("<u4").tobytes()


def listens(url):
    """Whether anything accepts connections on the port of `url`."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    with socket.socket() as client:
        return client.connect_ex((parts.hostname, parts.port)) == 0


@dataclass(slots=True)
class Probe:
    """Sends requests to a cluster and reads its state, from outside. redis: replies are bytes."""

    cluster: Cluster
    http: httpx.AsyncClient
    redis: Any

    async def route(self, tokens, **options):
        """The answer of /v1/route, whose status must be 200."""
        response = await self.http.post(
            "/v1/route",
            params=options,
            content=tokens,
            headers={"content-type": "application/octet-stream"},
        )
        assert response.status_code == 200, response.text
        return response.json()

    async def complete(self, tokens, max_tokens=4, **options):
        """Run a request from routing to release. Returns the id of the worker it ran on."""
        choice = await self.route(tokens, **options)
        response = await self.http.post(
            f"{choice['address']}/v1/completions",
            params={"max_tokens": str(max_tokens), "request_id": choice["request_id"]},
            content=tokens,
            headers={"content-type": "application/octet-stream"},
        )
        assert response.status_code == 200, response.text
        await self.release(choice["request_id"])
        return choice["worker_id"]

    async def release(self, request_id):
        """Release a reservation. Returns whether there was one."""
        response = await self.http.delete(f"/v1/requests/{request_id}")
        assert response.status_code == 200, response.text
        return response.json()["found"]

    async def workers(self):
        """Worker id -> what /v1/workers reports of it; empty if the call fails."""
        response = await self.http.get("/v1/workers")
        found = response.json().get("workers", [])
        return {worker["worker_id"]: worker for worker in found}

    async def overlaps(self, tokens):
        """Worker id -> leading blocks of the prompt that it holds; empty while degraded."""
        choice = await self.route(tokens, reserve="false", explain="true")
        if choice["degraded"]:
            return {}
        return {
            c["worker_id"]: sum(c["overlap_blocks"].values())
            for c in choice["candidates"]
            if sum(c["overlap_blocks"].values())
        }

    async def loads(self):
        """Worker id -> requests, blocks and prefill tokens reserved on it."""
        return {
            name: (w["active_requests"], w["active_blocks"], w["prefill_tokens"])
            for name, w in (await self.workers()).items()
        }

    async def reserved(self):
        """Request ids for which Redis holds a reservation."""
        ids = await self.redis.hkeys(self.cluster.keyspace["reservations"])
        return {request_id.decode() for request_id in ids}

    async def index_entries(self):
        """Incarnation -> how many index entries it has; dead incarnations included."""
        counts = {}
        pattern = self.cluster.keyspace.of_shard(0)["blocks:"].replace("{", r"\{") + "*"
        async for key in self.redis.scan_iter(match=pattern, count=1000):
            for owners in await self.redis.hvals(key):
                for incarnation, _ in parse_owners(owners):
                    counts[incarnation] = counts.get(incarnation, 0) + 1
        return counts

    async def all_idle(self, num_workers):
        """Wait until `num_workers` workers are live and nothing is reserved on any of them."""
        idle = [(0, 0, 0)] * num_workers
        await eventually(self.loads, lambda seen: list(seen.values()) == idle)


@pytest.fixture
async def open_probe():
    """Opens a `Probe` of a started cluster; it is closed at the end of the test."""
    async with AsyncExitStack() as stack:

        def opened(cluster):
            http = httpx.AsyncClient(base_url=cluster.balancer_url, timeout=10.0)
            redis = Redis.from_url(cluster.redis_url)
            stack.push_async_callback(http.aclose)
            stack.push_async_callback(redis.aclose)
            return Probe(cluster, http, redis)

        yield opened
