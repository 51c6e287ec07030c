"""The table of what is a failure of a worker, and what is its request's own fault."""

from dataclasses import replace

import orjson
import pytest

from app.core.failures import LATE_S, SOON_S, Counts, Suspects
from app.core.verdicts import LACKS
from app.door import blame
from app.door.blame import BACK_PRESSURE

EITHER, WORKER = Suspects.EITHER, Suspects.WORKER
PATH = "/v1/messages"


@pytest.mark.parametrize(
    ("status", "whose", "in_a_row"),
    [
        (401, WORKER, 2),
        (403, WORKER, 2),
        (404, WORKER, 2),
        (407, WORKER, 2),
        (408, EITHER, 2),
        (500, EITHER, 2),
        (502, WORKER, 1),
        (503, EITHER, 2),
        (504, WORKER, 1),
        (520, EITHER, 2),
    ],
)
def test_a_status_that_is_the_workers_fault(status, whose, in_a_row):
    failure = blame.of_status(status)
    assert failure is not None
    assert (failure.whose, failure.in_a_row, failure.most_s) == (whose, in_a_row, SOON_S)
    assert not blame.takes_no_more(failure)


@pytest.mark.parametrize("status", [200, 400, 402, 405, 409, 413, 415, 422, 451, 501])
def test_a_status_that_is_none(status):
    assert blame.of_status(status) is None


@pytest.mark.parametrize(
    ("status", "after", "pause_s"),
    [
        (429, None, 1.0),
        (429, b"7", 7.0),
        (429, b"86400", 60.0),
        (529, b"2", 2.0),
        (503, b"3", 3.0),
        (503, b"Fri, 31 Dec 1999 23:59:59 GMT", 1.0),
        (503, b"0", 1.0),
    ],
)
def test_a_worker_that_takes_no_more_is_left_alone_for_as_long_as_it_asks(status, after, pause_s):
    headers = [] if after is None else [(b"retry-after", after)]
    failure = blame.of_status(status, headers)
    assert failure is not None
    assert blame.takes_no_more(failure)
    assert failure.pause_s == pause_s
    assert failure.counts is (Counts.CALLER if status == 429 else Counts.WITNESSED)


@pytest.mark.parametrize(
    ("status", "body", "subject"),
    [
        (404, {"error": {"message": "The model `m` does not exist.", "code": 404}}, "m"),
        (404, {"error": {"message": "no", "code": "model_not_found"}}, "m"),
        (404, {"error": {"message": "no", "code": "not_found"}}, PATH),
        (404, {"detail": "Not Found"}, PATH),
        (404, "404: Not Found", PATH),
        (405, {"detail": "Method Not Allowed"}, PATH),
    ],
)
def test_a_404_is_of_a_model_or_of_a_path(status, body, subject):
    text = body.encode() if isinstance(body, str) else orjson.dumps(body)
    missing = PATH if blame.is_path_missing(status, text) else ""
    failure = blame.of_status(status, model="m", missing_path=missing)
    assert failure is not None
    assert failure.mark == LACKS + subject


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"error":{"type":"rate_limit_error"}}\n\n',
        b'data: {"error":{"message":"slow down","code":429}}\n\n',
        b'data: {"error":{"message":"slow down","code":"429"}}\n\n',
        b'event: error\ndata: {"type":"error","code":"rate_limit_exceeded"}\n\n',
    ],
)
def test_events_that_ask_their_caller_for_patience(event):
    assert blame.of_event(event) == replace(BACK_PRESSURE, counts=Counts.CALLER)


def test_an_overloaded_engine_asks_all_for_patience():
    event = b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error"}}\n\n'
    assert blame.of_event(event) == BACK_PRESSURE


@pytest.mark.parametrize(
    ("cause", "is_late", "is_whole", "expected"),
    [
        ("unreachable", False, False, (WORKER, 1, SOON_S)),
        ("unreachable", True, True, (WORKER, 1, LATE_S)),
        ("broken", False, True, (EITHER, 1, SOON_S)),
        ("no_answer", False, True, (EITHER, 1, SOON_S)),
        ("late", True, False, (EITHER, 1, LATE_S)),
        ("cut", False, False, (EITHER, 2, SOON_S)),
        ("error_event", False, False, (EITHER, 2, SOON_S)),
    ],
)
def test_what_broke_off(cause, is_late, is_whole, expected):
    failure = blame.of_break(cause, is_late=is_late, is_whole=is_whole)
    assert failure is not None
    assert (failure.whose, failure.in_a_row, failure.most_s) == expected


def test_a_whole_answer_that_takes_long_is_no_failure_of_its_worker():
    assert blame.of_break("late", is_late=True, is_whole=True) is None


def test_what_is_of_the_worker_is_not_of_a_path():
    unreachable = blame.of_break("unreachable", is_late=False, is_whole=False)
    of_model = blame.of_status(404, model="m")
    for failure in (unreachable, of_model, BACK_PRESSURE):
        assert failure is not None
        assert blame.at_path(failure, PATH) is failure
    assert blame.at_path(blame.wrong("status_500"), PATH).mark == LACKS + PATH
