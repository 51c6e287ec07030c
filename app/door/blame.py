"""The blame for an answer that did not come, or that another worker would not give. Pure.

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
from app.door import blame
from app.door.answer import events
from app.door.answer.events import ABORTS, FAILURES, fields_of, is_error, parsed, reasons_of
from app.door.answer_request import AUDIO

MAX_RETRY_AFTER_S = 60.0

UNREACHABLE = "unreachable"
EMPTY = "empty"
ERROR_EVENT = "error_event"
ABORTED, CUT = events.ABORTED, events.CUT
FOREIGN = "foreign"
"""Cause of an answer that is none of the API: a page of what stands before the engine, or something
encoded."""
_LOAD = "load"
_IN_A_ROW = 2
"""Failures that suspend a worker which answers, however wrong: one may be of the request."""
_WORKER_STATUSES = {401: "unauthorized", 403: "forbidden", 404: "not_found", 407: "unauthorized"}
"""Causes of statuses by which a worker does not take the door's key, or lacks the model that it
announced: a client has no part in either."""
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
"""A limit that may be the caller's own."""


def takes_no_more(failure: Failure) -> bool:
    """Whether the worker is only full (429, or 503 with Retry-After) and has not failed."""
    return failure.weight == 0.0


def at_path(failure: Failure, path: str) -> Failure:
    """Returns the failure at a path for which an engine computes nothing: the worker is left alone
    for that path alone, unless it is not reached or takes no more."""
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
    """Returns the Failure of a status; None if it is none, or the request's own fault. headers: of
    the answer, names in lower case. model: that was asked for. missing_path: that the engine says
    it lacks; "" if it says nothing of the kind."""
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
    """Returns the Failure to count when an engine refuses as too long a prompt that fits the
    context length its worker registered; None otherwise. An engine that was restarted may have
    another length for a moment."""
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
    """Returns the Failure that an event with an error tells; None if the request is at fault."""
    return of_error(fields_of(event) or {})


def of_error(fields: Mapping[str, Any]) -> Failure | None:
    """Returns the Failure that fields tell in `error`, in `response.error`, or as a whole; None if
    the request is at fault."""
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
    """Returns the status that an error says of itself, 400-599; 0 if none."""
    code = str(_said_in(fields).get("code") or "")
    status = int(code) if len(code) == 3 and code.isascii() and code.isdigit() else 0
    return status if 400 <= status < 600 else 0


def _said_in(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    response = fields.get("response")
    told = response if isinstance(response, dict) else fields
    error = told.get("error")
    return error if isinstance(error, dict) else told


def wrong(cause: str) -> Failure:
    """Returns the Failure of an answer that is none, whatever its status."""
    return Failure(cause, in_a_row=_IN_A_ROW, most_s=SOON_S)


def of_break(cause: str, *, is_late: bool, is_whole: bool) -> Failure | None:
    """Returns the Failure of an answer that broke off or did not come; None if nothing is to be
    counted. cause: of UpstreamError. is_late: it was waited for in vain. is_whole: it comes in one
    piece, so that being late alone tells nothing of the worker."""
    if is_late and is_whole and cause != UNREACHABLE:
        return None
    if cause in (ABORTED, CUT, ERROR_EVENT):
        return wrong(cause)
    most_s = LATE_S if is_late else SOON_S
    if cause == UNREACHABLE:  # no request can be at fault that never came there
        return Failure(cause, Suspects.WORKER, most_s=most_s, counts=Counts.ALL)
    return Failure(cause, most_s=most_s)


def _retry_after_s(headers: Sequence[tuple[bytes, bytes]]) -> float | None:
    """Returns the seconds of Retry-After, one for a date; None if the answer has none."""
    said = next((value for name, value in headers if name == b"retry-after"), None)
    if said is None:
        return None
    return float(said) if said.isdigit() else 1.0


MAX_PARSED_BYTES = 64 * 1024
"""A larger body is not parsed, as that would take milliseconds: it only has to begin and end like
JSON."""
_OPENS, _CLOSES = (b"{", b"["), (b"}", b"]")
_ERROR_NAMES = (b'"error"', b'"failed"')
_HAS: Mapping[str, str] = {
    "/v1/chat/completions": "choices",
    "/v1/completions": "choices",
    "/v1/messages": "content",
    "/v1/responses": "output",
}
"""Path -> the member without which there is no answer. Of others, engines have their own."""
_MAY_BE_BINARY = ("/v1/embeddings",)

Headers = Sequence[tuple[bytes, bytes]]


def type_in(headers: Headers) -> bytes:
    """Returns the content type; b"" if there is none. headers: names in lower case."""
    said = next((value for name, value in headers if name == b"content-type"), b"")
    return said.partition(b";")[0].strip().lower()


def is_json(headers: Headers) -> bool:
    kind = type_in(headers)
    return kind == b"application/json" or kind.endswith(b"+json")


def _is_binary(headers: Headers) -> bool:
    kind = type_in(headers)
    return kind != b"" and not kind.startswith(b"text/") and not is_json(headers)


def failure_of(
    status: int, headers: Headers, body: bytes, *, model: str, path: str, is_all: bool
) -> Failure | None:
    """Returns the Failure of an answer that is not in events; None if it is none, or the request's
    own fault. body: its beginning. model, path: that were asked for. is_all: whether the body is
    whole."""
    if status != 200:
        missing_path = path if blame.is_path_missing(status, body) else ""
        return blame.of_status(status, headers, model=model, missing_path=missing_path)
    if not body:
        return blame.wrong(blame.EMPTY)
    if path in _MAY_BE_BINARY and _is_binary(headers):
        return None
    if path.startswith(AUDIO) and not is_json(headers) and type_in(headers) != b"text/html":
        return None  # sound, or plain text
    if body.lstrip()[:1] not in _OPENS:
        return blame.wrong(blame.FOREIGN)
    if not is_all:
        return None
    return _failure_in(body, _HAS.get(path, ""))


def _failure_in(body: bytes, member: str) -> Failure | None:
    """Returns the Failure of a whole body that begins as JSON; None if it is an answer. member:
    that it must have; "": any."""
    fields: Any = None
    if body.rstrip()[-1:] not in _CLOSES:
        return blame.wrong(blame.CUT)
    aborts = ABORTS.search(body) is not None
    if aborts or len(body) <= MAX_PARSED_BYTES:
        try:
            fields = parsed(body)
        except ValueError:
            return blame.wrong(blame.CUT)
    if isinstance(fields, dict) and is_error(fields):
        return blame.of_error(fields)
    if aborts and isinstance(fields, dict) and not FAILURES.isdisjoint(reasons_of(fields).values()):
        return blame.wrong(blame.ABORTED)
    if not member or (isinstance(fields, dict) and member in fields):
        return None
    is_there = fields is None and b'"%b"' % member.encode() in body
    return None if is_there else blame.wrong(blame.FOREIGN)


def status_of(body: bytes) -> int:
    """Returns the status that an answer with status 200 should have had: 200, unless it tells an
    error."""
    if len(body) > MAX_PARSED_BYTES or not any(name in body for name in _ERROR_NAMES):
        return 200
    fields: Any = None
    with suppress(ValueError):
        fields = parsed(body)
    if not isinstance(fields, dict) or not is_error(fields):
        return 200
    return blame.status_in(fields) or 400
