from __future__ import annotations

import pytest

from workers.idle import WINDOW, IdleBeforeEvict


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_nothing_evicted_is_told_from_something_that_was_just_used() -> None:
    idle = IdleBeforeEvict(Clock())
    assert idle.value_s == 0
    idle.add(999.5)
    assert idle.value_s == 0.5


def test_it_is_the_mean_over_about_the_last_blocks() -> None:
    clock = Clock()
    idle = IdleBeforeEvict(clock)
    for _ in range(WINDOW):
        idle.add(clock.now_s - 600)
    assert idle.value_s == 600
    for _ in range(WINDOW):
        idle.add(clock.now_s - 100)
    # (1 - 1 / 200) ** 200 of the weight is left to the first
    assert idle.value_s == pytest.approx(100 + 500 * 0.367, abs=0.5)


def test_while_none_is_evicted_those_that_would_be_grow_older() -> None:
    clock = Clock()
    idle = IdleBeforeEvict(clock)
    idle.add(clock.now_s - 30)
    clock.now_s += 45
    assert idle.value_s == 75
    idle.add(clock.now_s - 30)
    assert idle.value_s == 30
