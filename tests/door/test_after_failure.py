"""The table of what follows when a worker did not answer, or not to the end."""

import pytest

from app.core.failures import Failure, Suspects
from app.door.after_failure import (
    MAX_UNREACHED,
    TRIES,
    NextStep,
    Try,
    TryCounts,
    after_cut,
    after_try,
)

REFUSAL = Failure("status_500")


@pytest.mark.parametrize("ended", [Try.REFUSED, Try.BROKEN, Try.NO_KV])
def test_another_worker_is_asked_until_enough_were(ended):
    assert after_try(ended, TryCounts(refused=1), REFUSAL, says_why=True) is NextStep.RETRY
    over = TryCounts(refused=TRIES)
    assert after_try(ended, over) is NextStep.GIVE_UP
    assert after_try(ended, over, REFUSAL) is NextStep.GIVE_UP
    assert after_try(ended, over, REFUSAL, says_why=True) is NextStep.REFUSE


def test_what_no_other_worker_takes_is_asked_of_the_one_that_refused_it_once_more():
    one = TryCounts(refused=1, broken=1)
    assert after_try(Try.NOBODY, one, REFUSAL, says_why=True) is NextStep.ASK_AGAIN
    one.asked_again = True
    assert after_try(Try.NOBODY, one, REFUSAL, says_why=True) is NextStep.REFUSE


@pytest.mark.parametrize(
    ("tally", "refusal"),
    [
        (TryCounts(), None),
        (TryCounts(refused=2), REFUSAL),
        (TryCounts(refused=1), Failure("unauthorized", Suspects.WORKER)),
    ],
)
def test_it_is_not_where_that_would_not_do_better(tally, refusal):
    assert after_try(Try.NOBODY, tally, refusal) is NextStep.GIVE_UP


def test_a_client_that_has_waited_for_long_is_told():
    assert after_try(Try.BROKEN, TryCounts(broken=1), is_late=True) is NextStep.GIVE_UP
    late = after_try(Try.BROKEN, TryCounts(broken=1), REFUSAL, says_why=True, is_late=True)
    assert late is NextStep.REFUSE


@pytest.mark.parametrize(
    ("broken", "is_finished", "can_go_on", "then"),
    [
        (1, True, False, NextStep.FINISH),
        (2, True, True, NextStep.FINISH),
        (1, False, True, NextStep.MIGRATE),
        (2, False, True, NextStep.GIVE_UP),
        (1, False, False, NextStep.GIVE_UP),
    ],
)
def test_a_stream_that_was_cut_goes_on_where_it_can(broken, is_finished, can_go_on, then):
    tally = TryCounts(broken=broken)
    assert after_cut(tally, is_finished=is_finished, can_go_on=can_go_on) is then


def test_a_request_is_not_given_to_ever_more_workers():
    tally = TryCounts()
    for _ in range(3):
        tally.broke(never_sent=True)
        tally.refused += 1
    assert not tally.is_over
    tally.refused += 1
    assert tally.is_over


def test_no_third_worker_gets_what_two_broke_off():
    tally = TryCounts()
    tally.broke(never_sent=False)
    assert not tally.is_over
    tally.broke(never_sent=False)
    assert tally.has_broken_all
    assert tally.is_over


def test_workers_that_never_had_it_are_asked_in_a_row_but_not_without_end():
    tally = TryCounts()
    for _ in range(MAX_UNREACHED - 1):
        tally.broke(never_sent=True)
    assert tally.nobody_had_it
    assert after_try(Try.BROKEN, tally) is NextStep.RETRY
    tally.broke(never_sent=True)
    assert after_try(Try.BROKEN, tally) is NextStep.GIVE_UP
