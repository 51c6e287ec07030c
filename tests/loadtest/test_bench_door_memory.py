from __future__ import annotations

import pytest

from app.local.redis_server import EmbeddedRedis
from loadtest.bench_door_memory import measure

pytestmark = pytest.mark.slow


def test_the_memory_of_streams_and_of_steady_load_is_measured(
    own_redis_server: EmbeddedRedis,
) -> None:
    found = measure(own_redis_server.url, streams=200, minutes=0.03, rate=100)
    assert found["bytes_per_stream"] > 0
    assert 50 < found["per_s"] < 150
    assert 0 < found["warm"] <= found["end"] * 2
