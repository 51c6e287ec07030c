import random

import pytest

from app.core.errors import RedisUnavailable
from app.core.types import Incarnation, SequenceHash, TierOverlap
from app.state.overlap import (
    MAX_BOUNDARIES,
    WHOLE_CHAIN,
    Boundaries,
    Gap,
    Run,
    _coarse,
    _gaps,
    _grouped,
    _living,
    _overlaps,
    _placed,
    _sample,
    _within,
)

ONE, TWO, ELEVEN = Incarnation(1), Incarnation(2), Incarnation(11)
CHAIN = [SequenceHash(n) for n in range(8192)]


def test_a_few_chains_of_one_shard_share_a_call():
    chains = [[SequenceHash(n % 3)] for n in range(60)]
    calls = [(shard, len(which)) for shard, which in _grouped(chains, 2)]
    # Of each three chains, those that begin with 0 and 2 lie in shard 0; so do empty ones.
    assert calls == [(0, 16), (0, 16), (0, 8), (1, 16), (1, 4)]
    assert list(_grouped([[SequenceHash(1)], [], []], 2)) == [(1, [0]), (0, [1, 2])]


def test_a_short_chain_is_sampled_whole():
    assert list(_sample(0, [])) == []
    assert list(_sample(3, [1])) == [0, 1, 2]
    assert list(_sample(WHOLE_CHAIN, [])) == list(range(512))


def test_a_long_chain_is_sampled_at_the_first_blocks_of_some_groups():
    # Of every group up to some 5,000 blocks, of every k-th group beyond. The last block comes after
    # the first one of its group.
    assert _sample(513, []) == list(range(0, 513, 16))
    assert _sample(515, []) == [*range(0, 513, 16), 514]
    assert _sample(2048, []) == [*range(0, 2048, 16), 2047]
    assert _sample(4623, []) == [*range(0, 4623, 16), 4622]
    assert _sample(4624, []) == [*range(0, 4624, 32), 4623]
    assert _sample(8192, []) == [*range(0, 8192, 32), 8176, 8191]


def test_both_sides_of_a_guessed_boundary_are_sampled():
    # With the first block of the group that each is in.
    assert _sample(2048, [112]) == sorted({*_sample(2048, []), 111, 112})
    assert _sample(2048, [117]) == sorted({*_sample(2048, []), 112, 116, 117})
    assert _sample(2048, [1, 2047]) == sorted({*_sample(2048, []), 1, 2046})


def test_the_script_gets_which_samples_continue_a_group_and_which_to_look_at_first():
    def grouping_of(length, guesses):
        _, *grouping = _coarse(CHAIN[:length], _sample(length, guesses), guesses)
        return tuple(grouping)

    assert grouping_of(512, []) == (16, b"", b"")
    assert grouping_of(512, [5, 64]) == (16, b"", b"6 5 65 64")
    # Every sample is the first block of its group, even the last one...
    assert grouping_of(513, []) == (1, b"", b"")
    # ...but here the 34th sample, the last, follows the first block of its group.
    assert grouping_of(515, []) == (1, b"34", b"")
    # The samples are 0, 16, 31, 32, 48, 52, 53, 64, ...
    assert grouping_of(515, [32, 53]) == (1, b"3 6 7 37", b"4 3 7 6")


def test_a_boundary_is_guessed_for_chains_with_the_same_prefix():
    boundaries = Boundaries()
    boundaries.learn(CHAIN, [Run(0, 70, b"1d2d"), Run(70, 3000, b"1d")])
    assert boundaries.recall(CHAIN) == [70, 3000]
    assert boundaries.recall(CHAIN[:3000]) == [70]
    assert boundaries.recall(CHAIN[:3001]) == [70, 3000]
    # What must match is the prefix of 64 blocks: the largest power of two up to the change.
    parted = [SequenceHash(n + 10_000) for n in range(8192)]
    assert boundaries.recall([*CHAIN[:64], *parted[64:]]) == [70]
    assert boundaries.recall([*CHAIN[:63], *parted[63:]]) == []


def test_for_each_doubling_of_the_length_only_the_last_boundary_seen_is_guessed():
    boundaries = Boundaries()
    boundaries.learn(CHAIN, [Run(0, 1, b"1d2d3d"), Run(1, 64, b"1d2d"), Run(64, 100, b"1d")])
    assert boundaries.recall(CHAIN) == [1, 100]
    boundaries.learn(CHAIN, [Run(0, 80, b"1d2d")])
    assert boundaries.recall(CHAIN) == [1, 80]


def test_adjoining_runs_with_the_same_owners_are_no_boundary():
    boundaries = Boundaries()
    boundaries.learn(CHAIN, [Run(0, 33, b"1d"), Run(33, 40, b"1d"), Run(40, 8192, b"1h")])
    assert boundaries.recall(CHAIN) == [40]
    boundaries.learn(CHAIN, [])
    assert boundaries.recall([]) == []


def test_the_end_of_a_chain_is_no_boundary():
    boundaries = Boundaries()
    boundaries.learn(CHAIN[:60], [Run(0, 40, b"1d2d"), Run(40, 60, b"1d")])
    assert boundaries.recall(CHAIN) == [40]


