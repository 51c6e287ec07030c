from __future__ import annotations

from redis.asyncio import Redis

from app.core.embedded import EmbeddedRedis
from loadtest.bench_index import LENGTHS, QUERIES, measure


async def test_a_small_index_is_measured_and_nothing_is_left_of_it(
    own_redis_server: EmbeddedRedis,
) -> None:
    found = await measure(
        own_redis_server.url, blocks=20_000, index_blocks=20_000, workers=4, queries=4, repeats=1
    )
    assert found["unique_blocks"] == 2 * (8192 - 64) + 64
    assert 20 < found["bytes_per_block"] < 100
    assert list(found["match_us"]) == [*QUERIES, "mixed"]
    for name in found["match_us"]:
        assert list(found["match_us"][name]) == [str(length) for length in LENGTHS]
        assert all(us > 0 for us in found["match_us"][name].values())
    assert all(us > 0 for us in found["change_us_per_block"].values())
    assert all(1 < size < 100 for size in found["bytes_per_further_owner"].values())
    assert list(found["bytes_per_further_owner"]) == ["2", "3", "4"]
    assert 0 < found["visible_ms"]["p50"] <= found["visible_ms"]["p99"]
    assert found["ping_cpu_us"] > 0
    assert found["peer_us"]["2048"] > found["peer_us"]["512"] > 0
    assert found["round_trips"]["512"] == 1
    assert 1 < found["round_trips"]["8192"] <= 2
    async with Redis.from_url(own_redis_server.url) as redis:
        assert await redis.dbsize() == 0
