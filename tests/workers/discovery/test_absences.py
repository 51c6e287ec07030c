"""Engines that an answer lacks."""

from dataclasses import replace

from tests.workers.discovery.fleets import engine
from workers.discovery.engine import ANSWERS, Absences

BOTH = {"1": engine("a", "http://a:1"), "2": engine("b", "http://b:1")}
ONE = {"1": BOTH["1"]}
GONE_S = 60.0


def noted(*answers):
    """When each came after one of both, in seconds, and what it told of."""
    absences = Absences(GONE_S)
    absences.note(BOTH, 0.0)
    for now, engines in answers:
        absences.note(engines, now)
    return absences


def test_an_engine_is_gone_once_all_answers_have_lacked_it_for_long():
    there = noted((0.0, ONE), (5.0, ONE), (GONE_S - 1.0, ONE))
    assert there.lacking == {"2": replace(BOTH["2"], ready=False)}
    assert not noted((0.0, ONE), (5.0, ONE), (GONE_S, ONE)).lacking


def test_an_answer_that_has_it_begins_the_count_anew():
    assert noted((0.0, ONE), (5.0, BOTH), (10.0, ONE), (15.0, ONE), (GONE_S, ONE)).lacking


def test_a_few_answers_say_nothing_however_long_they_took():
    assert ANSWERS == 3
    assert noted((0.0, ONE), (1000.0, ONE)).lacking


def test_an_answer_of_no_engine_says_nothing():
    assert noted(*((now * 10.0, {}) for now in range(20))).lacking.keys() == {"1", "2"}
    assert noted((0.0, ONE), (30.0, ONE), (GONE_S, {})).lacking.keys() == {"1", "2"}
    assert noted((0.0, {}), (50.0, ONE), (55.0, ONE), (GONE_S, ONE)).lacking


def test_an_engine_that_was_leaving_or_is_replaced_does_not_lack():
    other = engine("b", "http://c:1")
    assert not noted((0.0, ONE | {"3": other})).lacking
    assert not noted((0.0, ONE | {"2": replace(BOTH["2"], leaving=True)}), (1.0, ONE)).lacking


def test_an_engine_that_is_forgotten_does_not_lack():
    absences = noted((0.0, ONE))
    absences.forget("2")
    absences.note(ONE, 1.0)
    assert not absences.lacking
