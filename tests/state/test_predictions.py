from __future__ import annotations

import pytest

from app.core.types import Incarnation, TierOverlap
from app.router.lookup import with_predicted
from app.state.predictions import POSITIONS, PredictionSettings, positions


def test_each_doubling_of_the_length_has_eight_positions() -> None:
    assert list(positions(40)) == [*range(1, 17), *range(18, 33, 2), 36, 40]
    assert list(positions(3)) == [1, 2, 3]
    assert list(positions(0)) == []
    assert len(positions(8192)) == 88


def test_a_predicted_overlap_falls_short_of_the_truth_by_at_most_a_ninth() -> None:
    for length in range(1, 10_000):
        assert length - positions(length)[-1] <= length / 9


def test_a_prompt_of_the_longest_length_accepted_reaches_few_positions() -> None:
    assert sorted(set(POSITIONS)) == POSITIONS
    assert len(positions(1_048_576)) == 144


@pytest.mark.parametrize(
    ("lifetime_s", "buckets", "pause_s"),
    [(120, 8192, 2.34), (5, 8192, 0.098), (120, 1 << 19, 0.037)],
)
def test_a_round_of_pruning_takes_at_most_ten_slices(
    lifetime_s: float, buckets: int, pause_s: float
) -> None:
    settings = PredictionSettings(lifetime_s, max_entries=262_144)
    assert settings.prune_pause_s(buckets, 64) == pytest.approx(pause_s, rel=0.02)
    num_steps = buckets / 64
    assert num_steps * settings.prune_pause_s(buckets, 64) == pytest.approx(10 * lifetime_s / 4)
    assert settings.prune_pause_s(0, 64) >= settings.prune_pause_s(1, 64), "nothing predicted yet"


def test_predicted_blocks_lengthen_the_overlap_on_the_device() -> None:
    a, b, c = Incarnation(1), Incarnation(2), Incarnation(3)
    published = {a: TierOverlap(device=4, host=2), b: TierOverlap(device=9)}
    assert with_predicted(published, {a: 8, b: 8, c: 5}) == {
        a: TierOverlap(device=6, host=2),
        b: TierOverlap(device=9),
        c: TierOverlap(device=5),
    }
