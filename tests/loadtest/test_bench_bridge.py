import pytest
from redis.asyncio import Redis

from loadtest import bench_bridge
from loadtest.bench_bridge import measure

pytestmark = pytest.mark.slow


async def test_an_agent_beside_an_engine_is_measured_and_leaves_no_blocks(
    own_redis_server, monkeypatch
):
    monkeypatch.setattr(bench_bridge, "IDLE_S", 0.5)
    monkeypatch.setattr(bench_bridge, "SEEN_CHAINS", 20)
    found = await measure(own_redis_server.url, chains=20)
    assert found["blocks"] == 20 * 64
    assert all(per_s > 0 for per_s in found["published_per_s"].values())
    assert 0 < found["visible_ms"]["p50"] <= found["visible_ms"]["p99"]
    assert 0 <= found["idle_share"] < 1
    async with Redis.from_url(own_redis_server.url) as redis:
        keys = [key.decode() async for key in redis.scan_iter()]
    assert not [key for key in keys if ":blocks:" in key]
