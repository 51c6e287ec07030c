from __future__ import annotations

from redis.asyncio import Redis

from app.local.redis_server import EmbeddedRedis
from loadtest.bench_agent import measure


async def test_an_agent_is_measured_and_leaves_no_keys(own_redis_server: EmbeddedRedis) -> None:
    found = await measure(own_redis_server.url, chains=20, repeats=2)
    assert found["blocks"] == 20 * 64
    assert list(found["published_per_s"]) == ["stored", "removed"]
    assert all(per_s > 0 for per_s in found["published_per_s"].values())
    assert 0 < found["visible_ms"]["p50"] <= found["visible_ms"]["p99"]
    async with Redis.from_url(own_redis_server.url) as redis:
        assert await redis.dbsize() == 0
