import random
from itertools import permutations

import pytest

from app.core.places import Places, Shares


def test_nobody_alone_takes_more_than_three_quarters():
    shares = Shares(100)
    while shares.left_for("a") >= 1:
        shares.take("a", 1)
    assert shares.of("a") == 75
    assert (shares.left_for("a"), shares.left_for("b")) == (0, 18.75)


def test_whoever_comes_next_finds_room_however_many_want_all_of_it():
    shares = Shares(1000)
    holders = [f"h{n}" for n in range(9)]
    shares.take("first", 1)
    for _ in range(1000):
        for holder in holders:
            if shares.left_for(holder) >= 1:
                shares.take(holder, 1)
    assert shares.left_for("next") >= 25


def test_what_is_given_back_is_counted_for_nobody():
    shares, chance = Shares(50), random.Random(1)
    held = []
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
def test_parts_of_any_size_can_be_given_back_in_any_order(size):
    for order in permutations((size, 5.0, size)):
        shares = Shares(50)
        for part in order:
            shares.take("a", part)
        for part in (size, 5.0, size):
            shares.check()
            shares.give_back("a", part)
        assert (shares.total, shares._of) == (0, {})


def test_the_greediest_is_who_has_most_and_in_doubt_who_asks():
    shares = Shares(10)
    assert shares.greediest("x") == "x"
    shares.take("a", 2)
    shares.take("b", 2)
    assert (shares.greediest("a"), shares.greediest("b")) == ("a", "b")
    shares.take("b", 1)
    assert shares.greediest("a") == "b"


def entered(places, *calls):
    """Calls are named by their holder's letter and a number. Returns those that had to go."""
    return [gone for call in calls for gone in places.enter(call[0], call)]


def test_a_place_goes_to_who_has_fewest():
    places = Places[str](2, 100)
    entered(places, "a1", "a2", "a3", "a4")
    assert [places.next(), places.next(), places.next()] == ["a1", "a2", None]
    entered(places, "b1", "b2")
    places.leave("a")
    assert places.next() == "b1"
    places.leave("a")
    assert places.next() == "a3", "who was served longest ago, as both have one"


def test_the_latest_of_who_has_most_makes_room():
    places = Places[str](1, 4)
    assert entered(places, "a1", "a2", "a3", "a4") == []
    assert places.next() == "a1"
    assert entered(places, "b1") == ["a4"]
    assert entered(places, "c1") == ["a3"]
    assert entered(places, "a5") == ["a5"]
    places.check()


def test_calls_count_by_what_they_are_worth():
    places = Places[str](1, 100, max_size=10)
    assert places.enter("a", "a1", 50) == [], "alone"
    assert places.enter("b", "b1", 1) == ["a1"]
    assert places.enter("a", "a2", 9) == []
    assert places.enter("b", "b2", 1) == ["a2"]


def test_who_is_at_work_stays_there():
    places = Places[str](1, 100, max_size=10)
    places.enter("a", "a1", 50)
    assert places.next() == "a1"
    assert places.enter("b", "b1", 1) == ["b1"]
    places.leave("a", 50)
    assert places.enter("b", "b1", 1) == []


def test_a_call_may_stop_waiting_once():
    places = Places[str](1, 100)
    entered(places, "a1", "a2")
    assert places.withdraw("a", "a1")
    assert not places.withdraw("a", "a1")
    assert not places.withdraw("b", "a1")
    assert places.next() == "a2"
    assert not places.withdraw("a", "a2")


def test_any_order_of_calls_keeps_the_books():
    chance = random.Random(2)
    for _ in range(50):
        places = Places[str](chance.randint(1, 3), chance.randint(1, 8), chance.randint(5, 40))
        at_work = []
        waiting = {}
        for number in range(200):
            match chance.randrange(4):
                case 0 | 1:
                    call = f"{chance.choice('abc')}{number}"
                    waiting[call] = chance.randint(1, 9)
                    for gone in places.enter(call[0], call, waiting[call]):
                        del waiting[gone]
                case 2 if (begun := places.next()) is not None:
                    at_work.append((begun[0], waiting.pop(begun)))
                case 3 if at_work:
                    places.leave(*at_work.pop())
            places.check()
            assert sum(map(len, places._waiting.values())) == len(waiting)
