import random

from app.core.chains import MAX_PIECES, PIECE_BYTES, marks_of, trail_of

TEXT = random.Random(1).randbytes(40 * PIECE_BYTES)


def test_equal_prefixes_have_equal_names_and_others_have_others():
    trail = trail_of(TEXT, "m")
    assert len(trail) == len({*trail}) == 40
    assert trail_of(TEXT[: 10 * PIECE_BYTES + 5], "m") == trail[30:]
    assert {*trail_of(TEXT[: 9 * PIECE_BYTES] + TEXT[::-1], "m")} & {*trail} == {*trail[31:]}
    assert {*trail_of(TEXT, "other")}.isdisjoint(trail)


def test_what_is_short_has_no_name_and_what_is_long_not_more_than_so_many():
    assert trail_of(b"x" * (PIECE_BYTES - 1), "m") == []
    assert len(trail_of(b"x" * (PIECE_BYTES * 2 * MAX_PIECES), "m")) == MAX_PIECES


def test_of_any_shared_prefix_at_least_half_is_marked():
    for num in (0, 1, 2, 3, 7, 40, 512):
        trail = [str(n) for n in range(num)]
        marks = marks_of(trail)
        assert len(marks) == len({*marks}) <= 2 + 2 * num.bit_length()
        for shared in range(1, num + 1):
            left = [mark for mark in marks if int(mark) >= num - shared]
            assert max(num - int(mark) for mark in left) * 2 >= shared
