import pytest

from app.planner.rules.state import Prediction, Proposal, Reason, Rules
from app.simulation.profiles import USUAL
from loadtest.client import FailureKind, Outcome
from loadtest.scaling import PlayedTrace
from loadtest.scaling_figures import figures_of


def outcome(arrival_s, ttft_s=1.0):
    return Outcome(
        request_id=str(arrival_s),
        arrival_s=arrival_s,
        sent_s=arrival_s,
        prompt_tokens=100,
        attempts=1,
        first_token_s=arrival_s + ttft_s,
        end_s=arrival_s + ttft_s,
        output_tokens=1,
    )


def change(at_s, size, desired, attainment=None):
    candidates = ()
    if attainment is not None:
        candidates = (Prediction(desired, 100, attainment, 1.0, 0.0),)
    return Proposal(at_s, "slo", size, desired, Reason.ENOUGH, candidates=candidates)


def figures(proposals, outcomes):
    played = PlayedTrace(outcomes, proposals, worker_s=7200.0, recomputed_s=5.0)
    return figures_of(played, USUAL, Rules(window_s=100.0))


def test_a_change_that_undoes_one_of_the_last_ten_minutes_is_a_reversal():
    found = figures(
        [
            change(0.0, 4, 5),
            change(30.0, 5, 5),
            change(60.0, 5, 6),
            change(660.0, 6, 5),
            change(1290.0, 5, 6),
        ],
        [outcome(0.0)],
    )
    assert (found.changes, found.reversals) == (4, 1)
    assert found.worker_hours == 2.0
    assert found.prediction_error is None


def test_a_request_without_an_answer_is_lost_and_misses_the_slo():
    lost = Outcome("lost", 1.0, 1.0, 100, 1, failure=FailureKind.FULL)
    found = figures([], [outcome(0.0), lost, outcome(2.0, ttft_s=9.0), outcome(3.0)])
    assert (found.lost, found.within_slo) == (1, 0.5)


def test_a_prediction_is_compared_with_what_then_was_until_the_next_change():
    # From 10 s to 40 s a third of the requests is late, afterwards all are.
    outcomes = [
        outcome(float(at_s), ttft_s=9.0 if at_s >= 40 or at_s % 3 == 0 else 1.0)
        for at_s in range(200)
    ]
    down, up = change(10.0, 5, 4, attainment=0.9), change(40.0, 4, 5, attainment=1.0)
    assert figures([down, up], outcomes).prediction_error == pytest.approx(0.9 - 2 / 3)
    # Without a next change, what then was is as long as what was predicted: 10 s to 110 s.
    assert figures([down], outcomes).prediction_error == pytest.approx(0.9 - 0.2)
    assert figures([down], outcomes[:25]).prediction_error is None