def test_only_the_max_boundaries_seen_last_are_kept():
    boundaries = Boundaries()
    other, parting = CHAIN[:2], [SequenceHash(10_000), SequenceHash(10_001)]
    boundaries.learn(other, [Run(0, 1, b"1d")])
    boundaries.learn(parting, [Run(0, 1, b"1d")])
    for n in range(MAX_BOUNDARIES - 1):
        boundaries.learn(other, [Run(0, 1, b"1d")])
        boundaries.learn([SequenceHash(20_000 + n), SequenceHash(0)], [Run(0, 1, b"1d")])
    assert boundaries.recall(other) == [1]
    assert boundaries.recall(parting) == []


def test_runs_over_sampled_positions_become_stretches_of_the_chain():
    # The 1st and 2nd sample have one set of owners, the 3rd another, the 4th none.
    runs = _placed([2, b"1d2d", 3, b"1d"], [0, 10, 20, 30])
    assert runs == [Run(0, 11, b"1d2d"), Run(20, 21, b"1d")]
    assert _placed([], [0, 10, 20, 30]) == []


def test_owners_that_change_between_samples_leave_a_gap_to_look_into():
    runs = [Run(0, 1, b"1d2d"), Run(16, 33, b"1d")]
    assert list(_gaps(runs, [0, 16, 32])) == [Gap(1, 16, b"1d")]


def test_owners_that_end_between_samples_leave_a_gap_as_well():
    runs = [Run(0, 1, b"1d2d"), Run(16, 17, b"1d")]
    assert list(_gaps(runs, [0, 16, 32])) == [Gap(1, 16, b"1d"), Gap(17, 32, b"")]


def test_a_gap_lies_in_one_group():
    runs = [Run(0, 33, b"1d2d"), Run(70, 80, b"1d")]
    assert list(_gaps(runs, [0, 32, 64, 70, 79])) == [
        Gap(33, 48, b"1d"),
        Gap(48, 64, b"1d"),
        Gap(64, 70, b"1d"),
    ]


def test_adjacent_samples_leave_no_gap():
    assert list(_gaps([Run(0, 2, b"1d2d"), Run(2, 3, b"1d")], range(4))) == []
    assert list(_gaps([Run(0, 4, b"1d")], range(4))) == []
    assert list(_gaps([Run(0, 16, b"1d2d"), Run(16, 17, b"1d")], [0, 15, 16])) == []
    assert list(_gaps([], [0, 10])) == []


def test_what_is_read_in_a_gap_becomes_runs():
    owners = [b"1d2d", b"1d2d", b"1d", None, None]
    assert list(_within(Gap(17, 22, b""), owners)) == [Run(17, 19, b"1d2d"), Run(19, 20, b"1d")]


def test_whoever_holds_what_follows_a_gap_holds_what_could_not_be_read_in_it():
    gap = Gap(17, 20, b"2h")
    assert list(_within(gap, [b"1d2h", None, b"2h"])) == [
        Run(17, 18, b"1d2h"),
        Run(18, 19, b"2h"),
        Run(19, 20, b"2h"),
    ]
    assert list(_within(gap, RedisUnavailable("late"))) == [Run(17, 20, b"2h")]
    assert list(_within(Gap(17, 20, b""), RedisUnavailable("late"))) == []


def test_dead_incarnations_hold_nothing_in_a_gap():
    owners = [b"1d5d11d", b"1d11d", b"5d11h", b"5d", None]
    assert _living([b"1", b"5"], owners) == [b"11d", b"11d", b"11h", b"", None]
    assert list(_within(Gap(17, 18, b"2h"), [b""])) == [Run(17, 18, b"2h")]


def test_overlap_adds_up_the_runs_that_an_incarnation_is_in():
    runs = [Run(0, 3, b"1d2d11h"), Run(3, 5, b"1h11h"), Run(5, 6, b"11k")]
    assert _overlaps(runs) == {
        ONE: TierOverlap(device=3, host=2),
        TWO: TierOverlap(device=3),
        ELEVEN: TierOverlap(host=5, disk=1),
    }


def test_a_gap_ends_the_overlap():
    """Owners may change between the two round trips: blocks after a gap do not count."""
    runs = [Run(0, 3, b"1d2d"), Run(3, 5, b"1d"), Run(5, 9, b"1d2d"), Run(12, 14, b"1d")]
    assert _overlaps(runs) == {ONE: TierOverlap(device=9), TWO: TierOverlap(device=3)}


def test_an_incarnation_without_the_first_block_has_no_overlap():
    assert _overlaps([Run(2, 4, b"1d")]) == {}


@pytest.mark.parametrize("seed", range(20))
def test_what_many_hold_alike_is_found_as_it_is_of_a_few(seed):
    """Each holds blocks on its device up to one position, and on in its host memory to another."""
    rng = random.Random(seed)
    ends = [sorted(rng.choices([0, 4, 7, 9], k=2)) for _ in range(100)]
    owners = [
        b"".join(
            b"%dd" % inc if position < device else b"%dh" % inc
            for inc, (device, end) in enumerate(ends, start=1)
            if position < end
        )
        for position in range(9)
    ]
    runs = [Run(at, at + 1, held) for at, held in enumerate(owners) if held]
    found = _overlaps(runs)
    assert found == {
        Incarnation(inc): TierOverlap(device, end - device)
        for inc, (device, end) in enumerate(ends, start=1)
        if end
    }
    assert len(found.own) < 100
