from __future__ import annotations

import pytest

from app.local.redis_server import EmbeddedRedis
from loadtest.bench_console import measure

pytestmark = pytest.mark.slow


def test_the_cost_of_viewers_is_measured(one_redis_server: EmbeddedRedis) -> None:
    found = measure(one_redis_server.url, 200, 1, viewers=2, workers=2)
    [(without, with_viewers)] = found["rounds"]
    assert found["ratio"] == with_viewers.per_s / without.per_s > 0
    assert without.redis_share < with_viewers.redis_share < 1
