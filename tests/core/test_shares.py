from __future__ import annotations

import random
from itertools import permutations

import pytest

from app.core.places import Shares


def test_nobody_alone_takes_more_than_three_quarters() -> None:
    shares = Shares(100)
    while shares.left_for("a") >= 1:
        shares.take("a", 1)
    assert shares.of("a") == 75
    assert (shares.left_for("a"), shares.left_for("b")) == (0, 18.75)


def test_whoever_comes_next_finds_room_however_many_want_all_of_it() -> None:
    shares = Shares(1000)
    holders = [f"h{n}" for n in range(9)]
    shares.take("first", 1)
    for _ in range(1000):
        for holder in holders:
            if shares.left_for(holder) >= 1:
                shares.take(holder, 1)
    assert shares.left_for("next") >= 25


def test_what_is_given_back_is_counted_for_nobody() -> None:
    shares, chance = Shares(50), random.Random(1)
    held: list[tuple[str, int]] = []
    for _ in range(2000):
        if held and chance.random() < 0.5:
            shares.give_back(*held.pop(chance.randrange(len(held))))
        else:
            held.append((chance.choice("abc"), chance.randint(1, 5)))
            shares.take(*held[-1])
        shares.check()
        assert shares.total == sum(size for _, size in held)
    for one in held:
        shares.give_back(*one)
    assert (shares.total, shares._of) == (0, {})


@pytest.mark.parametrize("size", [0.0, 1e-7, 0.1, 1 / 3])
def test_parts_of_any_size_can_be_given_back_in_any_order(size: float) -> None:
    for order in permutations((size, 5.0, size)):
        shares = Shares(50)
        for part in order:
            shares.take("a", part)
        for part in (size, 5.0, size):
            shares.check()
            shares.give_back("a", part)
        assert (shares.total, shares._of) == (0, {})


def test_the_greediest_is_who_has_most_and_in_doubt_who_asks() -> None:
    shares = Shares(10)
    assert shares.greediest("x") == "x"
    shares.take("a", 2)
    shares.take("b", 2)
    assert (shares.greediest("a"), shares.greediest("b")) == ("a", "b")
    shares.take("b", 1)
    assert shares.greediest("a") == "b"
