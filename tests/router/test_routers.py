from __future__ import annotations

import asyncio
from functools import partial

import pytest
from redis.asyncio import Redis

from app.core.keys import Keyspace
from app.local.redis_server import EmbeddedRedis
from app.router.routers import Routers
from app.state.client import RedisClient
from app.state.connect import connect
from app.state.scripts import ScriptRunner
from tests.eventually import eventually
from tests.fake_worker import NAMESPACE, FakeWorker, worker_info
from tests.router.test_router import Replica


async def test_all_other_namespaces_share_their_connections_and_each_client_follows_redis(
    one_redis_server: EmbeddedRedis, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed: list[RedisClient] = []

    async def follow(client: RedisClient) -> None:
        followed.append(client)

    monkeypatch.setattr(RedisClient, "follow", follow)
    others = [f"other-{n}" for n in range(40)]
    for name in (NAMESPACE, *others):
        worker = FakeWorker(ScriptRunner(redis, 5.0), Keyspace(name), worker_info("w"))
        await worker.register()
        await worker.activate()
    routers = Routers(
        NAMESPACE,
        partial(connect, one_redis_server.url),
        lambda namespace, client: Replica(client, keyspace=Keyspace(namespace)),
    )
    running = asyncio.create_task(routers.run())
    try:
        await eventually(lambda: _settled(routers))
        routers.serve(others)
        await eventually(lambda: _settled(routers), lambda settled: settled == 41)
        assert len(await redis.client_list()) <= 2 * 16 + 1
        assert len(set(followed)) == 2
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def _settled(routers: Routers) -> int:
    """How many have asked Redis for their workers."""
    seen = (router.fleet.redis_now_ms for router in routers.by_namespace.values())
    return sum(now_ms is not None for now_ms in seen)
