"""N replicas place a burst as well as one does, which is what the shared state is for."""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from statistics import median

import numpy as np
import pytest

from app.core.hashing import compute_hashes
from app.core.keys import Keyspace
from app.core.settings.router import RouterSettings
from app.policy.decision import RouteRequest
from app.router.decider import MAX_TRIES
from app.router.fleet import Fleet
from app.router.metrics import Telemetry
from app.router.router import Router
from app.state.connect import connect
from app.state.scripts import ScriptRunner
from loadtest.holders import BLOCK_SIZE, Holders

KEYS = Keyspace("burst")
NUM_WORKERS = 8
NUM_REQUESTS = 32
PREFIX_BLOCKS = 100
SUFFIX_BLOCKS = 20
ALLOWED_DIFFERENCE = 2


async def ended(task):
    task.cancel()
    await asyncio.wait([task])


class Replicas:
    """Routers in one event loop, which look at the same moment, as replicas rarely do."""

    def __init__(self, url, count):
        self._url = url
        self._count = count
        self.routers = []

    async def __aenter__(self):
        async with AsyncExitStack() as stack:
            for seed in range(self._count):
                redis = await stack.enter_async_context(connect(self._url))
                runner = ScriptRunner(redis, timeout_s=5.0)
                settings = RouterSettings(seed=seed)
                fleet = Fleet(redis, KEYS, 5.0)
                self.routers.append(Router(runner, KEYS, settings, fleet, Telemetry()))
            for router in self.routers:
                await router.refresh()
                running = asyncio.ensure_future(router.run())
                stack.push_async_callback(ended, running)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_):
        await self._stack.aclose()

    async def place(self, requests):
        """How many requests each worker gets. They are sent at once, to the replicas in turn."""
        decisions = await asyncio.gather(
            *(self.routers[i % self._count].route(r) for i, r in enumerate(requests))
        )
        assert all(d.reserved and d.tries < MAX_TRIES for d in decisions)
        released = [await self.routers[0].release(r.request_id) for r in requests]
        assert all(released)
        return Counter(d.worker.key.worker_id for d in decisions)


def burst(seed):
    """The blocks of the common prefix, and the requests."""
    rng = np.random.default_rng(seed)

    def tokens(blocks):
        return rng.integers(0, 2**32, blocks * BLOCK_SIZE, np.uint32).astype("<u4").tobytes()

    prefix = tokens(PREFIX_BLOCKS)
    requests = []
    for i in range(NUM_REQUESTS):
        prompt = prefix + tokens(SUFFIX_BLOCKS)
        _, chain = compute_hashes(prompt, BLOCK_SIZE)
        requests.append(RouteRequest(f"{seed}-{i}", chain, len(prompt) // 4, "latency"))
    return requests[0].chain[:PREFIX_BLOCKS], requests


@pytest.mark.parametrize("count", [8, pytest.param(16, marks=pytest.mark.slow)])
async def test_replicas_that_look_at_the_same_moment_do_not_overload_the_owner(
    count, one_redis_server, redis
):
    holders = Holders(ScriptRunner(redis, timeout_s=5.0), KEYS)
    await holders.register(NUM_WORKERS)
    on_owner = {1: [], count: []}
    for replicas_now in on_owner:
        async with Replicas(one_redis_server.url, replicas_now) as replicas:
            for seed in range(5):
                prefix, requests = burst(1000 * replicas_now + seed)
                await holders.store(seed, prefix)
                placed = await replicas.place(requests)
                on_owner[replicas_now].append(placed[f"w{seed}"])
    assert NUM_REQUESTS / 8 < median(on_owner[1]) < NUM_REQUESTS
    assert max(on_owner[count]) <= median(on_owner[1]) + ALLOWED_DIFFERENCE
