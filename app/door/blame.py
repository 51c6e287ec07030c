"""Whose fault it is that a worker gave no answer, or one that another would not give. Pure.

A failure of a worker is counted against it, and another worker gets the request; what the request
itself is refused for goes to its client. A worker that takes no more for now is left alone for as
long as it asks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import orjson

from app.core.failures import LATE_S, SOON_S, Counts, Failure, Suspects
from app.core.verdicts import FAILED, LACKS
from app.door import endings
from app.door.stream import fields_of

MAX_RETRY_AFTER_S = 60.0

UNREACHABLE = "unreachable"
EMPTY = "empty"
ERROR_EVENT = "error_event"
ABORTED, CUT = endings.ABORTED, endings.CUT
FOREIGN = "foreign"
"""It is none of the API: a page of what stands before the engine, or something encoded."""
_LOAD = "load"
_IN_A_ROW = 2
"""Failures that suspend a worker which answers, however wrong: one may be of the request."""
_WORKER_STATUSES = {401: "unauthorized", 403: "forbidden", 404: "not_found", 407: "unauthorized"}
"""Its door key is not taken, or it no longer has the model that it announced. A client has no part
in either."""
_NO_PATH = (404, 405)
_REQUEST_STATUSES = (501, 505, 506, 510)
_OVERLOADED = (429, 529)
_OVERLOADED_TYPE = "overloaded_error"
_RATE_TYPES = ("rate_limit_error", "rate_limit_exceeded")
_REQUEST_AT_FAULT = re.compile(
    r"(?i)invalid_request|bad_?request|context_length|invalid_prompt|too_large"
)

BAD_PARAMS = Failure("handover", in_a_row=_IN_A_ROW, most_s=SOON_S)
"""A source's answer does not say where the prompt's KV lies, or not so that it can be fetched."""
_TOO_LONG_WORDS = re.compile(
    rb"(?i)context[ _](?:length|size|window)|max_model_len|max_seq_len|max_total_tokens"
)
_REFUSES = Failure("refuses", Suspects.WORKER, in_a_row=_IN_A_ROW, most_s=SOON_S)
BACK_PRESSURE = Failure(_LOAD, Suspects.WORKER, weight=0.0, in_a_row=0, pause_s=1.0)
_RATE_LIMIT = replace(BACK_PRESSURE, counts=Counts.CALLER)
"""It may be the caller's own."""


def takes_no_more(failure: Failure) -> bool:
    """Whether it is none, but that the worker takes no more for now."""
    return failure.weight == 0.0


def at_path(failure: Failure, path: str) -> Failure:
    """The same of a path for which an engine computes nothing: the worker is left alone for that
    path, and not for others, unless it is not reached or takes no more."""
    if failure.cause == UNREACHABLE or takes_no_more(failure) or failure.mark != FAILED:
        return failure
    return replace(failure, mark=LACKS + path)


def of_status(
    status: int,
    headers: Sequence[tuple[bytes, bytes]] = (),
    *,
    model: str = "",
    missing_path: str = "",
) -> Failure | None:
    """How an answer with that status fails; None: it does not, or that is the request's own fault.

    headers: of the answer, names in lower case. model: that was asked for. missing_path: the
    engine says that it does not have this path; "": it says nothing of the kind.
    """
    after_s = _retry_after_s(headers)
    if status in _OVERLOADED or (status == 503 and after_s is not None):
        pressure = _RATE_LIMIT if status == 429 else BACK_PRESSURE
        return replace(pressure, pause_s=min(after_s or 1.0, MAX_RETRY_AFTER_S))
    if status in (502, 504):  # what stands before the engine does not reach it
        return Failure(f"status_{status}", Suspects.WORKER, most_s=SOON_S)
    if missing_path:
        return replace(_REFUSES, cause="no_path", mark=LACKS + missing_path)
    if status in _WORKER_STATUSES:
        mark = LACKS + model if status == 404 else FAILED
        return replace(_REFUSES, cause=_WORKER_STATUSES[status], mark=mark)
    if status == 408 or (status >= 500 and status not in _REQUEST_STATUSES):
        return wrong(f"status_{status}")
    if 200 < status < 400:  # what stands before the engine sends clients elsewhere
        return replace(_REFUSES, cause=f"status_{status}")
    return None


def of_length(status: int, body: bytes) -> Failure | None:
    """The same of a request that should have fitted: the engine has another context length than its
    worker registered, as one that was restarted has for a moment."""
    is_refused = status in (400, 413, 422) and _TOO_LONG_WORDS.search(body)
    return replace(_REFUSES, cause="context_length") if is_refused else None


def is_path_missing(status: int, body: bytes) -> bool:
    """Whether that answer says that the engine lacks the path, and not something at it."""
    if status not in _NO_PATH:
        return False
    with suppress(orjson.JSONDecodeError):
        answer = orjson.loads(body)
        error = answer.get("error") if isinstance(answer, dict) else None
        if isinstance(error, dict):
            return error.get("code") in ("not_found", "method_not_allowed")
        return not isinstance(answer, dict) or isinstance(answer.get("detail"), str)
    return True


def of_event(event: bytes) -> Failure | None:
    """The same of an event that tells an error, whatever the dialect calls it."""
    return of_error(fields_of(event) or {})


def of_error(fields: Mapping[str, Any]) -> Failure | None:
    """The same of what says what is wrong in `error`, in `response.error`, or as a whole."""
    said = _said_in(fields)
    code, kind = str(said.get("code") or ""), str(said.get("type") or "")
    if not {code, kind}.isdisjoint(_RATE_TYPES):
        return _RATE_LIMIT
    if _OVERLOADED_TYPE in (code, kind):
        return BACK_PRESSURE
    if status := status_in(fields):
        failure = of_status(status)
        return failure and replace(failure, cause=ERROR_EVENT if failure.weight else failure.cause)
    return None if _REQUEST_AT_FAULT.search(f"{kind} {code}") else wrong(ERROR_EVENT)


def status_in(fields: Mapping[str, Any]) -> int:
    """That an error says of itself, 400-599; 0: none."""
    code = str(_said_in(fields).get("code") or "")
    status = int(code) if len(code) == 3 and code.isascii() and code.isdigit() else 0
    return status if 400 <= status < 600 else 0


def _said_in(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    response = fields.get("response")
    told = response if isinstance(response, dict) else fields
    error = told.get("error")
    return error if isinstance(error, dict) else told


def wrong(cause: str) -> Failure:
    """Of an answer that is none, whatever its status."""
    return Failure(cause, in_a_row=_IN_A_ROW, most_s=SOON_S)


def of_break(cause: str, *, is_late: bool, is_whole: bool) -> Failure | None:
    """The same of an answer that did not come, or not to its end. cause: of UpstreamError.

    is_late: it was waited for in vain. is_whole: it comes in one piece, so that nobody knows
    whether the worker is at it: that alone is nothing against it.
    """
    if is_late and is_whole and cause != UNREACHABLE:
        return None
    if cause in (ABORTED, CUT, ERROR_EVENT):
        return wrong(cause)
    most_s = LATE_S if is_late else SOON_S
    if cause == UNREACHABLE:  # no request can be at fault that never came there
        return Failure(cause, Suspects.WORKER, most_s=most_s, counts=Counts.ALL)
    return Failure(cause, most_s=most_s)


def _retry_after_s(headers: Sequence[tuple[bytes, bytes]]) -> float | None:
    """None: the answer says none. A date counts as a second."""
    said = next((value for name, value in headers if name == b"retry-after"), None)
    if said is None:
        return None
    return float(said) if said.isdigit() else 1.0
