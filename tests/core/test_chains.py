from app.core.chains import POSITIONS, parse_owners, positions
from app.core.types import Incarnation, Tier

ONE, TWO, ELEVEN = Incarnation(1), Incarnation(2), Incarnation(11)


def test_each_doubling_of_the_length_has_eight_positions():
    assert list(positions(40)) == [*range(1, 17), *range(18, 33, 2), 36, 40]
    assert list(positions(3)) == [1, 2, 3]
    assert list(positions(0)) == []
    assert len(positions(8192)) == 88


def test_a_predicted_overlap_falls_short_of_the_truth_by_at_most_a_ninth():
    for length in range(1, 10_000):
        assert length - positions(length)[-1] <= length / 9


def test_a_prompt_of_the_longest_length_accepted_reaches_few_positions():
    assert sorted(set(POSITIONS)) == POSITIONS
    assert len(positions(1_048_576)) == 144


def test_owners_are_read_as_incarnation_and_tier():
    assert parse_owners(b"1d2h11k") == ((ONE, Tier.DEVICE), (TWO, Tier.HOST), (ELEVEN, Tier.DISK))


def test_malformed_owners_are_ignored():
    assert parse_owners(b"1d" + b"7" * 5_000 + b"d2h" + b"x3") == (
        (ONE, Tier.DEVICE),
        (TWO, Tier.HOST),
    )
