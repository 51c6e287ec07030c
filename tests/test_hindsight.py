"""Decisions that are scored again: which of them count as changed."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from app.core.types import TierOverlap
from app.hindsight import Comparison
from app.policy.cost import POLICIES, Candidates, blocks
from app.recording import FIELDS, Record, Seen

WORKERS = ["w0:0", "w1:0", "w2:0", "w3:0"]
DECISIONS = 400


def record(worker: str, policy: str, *, overlaps: list[int], requests: list[int]) -> Record:
    """A prompt of ten blocks of four tokens went to `worker`; in all else the workers are equal."""
    columns = {name: np.zeros(len(WORKERS)) for name in FIELDS}
    columns["prefill_s_per_token"] += 0.001
    columns["max_requests"] += 100
    columns["overlap_device"] += overlaps
    columns["active_requests"] += requests
    columns["active_blocks"] += 10 * np.array(requests)
    seen = Seen(WORKERS, 4, Candidates(**columns), [True] * len(WORKERS))
    return Record("r", 0, worker, policy, "kept", 41, 10, TierOverlap(), "", 0, 1, 0, [], seen)


def changed(found: Record, policy: str, prefill_weight: float | None = None) -> int:
    """How many of DECISIONS like `found` change, each scored with random draws of its own."""
    cost = None if prefill_weight is None else partial(blocks, prefill_weight=prefill_weight)
    comparison, rng = Comparison(), np.random.default_rng(1)
    for _ in range(DECISIONS):
        comparison.add(found, policy, cost, rng)
    assert comparison.decisions == DECISIONS
    return comparison.changed


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_policy_that_scores_its_own_choice_between_equals_changes_nothing(policy: str) -> None:
    for worker in WORKERS:
        alike = record(worker, policy, overlaps=[4] * 4, requests=[2] * 4)
        assert changed(alike, policy) == 0


def test_a_draw_between_workers_that_the_other_policy_tells_apart_is_a_change() -> None:
    kept = record("w2:0", "latency", overlaps=[0, 0, 10, 0], requests=[0] * 4)
    assert changed(kept, "latency") == 0
    # Three draws in four go elsewhere.
    assert changed(kept, "random") == pytest.approx(DECISIONS * 3 / 4, rel=0.1)
    assert changed(kept, "least_loaded") == pytest.approx(DECISIONS * 3 / 4, rel=0.1)
    drawn = record("w1:0", "random", overlaps=[0, 0, 10, 0], requests=[0] * 4)
    assert changed(drawn, "latency") == DECISIONS


def test_a_draw_between_workers_that_are_equal_to_both_policies_is_no_change() -> None:
    idle = record("w1:0", "latency", overlaps=[0, 0, 0, 0], requests=[0, 0, 9, 9])
    assert changed(idle, "blocks") == changed(idle, "least_loaded") == 0


def test_power_of_two_does_not_change_its_own_decisions_by_drawing_another_pair() -> None:
    # w2 is not in every pair.
    drawn = record("w1:0", "power_of_two", overlaps=[0] * 4, requests=[3, 2, 1, 4])
    assert changed(drawn, "power_of_two") == 0
    assert changed(drawn, "least_loaded") == DECISIONS
    chosen = record("w1:0", "latency", overlaps=[0, 10, 0, 0], requests=[3, 2, 1, 4])
    assert 0 < changed(chosen, "power_of_two") < DECISIONS


def test_another_prefill_weight_is_treated_as_another_policy() -> None:
    kept = record("w2:0", "blocks", overlaps=[0, 0, 10, 0], requests=[0] * 4)
    assert changed(kept, "blocks", prefill_weight=1.0) == 0
    assert changed(kept, "blocks", prefill_weight=0.0) > DECISIONS / 2


def test_a_decision_by_a_policy_that_no_longer_exists_is_left_out() -> None:
    comparison = Comparison()
    gone = record("w1:0", "gone", overlaps=[0] * 4, requests=[0] * 4)
    comparison.add(gone, "latency", None, np.random.default_rng(1))
    assert comparison.decisions == 0
