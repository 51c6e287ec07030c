"""Decisions that are scored again: which of them count as changed."""

from functools import partial

import numpy as np
import pytest

from app.core.types import TierOverlap
from app.ops.explain import Comparison, explanation
from app.policy.affinity import Affinity
from app.policy.cost import POLICIES, Candidates, blocks
from app.policy.locality import Best, Locality
from app.policy.record import ROWS, ChoiceInputs, DecisionRecord

WORKERS = ["w0:0", "w1:0", "w2:0", "w3:0"]
DECISIONS = 400


def record(worker, policy, *, overlaps, requests):
    """A prompt of ten blocks of four tokens went to `worker`; in all else the workers are equal."""
    columns = {name: np.zeros(len(WORKERS)) for name in ROWS}
    columns["prefill_s_per_token"] += 0.001
    columns["max_requests"] += 100
    columns["overlap_device"] += overlaps
    columns["active_requests"] += requests
    columns["active_blocks"] += 10 * np.array(requests)
    seen = ChoiceInputs(WORKERS, 4, Candidates(**columns), [True] * len(WORKERS))
    kept, best = Locality.KEPT, Best("", 0)
    return DecisionRecord(
        *("r", 0, worker, policy, kept, 41, 10, TierOverlap(), best, 1, 0, ""), seen=seen
    )


def changed(found, policy, prefill_weight=None):
    """How many of DECISIONS like `found` change, each scored with random draws of its own."""
    cost = None if prefill_weight is None else partial(blocks, prefill_weight=prefill_weight)
    comparison, rng = Comparison(), np.random.default_rng(1)
    for _ in range(DECISIONS):
        comparison.add(found, policy, cost, rng)
    assert comparison.decisions == DECISIONS
    return comparison.changed


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_policy_that_scores_its_own_choice_between_equals_changes_nothing(policy):
    for worker in WORKERS:
        alike = record(worker, policy, overlaps=[4] * 4, requests=[2] * 4)
        assert changed(alike, policy) == 0


def test_a_draw_between_workers_that_the_other_policy_tells_apart_is_a_change():
    kept = record("w2:0", "latency", overlaps=[0, 0, 10, 0], requests=[0] * 4)
    assert changed(kept, "latency") == 0
    # Three draws in four go elsewhere.
    assert changed(kept, "random") == pytest.approx(DECISIONS * 3 / 4, rel=0.1)
    assert changed(kept, "least_loaded") == pytest.approx(DECISIONS * 3 / 4, rel=0.1)
    drawn = record("w1:0", "random", overlaps=[0, 0, 10, 0], requests=[0] * 4)
    assert changed(drawn, "latency") == DECISIONS


def test_a_draw_between_workers_that_are_equal_to_both_policies_is_no_change():
    idle = record("w1:0", "latency", overlaps=[0, 0, 0, 0], requests=[0, 0, 9, 9])
    assert changed(idle, "blocks") == changed(idle, "least_loaded") == 0


def test_power_of_two_does_not_change_its_own_decisions_by_drawing_another_pair():
    # w2 is not in every pair.
    drawn = record("w1:0", "power_of_two", overlaps=[0] * 4, requests=[3, 2, 1, 4])
    assert changed(drawn, "power_of_two") == 0
    assert changed(drawn, "least_loaded") == DECISIONS
    chosen = record("w1:0", "latency", overlaps=[0, 10, 0, 0], requests=[3, 2, 1, 4])
    assert 0 < changed(chosen, "power_of_two") < DECISIONS


def test_another_prefill_weight_is_treated_as_another_policy():
    kept = record("w2:0", "blocks", overlaps=[0, 0, 10, 0], requests=[0] * 4)
    assert changed(kept, "blocks", prefill_weight=1.0) == 0
    assert changed(kept, "blocks", prefill_weight=0.0) > DECISIONS / 2


def test_a_decision_by_a_policy_that_no_longer_exists_is_left_out():
    comparison = Comparison()
    gone = record("w1:0", "gone", overlaps=[0] * 4, requests=[0] * 4)
    comparison.add(gone, "latency", None, np.random.default_rng(1))
    assert comparison.decisions == 0


def test_means_are_of_the_workers_that_were_and_that_would_be_chosen():
    found = record("w0:0", "least_loaded", overlaps=[2, 0, 10, 0], requests=[1, 2, 3, 4])
    assert found.seen is not None
    found.seen.candidates.prefill_s[:] = [0.5, 0.0, 0.25, 0.0]
    comparison = Comparison()
    comparison.add(found, "logit", None, np.random.default_rng(1))
    # 41 tokens less 2 blocks of 4 to compute; of a prompt that is held, the last one.
    assert comparison.means() == {
        "decisions": 1,
        "changed": 1,
        "mean": {
            "overlap blocks": {"were": 2.0, "would be": 10.0},
            "predicted start, s": {
                "were": pytest.approx(0.5 + 0.033),
                "would be": pytest.approx(0.25 + 0.001),
            },
            "requests on the worker": {"were": 1.0, "would be": 3.0},
        },
    }


def with_session(found):
    """The decision, made for a session that had gone to w1 before."""
    assert found.seen is not None
    found.seen = ChoiceInputs(WORKERS, 4, found.seen.candidates, [True] * 4, Affinity(1, 1.0))
    return found


def test_the_session_counts_with_the_other_policy():
    found = with_session(record("w1:0", "latency", overlaps=[0, 0, 1, 0], requests=[0] * 4))
    comparison = Comparison()
    # Without its session it would have gone to w2, which holds a block.
    for policy in ("latency", "logit"):
        comparison.add(found, policy, None, np.random.default_rng(1))
    assert (comparison.decisions, comparison.changed) == (2, 0)


def test_the_session_counts_with_the_policy_that_decided():
    found = with_session(record("w1:0", "latency", overlaps=[0] * 4, requests=[0] * 4))
    assert changed(found, "random") > 0


def test_other_terms_count_for_the_policy_that_decided():
    found = record("w1:0", "latency", overlaps=[10, 9, 0, 0], requests=[0] * 4)
    assert changed(found, "latency") == DECISIONS
    assert found.seen is not None
    found.seen.others["late_s"] = np.array([50.0, 0.0, 0.0, 0.0])
    assert changed(found, "latency") == 0
    cheapest = explanation(found)["candidates"][0]
    assert (cheapest["worker"], cheapest["late_s"]) == ("w1:0", 0.0)
    assert changed(found, "blocks") == DECISIONS


def test_round_robin_takes_turns():
    comparison = Comparison()
    for _ in range(4):
        found = record("w0:0", "latency", overlaps=[10, 0, 0, 0], requests=[0, 1, 2, 3])
        comparison.add(found, "round_robin", None, np.random.default_rng(1))
    assert comparison.means()["mean"]["requests on the worker"] == {"were": 0.0, "would be": 1.5}


@pytest.mark.parametrize("wrong", ["worker", "room"])
def test_a_decision_that_cannot_have_been_made_is_left_out(wrong):
    worker = "w9:0" if wrong == "worker" else "w0:0"
    found = record(worker, "latency", overlaps=[0] * 4, requests=[0] * 4)
    assert found.seen is not None
    if wrong == "room":
        found.seen.candidates.max_requests[:] = 0
    comparison = Comparison()
    comparison.add(found, "latency", None, np.random.default_rng(1))
    assert comparison.decisions == 0
