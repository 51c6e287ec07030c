"""Cached tokens that are not as predicted are told, and by how much."""

import logging

import pytest

from app.door.told import alarm
from app.door.told.alarm import MIN_ANSWERS, REMEMBERED_ANSWERS, Alarm


def test_small_differences_are_nothing_to_tell():
    told = Alarm()
    for _ in range(2 * MIN_ANSWERS):
        told.compare("m", "a:0", 1000, 600, 560)
    assert told.remarks() == []


def test_a_worker_that_finds_less_than_predicted_is_told_once_there_is_enough_to_judge(caplog):
    told = Alarm()
    with caplog.at_level(logging.WARNING):
        for number in range(1, MIN_ANSWERS + 10):
            told.compare("m", "a:0", 1000, 600, 200)
            told.compare("m", "b:0", 1000, 600, 600)
            assert bool(told.remarks()) == (number >= MIN_ANSWERS)
    said = (
        "cached tokens: of its prompts of model m, 60.0% was predicted to be cached by worker "
        "a:0, and 20.0% was; 40.0% was predicted and missing"
    )
    assert told.remarks() == [said]
    assert [record.getMessage() for record in caplog.records] == [said]


def test_what_is_missing_is_not_made_up_for_by_what_is_cached_besides():
    told = Alarm()
    for _ in range(MIN_ANSWERS):
        told.compare("m", "a:0", 1000, 600, 200)
        told.compare("m", "a:0", 1000, 200, 600)
    assert "20.0% was predicted and missing" in told.remarks()[0]


@pytest.mark.parametrize(("predicted", "rings"), [(0, True), (50, True), (300, False)])
def test_more_than_predicted_is_wrong_only_where_next_to_nothing_was_predicted(predicted, rings):
    told = Alarm()
    for _ in range(MIN_ANSWERS):
        told.compare("m", "a:0", 1000, predicted, 600)
    assert bool(told.remarks()) == rings


def test_prompts_of_which_nothing_is_cached_are_nothing_to_tell():
    told = Alarm()
    for _ in range(MIN_ANSWERS):
        told.compare("m", "a:0", 1000, 0, 16)
    assert told.remarks() == []


def test_what_was_put_right_is_forgotten(caplog):
    told = Alarm()
    for _ in range(3 * REMEMBERED_ANSWERS):
        told.compare("m", "a:0", 1000, 600, 0)
    assert told.remarks()
    with caplog.at_level(logging.WARNING):
        for _ in range(5 * REMEMBERED_ANSWERS):
            told.compare("m", "a:0", 1000, 600, 600)
    assert told.remarks() == []
    assert caplog.records[-1].getMessage().startswith("no more: ")


def test_of_too_many_workers_the_one_heard_of_longest_ago_is_forgotten(monkeypatch):
    monkeypatch.setattr(alarm, "MAX_PAIRS", 2)
    told = Alarm()
    for worker in "aba":
        for _ in range(MIN_ANSWERS):
            told.compare("m", worker, 1000, 600, 0)
    told.compare("m", "c", 1000, 600, 0)
    assert [line.partition("worker ")[2][0] for line in told.remarks()] == ["a"]


def test_more_than_was_predicted_at_least_is_nothing_to_tell_but_less_is():
    """As when agents publish anew, after an outage of Redis."""
    told = Alarm()
    for _ in range(MIN_ANSWERS):
        told.compare("m", "a:0", 1000, 0, 900, at_least=True)
    assert told.remarks() == []
    for _ in range(MIN_ANSWERS):
        told.compare("m", "a:0", 1000, 900, 0, at_least=True)
    assert told.remarks() != []
