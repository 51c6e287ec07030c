import pytest

from app.core.overlaps import Overlaps
from app.core.types import Incarnation, TierOverlap
from app.router.lookup import with_predicted
from app.state.predictions import PredictionSettings


@pytest.mark.parametrize(
    ("lifetime_s", "buckets", "pause_s"),
    [(120, 8192, 2.34), (5, 8192, 0.098), (120, 1 << 19, 0.037)],
)
def test_a_round_of_pruning_takes_at_most_ten_slices(lifetime_s, buckets, pause_s):
    settings = PredictionSettings(lifetime_s, max_entries=262_144)
    assert settings.prune_pause_s(buckets, 64) == pytest.approx(pause_s, rel=0.02)
    num_steps = buckets / 64
    assert num_steps * settings.prune_pause_s(buckets, 64) == pytest.approx(10 * lifetime_s / 4)
    assert settings.prune_pause_s(0, 64) >= settings.prune_pause_s(1, 64), "nothing predicted yet"


def test_predicted_blocks_lengthen_the_overlap_on_the_device():
    a, b, c = Incarnation(1), Incarnation(2), Incarnation(3)
    published = Overlaps({a: TierOverlap(device=4, host=2), b: TierOverlap(device=9)})
    assert with_predicted(published, {a: 8, b: 8, c: 5}) == {
        a: TierOverlap(device=6, host=2),
        b: TierOverlap(device=9),
        c: TierOverlap(device=5),
    }
