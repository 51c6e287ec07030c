from __future__ import annotations

from types import SimpleNamespace

import pytest

from app.core.rate_limit import Pace


def test_events_are_let_through_evenly_and_a_large_one_counts_as_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("app.core.rate_limit.time", clock)
    pace = Pace(4)

    def let_through(quarters: int, size: float) -> list[bool]:
        found = []
        for _ in range(quarters):
            found.append(pace.lets_through(size))
            clock.now += 0.25
        return found

    assert let_through(3, 1.0) == [True, True, True]
    assert let_through(6, 3.0) == [True, False, False, True, False, False]
    assert let_through(2, 1.0) == [True, True]


def test_a_pace_of_none_lets_nothing_through() -> None:
    assert not Pace(0).lets_through()
