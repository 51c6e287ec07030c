"""Which worker costs least to lose."""

import pytest

from app.core.worker_report import Speed
from app.planner.rules.policies import least_valued, unique_values
from app.planner.rules.state import FleetState, PastRequest, Phase, WorkerLoad, WorkerState
from app.simulation.steps import SimRequest

SPEED = Speed(prefill_s_per_token=1e-3, prefill_s_per_token2=0.0)
"""So a block of 100 tokens takes 0.1 s."""


def values(*asked, speed=SPEED):
    """asked: seconds ago, blocks held when asked, and what each worker holds now."""
    request = SimRequest("r", (), (), 1, 1)
    return unique_values(
        [PastRequest(1000.0 - ago_s, "w", request, best) for ago_s, best, _ in asked],
        [held for _, _, held in asked],
        now_s=1000.0,
        half_life_s=300.0,
        block_size=100,
        speed=speed,
    )


def test_a_worker_is_worth_what_the_next_best_one_would_have_to_compute():
    assert values((0.0, 8, {"a": 8, "b": 5, "c": 2})) == {"a": pytest.approx(0.3)}


def test_blocks_that_two_workers_hold_are_worth_nothing_on_either():
    assert values((0.0, 8, {"a": 8, "b": 8})) == {}


def test_blocks_count_only_if_they_were_asked_for_again():
    assert values((0.0, 0, {"a": 8})) == {}
    assert values((0.0, 3, {"a": 8, "b": 1})) == {"a": pytest.approx(0.2)}


def test_a_prompt_counts_half_for_each_half_life():
    found = values((0.0, 4, {"a": 4}), (300.0, 4, {"a": 4}), (600.0, 4, {"b": 4}))
    assert found == {"a": pytest.approx(0.6), "b": pytest.approx(0.1)}


def test_later_blocks_of_a_prompt_are_worth_more():
    """They attend to those before them: 100 * (1e-3 + 1e-6 * 350) seconds for the fourth."""
    speed = Speed(prefill_s_per_token=1e-3, prefill_s_per_token2=1e-6)
    assert values((0.0, 4, {"a": 4, "b": 3}), speed=speed) == {"a": pytest.approx(0.135)}


def worker(name, value_s, queue_s=0.0):
    load = WorkerLoad(0.0, queue_s, 0.0, 0.0, 1.0)
    return WorkerState(name, Phase.LIVE, 0.0, load, value_s)


def test_the_worker_leaves_whose_cache_and_promised_prefills_cost_least():
    leaving = WorkerState("leaving", Phase.DRAINING, 95.0)
    workers = [worker("a", 40.0), worker("b", 12.0, queue_s=2.0), worker("c", 10.0, 6.0), leaving]
    assert least_valued(FleetState(100.0, workers)) == "b"
