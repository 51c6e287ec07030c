from __future__ import annotations

import pytest

from app.policy.kv_lease import Fetches, LeaseBooks, Leases, fetches, leases

BEFORE = LeaseBooks("1000.5", ended=3, late=1, steps=50, read_ms=10_000)


def books(
    ended: int = 3, late: int = 1, steps: int = 60, read_ms: float = 20_000, life: str = "1000.5"
) -> LeaseBooks:
    return LeaseBooks(life, ended, late, steps, read_ms)


@pytest.mark.parametrize(
    ("now", "by_ms", "state"),
    [
        (books(), 19_000, Leases.KEPT),
        (books(), 19_001, Leases.UNKNOWN),  # it may be a second older than it seems
        (books(ended=4), 19_000, Leases.SOME_ENDED),
        (books(ended=4, read_ms=10_001), 30_000, Leases.SOME_ENDED),
        (books(ended=0, late=0, steps=2), 19_000, Leases.UNKNOWN),  # it has begun anew
        (books(life="2000.5"), 19_000, Leases.UNKNOWN),
        (books(life="1000.5+7"), 19_000, Leases.KEPT),  # it has only dropped its cache
        (None, 0, Leases.UNKNOWN),
    ],
)
def test_a_lease_is_kept_if_its_engine_has_let_none_go(
    now: LeaseBooks | None, by_ms: float, state: Leases
) -> None:
    assert leases(BEFORE, now, by_ms) is state
    assert leases(None, now, by_ms) is Leases.UNKNOWN


@pytest.mark.parametrize(
    ("first", "now", "what"),
    [
        (books(), books(), Fetches.IN_TIME),
        (books(ended=4, late=2), books(ended=4, late=2), Fetches.LATE),
        (books(ended=4), books(ended=4, late=2), Fetches.LATE),
        # An idle engine has not heard yet of what was fetched.
        (books(ended=4), books(ended=4), Fetches.UNKNOWN),
        (books(ended=4), books(ended=4, steps=61), Fetches.IN_TIME),
        (books(ended=4), books(ended=4, late=2, steps=61), Fetches.LATE),
        (books(ended=4), books(ended=4, steps=61, life="2000.5"), Fetches.UNKNOWN),
        (books(ended=4), books(ended=0, late=0, steps=1), Fetches.UNKNOWN),
        (None, books(), Fetches.UNKNOWN),
        (books(), None, Fetches.UNKNOWN),
    ],
)
def test_nothing_was_fetched_late_if_the_engine_has_heard_of_nothing_in_a_step_since(
    first: LeaseBooks | None, now: LeaseBooks | None, what: Fetches
) -> None:
    assert fetches(BEFORE, first, now) is what
    assert fetches(None, first, now) is Fetches.UNKNOWN
