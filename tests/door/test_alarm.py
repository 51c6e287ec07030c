"""Cached tokens that are not as predicted are told, and by how much."""

from __future__ import annotations

import logging

import pytest

from app.door import alarm
from app.door.alarm import Alarm


def test_small_differences_are_nothing_to_tell() -> None:
    told = Alarm()
    for _ in range(100):
        told.compare("m", "a:0", 1000, 600, 640)
    assert told.remarks() == []


def test_a_worker_that_finds_less_than_predicted_is_told_once_there_is_enough_to_judge(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told = Alarm()
    with caplog.at_level(logging.WARNING):
        for number in range(1, 31):
            told.compare("m", "a:0", 1000, 600, 200)
            told.compare("m", "b:0", 1000, 600, 600)
            assert bool(told.remarks()) == (number * 1000 >= alarm.MIN_TOKENS)
    said = (
        "cached tokens: 40.0% of those of prompts of m on worker a:0 are not as predicted, which "
        "was 60.0%; it reports 20.0%"
    )
    assert told.remarks() == [said]
    assert [record.getMessage() for record in caplog.records] == [said]


def test_differences_in_both_directions_do_not_cancel_out() -> None:
    told = Alarm()
    for _ in range(20):
        told.compare("m", "a:0", 1000, 600, 200)
        told.compare("m", "a:0", 1000, 200, 600)
    assert "40.0% of those" in told.remarks()[0]


def test_what_was_put_right_is_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    told = Alarm()
    for _ in range(100):
        told.compare("m", "a:0", 10_000, 6000, 0)
    assert told.remarks()
    with caplog.at_level(logging.WARNING):
        for _ in range(300):
            told.compare("m", "a:0", 10_000, 6000, 6000)
    assert told.remarks() == []
    assert caplog.records[-1].getMessage().startswith("no more: ")


def test_of_too_many_workers_the_one_heard_of_longest_ago_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(alarm, "MAX_PAIRS", 2)
    told = Alarm()
    for worker in ("a", "b", "a", "c"):
        told.compare("m", worker, 50_000, 50_000, 0)
    assert [line.partition("worker ")[2][0] for line in told.remarks()] == ["a", "c"]
