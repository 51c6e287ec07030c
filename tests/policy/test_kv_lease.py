import pytest

from app.core.fetches import Fetch
from app.core.types import WorkerKey
from app.policy.kv_lease import LeaseBooks, are_kept, began_anew, has_spoken, is_void

FETCH = Fetch(WorkerKey("p"), WorkerKey("d"), "1000.5", "", ended=3)


def books(ended=3, steps=60, read_ms=20_000, life="1000.5"):
    return LeaseBooks(life, ended, steps, read_ms)


@pytest.mark.parametrize(
    ("now", "by_ms", "kept"),
    [
        (books(), 19_000, True),
        (books(), 19_001, False),  # it may be a second older than it seems
        (books(ended=4), 19_000, False),
        (books(ended=0, steps=2), 19_000, False),  # it has begun anew
        (books(life="2000.5"), 19_000, False),
        (books(life="1000.5+7"), 19_000, True),  # it has only dropped its cache
        (None, 0, False),
    ],
)
def test_a_lease_is_kept_if_its_engine_has_let_none_go(now, by_ms, kept):
    assert are_kept(FETCH, now, by_ms) is kept


@pytest.mark.parametrize(
    ("first", "now", "spoken"),
    [
        (books(), books(), True),  # it has let go of nothing
        # An idle engine has not heard yet of what was fetched.
        (books(ended=4), books(ended=4), False),
        (books(ended=4), books(ended=4, steps=61), True),
        (books(ended=4), books(ended=0, steps=1), True),  # another hands nothing on
        (books(ended=4), books(ended=4, life="2000.5"), True),
    ],
)
def test_a_source_has_spoken_once_its_engine_has_made_a_step_since(first, now, spoken):
    assert has_spoken(FETCH, first, now) is spoken


def test_what_was_to_be_fetched_from_a_process_that_is_no_more_is_void():
    assert not is_void(FETCH, books())
    assert is_void(FETCH, books(life="2000.5+1"))


@pytest.mark.parametrize(
    ("life", "now", "is_other"),
    [("1.5", "2.5", True), ("1.5", "1.5+3", False), ("1.5", None, False), ("", "2.5", False)],
)
def test_an_engine_that_does_not_tell_its_life_is_not_known_to_have_begun_anew(life, now, is_other):
    assert began_anew(life, now) is is_other
