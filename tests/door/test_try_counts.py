"""Whether another worker is asked when some did not answer a request, or not to the end."""

import pytest

from app.core.failures import Failure, Suspects
from app.door.evidence import MAX_UNREACHED, TRIES, TryCounts

REFUSAL = Failure("status_500")


def test_what_no_other_worker_takes_is_asked_of_the_one_that_refused_it_once_more():
    one = TryCounts(refused=1, broken=1)
    assert one.may_ask_again(REFUSAL)
    one.asked_again = True
    assert not one.may_ask_again(REFUSAL)


@pytest.mark.parametrize(
    ("tally", "refusal"),
    [
        (TryCounts(), None),
        (TryCounts(refused=2), REFUSAL),
        (TryCounts(refused=1), Failure("unauthorized", Suspects.WORKER)),
    ],
)
def test_it_is_not_where_that_would_not_do_better(tally, refusal):
    assert not tally.may_ask_again(refusal)


@pytest.mark.parametrize(
    ("tally", "is_over"),
    [
        (TryCounts(refused=TRIES - 1), False),
        (TryCounts(refused=TRIES - 1, unreached=1), False),
        (TryCounts(refused=TRIES), True),
        (TryCounts(refused=TRIES - 1, broken=1), True),
        (TryCounts(broken=1), False),
        (TryCounts(broken=2), True),
        (TryCounts(unreached=MAX_UNREACHED - 1), False),
        (TryCounts(unreached=MAX_UNREACHED), True),
    ],
)
def test_a_request_is_not_given_to_ever_more_workers(tally, is_over):
    assert tally.is_over is is_over


def test_a_worker_that_was_not_reached_never_had_the_request():
    tally = TryCounts()
    tally.broke(never_sent=True)
    assert tally.nobody_had_it
    tally.broke(never_sent=False)
    assert not tally.nobody_had_it
