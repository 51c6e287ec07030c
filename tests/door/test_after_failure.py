"""The table of what follows when a worker did not answer, or not to the end."""

from __future__ import annotations

import pytest

from app.core.failures import Failure, Whose
from app.door.after_failure import MAX_UNREACHED, TRIES, Tally, Then, Try, after_cut, after_try

REFUSAL = Failure("status_500")


@pytest.mark.parametrize("ended", [Try.REFUSED, Try.BROKEN, Try.NO_KV])
def test_another_worker_is_asked_until_enough_were(ended: Try) -> None:
    assert after_try(ended, Tally(refused=1), REFUSAL, says_why=True) is Then.RETRY
    over = Tally(refused=TRIES)
    assert after_try(ended, over) is Then.GIVE_UP
    assert after_try(ended, over, REFUSAL) is Then.GIVE_UP
    assert after_try(ended, over, REFUSAL, says_why=True) is Then.REFUSE


def test_what_no_other_worker_takes_is_asked_of_the_one_that_refused_it_once_more() -> None:
    one = Tally(refused=1, broken=1)
    assert after_try(Try.NOBODY, one, REFUSAL, says_why=True) is Then.ASK_AGAIN
    one.asked_again = True
    assert after_try(Try.NOBODY, one, REFUSAL, says_why=True) is Then.REFUSE


@pytest.mark.parametrize(
    ("tally", "refusal"),
    [
        (Tally(), None),
        (Tally(refused=2), REFUSAL),
        (Tally(refused=1), Failure("unauthorized", Whose.WORKER)),
    ],
)
def test_it_is_not_where_that_would_not_do_better(tally: Tally, refusal: Failure | None) -> None:
    assert after_try(Try.NOBODY, tally, refusal) is Then.GIVE_UP


def test_a_client_that_has_waited_for_long_is_told() -> None:
    assert after_try(Try.BROKEN, Tally(broken=1), is_late=True) is Then.GIVE_UP
    late = after_try(Try.BROKEN, Tally(broken=1), REFUSAL, says_why=True, is_late=True)
    assert late is Then.REFUSE


@pytest.mark.parametrize(
    ("broken", "is_finished", "can_go_on", "then"),
    [
        (1, True, False, Then.FINISH),
        (2, True, True, Then.FINISH),
        (1, False, True, Then.MIGRATE),
        (2, False, True, Then.GIVE_UP),
        (1, False, False, Then.GIVE_UP),
    ],
)
def test_a_stream_that_was_cut_goes_on_where_it_can(
    broken: int, is_finished: bool, can_go_on: bool, then: Then
) -> None:
    tally = Tally(broken=broken)
    assert after_cut(tally, is_finished=is_finished, can_go_on=can_go_on) is then


def test_a_request_is_not_given_to_ever_more_workers() -> None:
    tally = Tally()
    for _ in range(3):
        tally.broke(never_sent=True)
        tally.refused += 1
    assert not tally.is_over
    tally.refused += 1
    assert tally.is_over


def test_no_third_worker_gets_what_two_broke_off() -> None:
    tally = Tally()
    tally.broke(never_sent=False)
    assert not tally.is_over
    tally.broke(never_sent=False)
    assert tally.has_broken_all
    assert tally.is_over


def test_workers_that_never_had_it_are_asked_in_a_row_but_not_without_end() -> None:
    tally = Tally()
    for _ in range(MAX_UNREACHED - 1):
        tally.broke(never_sent=True)
    assert tally.nobody_had_it
    assert after_try(Try.BROKEN, tally) is Then.RETRY
    tally.broke(never_sent=True)
    assert after_try(Try.BROKEN, tally) is Then.GIVE_UP
