from __future__ import annotations

import random

from app.core.places import Places


def entered(places: Places[str], *calls: str) -> list[str]:
    """Calls are named by their holder's letter and a number. Returns those that had to go."""
    return [gone for call in calls for gone in places.enter(call[0], call)]


def test_a_place_goes_to_who_has_fewest() -> None:
    places = Places[str](2, 100)
    entered(places, "a1", "a2", "a3", "a4")
    assert [places.next(), places.next(), places.next()] == ["a1", "a2", None]
    entered(places, "b1", "b2")
    places.leave("a")
    assert places.next() == "b1"
    places.leave("a")
    assert places.next() == "a3", "who was served longest ago, as both have one"


def test_the_latest_of_who_has_most_makes_room() -> None:
    places = Places[str](1, 4)
    assert entered(places, "a1", "a2", "a3", "a4") == []
    assert places.next() == "a1"
    assert entered(places, "b1") == ["a4"]
    assert entered(places, "c1") == ["a3"]
    assert entered(places, "a5") == ["a5"]
    places.check()


def test_calls_count_by_what_they_are_worth() -> None:
    places = Places[str](1, 100, max_size=10)
    assert places.enter("a", "a1", 50) == [], "alone"
    assert places.enter("b", "b1", 1) == ["a1"]
    assert places.enter("a", "a2", 9) == []
    assert places.enter("b", "b2", 1) == ["a2"]


def test_who_is_at_work_stays_there() -> None:
    places = Places[str](1, 100, max_size=10)
    places.enter("a", "a1", 50)
    assert places.next() == "a1"
    assert places.enter("b", "b1", 1) == ["b1"]
    places.leave("a", 50)
    assert places.enter("b", "b1", 1) == []


def test_a_call_may_stop_waiting_once() -> None:
    places = Places[str](1, 100)
    entered(places, "a1", "a2")
    assert places.withdraw("a", "a1")
    assert not places.withdraw("a", "a1")
    assert not places.withdraw("b", "a1")
    assert places.next() == "a2"
    assert not places.withdraw("a", "a2")


def test_any_order_of_calls_keeps_the_books() -> None:
    chance = random.Random(2)
    for _ in range(50):
        places = Places[str](chance.randint(1, 3), chance.randint(1, 8), chance.randint(5, 40))
        at_work: list[tuple[str, int]] = []
        waiting: dict[str, int] = {}
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
