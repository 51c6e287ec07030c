"""Six engines that fall ill on demand, an agent beside each, and router replicas, on one Redis."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp

from app.local.redis_server import EmbeddedRedis
from tests.e2e.engines import Process, agent
from tests.eventually import eventually
from tests.fake_worker import NAMESPACE
from tests.fakes.engine import FakeEngine, fake_engine
from tests.sick.rows import ANSWER_TIMEOUT_S, NUM_ENGINES

PREFILL_S, TOKEN_S = 0.3, 0.07
"""A whole answer of eight tokens takes 0.8 s."""
WHOLE_WITHIN_S = 60.0


@dataclass(slots=True)
class Fleet:
    """routers: those that take requests; the others still answer what they have."""

    redis_url: str
    engines: list[FakeEngine]
    http: aiohttp.ClientSession
    routers: list[Process] = field(default_factory=list)
    stopping: list[Process] = field(default_factory=list)

    @property
    def urls(self):
        return [router.url for router in self.routers]

    def start_router(self):
        options = {
            "redis-url": self.redis_url,
            "namespace": NAMESPACE,
            "port": 0,
            "redis-timeout-ms": 5000,
            "answer-timeout-s": ANSWER_TIMEOUT_S,
        }
        flags = [f"--{name}={value}" for name, value in options.items()]
        self.routers.append(Process("router", *flags))

    def stop_router(self):
        """SIGTERM for one; it may go on with what it has."""
        router = self.routers.pop(0)
        router.popen.terminate()
        self.stopping.append(router)

    async def until_whole(self):
        every = [f"e{place}" for place in range(NUM_ENGINES)]

        async def routed_to():
            return [await self._routed_to(url) for url in self.urls]

        await eventually(
            routed_to,
            lambda seen: all(one == (every, 0) for one in seen),
            within_s=WHOLE_WITHIN_S,
        )

    async def _routed_to(self, url):
        """The workers of one replica, and how many are paused."""
        async with self.http.get(f"{url}/v1/workers") as answer:
            shown = await answer.json()
        workers = shown.get("workers", ())
        return sorted(worker["worker_id"] for worker in workers), len(shown.get("paused", ()))

    def end(self):
        for router in (*self.routers, *self.stopping):
            router.end()


@asynccontextmanager
async def started(num_replicas):
    """A whole fleet."""
    async with AsyncExitStack() as opened:
        memory = opened.enter_context(TemporaryDirectory(prefix="kvroute-sick-"))
        redis = opened.enter_context(EmbeddedRedis())
        http = await opened.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        )
        engines = [
            await opened.enter_async_context(fake_engine(prefill_s=PREFILL_S, token_s=TOKEN_S))
            for _ in range(NUM_ENGINES)
        ]
        # Each waits until its process listens, or has ended, which engines of this one must not be
        # kept from.
        for place, engine in enumerate(engines):
            beside = agent(engine.url, redis.url, Path(memory), worker_id=f"e{place}")
            await asyncio.to_thread(beside.__enter__)
            opened.push_async_callback(asyncio.to_thread, beside.__exit__, None, None, None)
        fleet = Fleet(redis.url, engines, http)
        opened.push_async_callback(asyncio.to_thread, fleet.end)
        for _ in range(num_replicas):
            await asyncio.to_thread(fleet.start_router)
        await fleet.until_whole()
        yield fleet
