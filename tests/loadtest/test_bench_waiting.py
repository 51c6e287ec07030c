from __future__ import annotations

from loadtest.bench_waiting import WEIGHTS, measure
from tests.redis_servers import newest_kind, require_redis


def test_tenants_at_different_replicas_share_turns_by_their_weights() -> None:
    require_redis(newest_kind())
    found = measure([3], seconds=4.0)[3]
    assert found["turns"] > 30
    for tenant, weight in WEIGHTS.items():
        due = weight / sum(WEIGHTS.values())
        assert 0.7 * due < found["shares"][tenant] < 1.4 * due, found["shares"]
    assert 0 < found["hand_over_ms"]["p50"] <= found["hand_over_ms"]["p99"]
