from __future__ import annotations

import pytest
from redis import Redis

from app.local.redis_server import EmbeddedRedis
from loadtest import bench_fleet
from loadtest.bench_fleet import measure

pytestmark = pytest.mark.slow


def test_one_agent_is_measured_beside_an_agent_for_each_and_leaves_nothing(
    own_redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_fleet, "WINDOW_S", 1.0)
    monkeypatch.setattr(bench_fleet, "SETTLE_S", 0.0)
    found = measure(own_redis_server.url, 2)
    assert found["engines"] == 2
    for name in ("one", "beside"):
        assert 0 < found[name]["busy_share"] < 1
        assert 0 < found[name]["seen_ms_p50"] <= found[name]["seen_ms_p99"]
    assert found["one"]["mib"] < found["beside"]["mib"]
    assert found["one"]["threads"] < found["beside"]["threads"]
    with Redis.from_url(own_redis_server.url) as redis:
        assert not [key for key in redis.scan_iter() if b":blocks:" in key]
