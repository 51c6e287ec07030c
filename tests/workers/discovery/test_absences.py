"""Engines that an answer lacks."""

from __future__ import annotations

from tests.workers.discovery.fleets import engine
from workers.discovery.absences import ANSWERS, Absences

BOTH = {"1": engine("a", "http://a:1"), "2": engine("b", "http://b:1")}
ONE = {"1": BOTH["1"]}
GONE_S = 60.0


def noted(*answers: tuple[float, dict[str, object]]) -> Absences:
    """When each came, in seconds, and what it told of."""
    absences = Absences(GONE_S)
    for now, engines in answers:
        absences.note(BOTH, engines, now)  # type: ignore[arg-type]
    return absences


def test_an_engine_is_gone_once_all_answers_have_lacked_it_for_long() -> None:
    assert not noted((0.0, ONE), (5.0, ONE), (GONE_S - 1.0, ONE)).is_long("2")
    gone = noted((0.0, ONE), (5.0, ONE), (GONE_S, ONE))
    assert gone.is_long("2")
    assert not gone.is_long("1")


def test_an_answer_that_has_it_begins_the_count_anew() -> None:
    assert not noted((0.0, ONE), (5.0, BOTH), (10.0, ONE), (15.0, ONE), (GONE_S, ONE)).is_long("2")


def test_a_few_answers_say_nothing_however_long_they_took() -> None:
    assert ANSWERS == 3
    assert not noted((0.0, ONE), (1000.0, ONE)).is_long("2")


def test_an_answer_of_no_engine_says_nothing() -> None:
    assert not noted(*((now * 10.0, {}) for now in range(20))).is_long("2")
    assert not noted((0.0, ONE), (30.0, ONE), (GONE_S, {})).is_long("2")
