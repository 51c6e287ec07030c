from app.core.types import WorkerKey
from app.policy.pair_failures import LONGEST_S, PAUSE_S, PairFailures

P, Q, D = WorkerKey("p"), WorkerKey("q"), WorkerKey("d")


def test_a_pair_whose_transfers_fail_three_times_in_a_row_is_left_alone():
    pairs = PairFailures()
    assert pairs.note(D, [P], 1, 0, 0.0) == []
    assert pairs.note(D, [P], 2, 0, 1.0) == []
    assert pairs.left_alone(1.0) == frozenset()
    assert pairs.note(D, [P], 1, 0, 2.0) == [(P, D)]
    assert pairs.left_alone(2.0 + PAUSE_S - 1) == {(P, D)}
    assert pairs.left_alone(2.0 + PAUSE_S) == frozenset()


def test_then_one_more_leaves_it_alone_for_twice_as_long():
    pairs, now_s = PairFailures(), 0.0
    for _ in range(2):
        pairs.note(D, [P], 1, 0, now_s)
    for number in range(10):
        assert pairs.note(D, [P], 1, 0, now_s) == [(P, D)]
        now_s += min(LONGEST_S, PAUSE_S * 2**number)
        assert pairs.left_alone(now_s - 1) == {(P, D)}
        assert pairs.left_alone(now_s) == frozenset()


def test_what_arrives_ends_it():
    pairs = PairFailures()
    for _ in range(2):
        pairs.note(D, [P, Q], 1, 0, 0.0)
    pairs.note(D, [Q], 0, 1, 0.0)
    assert pairs.note(D, [P, Q], 1, 0, 0.0) == [(P, D)]


def test_where_some_arrives_nobody_knows_whose_failed():
    pairs = PairFailures()
    for _ in range(9):
        assert pairs.note(D, [P, Q], 1, 1, 0.0) == []
    assert pairs.left_alone(0.0) == frozenset()
