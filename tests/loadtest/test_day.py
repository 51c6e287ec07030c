"""A day's traffic, made of a shorter trace."""

from itertools import pairwise

import numpy as np
import pytest

from loadtest.autoscale import curve, day_of
from loadtest.traces import Session, Trace, TraceRequest

HOUR = 3600


def trace(sessions=60, turns=1):
    """A session a second."""
    return Trace(
        "made up",
        tuple(
            Session(
                float(i),
                tuple(
                    TraceRequest(i * turns + turn, 512, 1, (i * turns + turn,), 512, 7.0)
                    for turn in range(turns)
                ),
            )
            for i in range(sessions)
        ),
    )


def test_the_day_peaks_at_four_times_its_trough_and_dips_at_noon():
    rates = curve(HOUR, bursts=0.0, seed=0)
    assert rates.mean() == pytest.approx(1.0)
    assert rates.max() / rates.min() == pytest.approx(4.0)
    noon = rates[HOUR // 2]
    assert rates[: HOUR // 2].max() > 1.1 * noon < rates[HOUR // 2 :].max()
    assert rates.argmin() in (0, HOUR - 1)


def test_bursts_last_two_minutes_and_add_their_share():
    calm, bursty = curve(HOUR, bursts=0.0, seed=1), curve(HOUR, bursts=0.5, seed=1)
    heights = bursty / calm
    assert np.ptp(heights[:120]) == pytest.approx(0.0)
    assert heights.std() > 0.2
    assert heights.min() >= 0.5 * heights.mean() - 0.3
    assert (curve(HOUR, bursts=0.5, seed=1) == bursty).all()
    assert (curve(HOUR, bursts=0.5, seed=2) != bursty).any()


def test_arrivals_follow_the_curve_in_their_order():
    rates = curve(HOUR, bursts=0.0, seed=0)
    starts = np.array([session.start_s for session in day_of(trace(), rates, load=1.0).sessions])
    assert len(starts) == HOUR
    assert (np.diff(starts) > 0).all()
    per_minute, _ = np.histogram(starts, bins=60, range=(0, HOUR))
    expected = rates.reshape(60, 60).sum(axis=1)
    assert np.abs(per_minute - expected).max() <= 2


def test_twice_the_load_has_twice_the_arrivals():
    rates = curve(HOUR, bursts=0.0, seed=0)
    assert len(day_of(trace(), rates, load=2.0).sessions) == 2 * HOUR


def test_each_repetition_has_tokens_of_its_own_and_follows_the_one_before():
    day = day_of(trace(turns=2), curve(HOUR, bursts=0.0, seed=0), load=1.0)
    firsts = [session.turns[0].blocks[0] for session in day.sessions]
    assert len(set(firsts)) == len(firsts)
    recorded = [block % (1 << 40) for block in firsts]
    assert recorded[:120] == [2 * i for i in range(60)] * 2
    indices = [turn.index for session in day.sessions for turn in session.turns]
    assert len(set(indices)) == len(indices)


def test_gaps_within_sessions_stay():
    day = day_of(trace(turns=3), curve(HOUR, bursts=0.2, seed=0), load=0.5)
    assert {turn.think_s for session in day.sessions for turn in session.turns} == {7.0}
    assert all(b.start_s > a.start_s for a, b in pairwise(day.sessions))
