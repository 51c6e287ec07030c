from __future__ import annotations

import pytest

from loadtest.bench_waiting import NUM_WORKERS, SLOTS, WEIGHTS, Turns, measure
from tests.redis_servers import default_kind, require_redis


@pytest.mark.slow
def test_tenants_at_different_replicas_share_turns_by_their_weights() -> None:
    require_redis(default_kind())
    found = measure([3], seconds=4.0)[3]
    assert found["turns"] > 30
    for tenant, weight in WEIGHTS.items():
        due = weight / sum(WEIGHTS.values())
        assert 0.7 * due < found["shares"][tenant] < 1.4 * due, found["shares"]
    assert 0 <= found["hand_over_ms"]["p50"] <= found["hand_over_ms"]["p99"]


def test_a_slot_handed_over_before_its_release_is_answered_was_never_free() -> None:
    first = [0.0] * NUM_WORKERS * SLOTS
    turns = Turns(routed_s=[*first, 0.9, 2.1, 3.2], freed_s=[1.0, 2.0, 3.0, 4.0])
    assert turns.hand_overs_s() == pytest.approx([0, 0.1, 0.2])
