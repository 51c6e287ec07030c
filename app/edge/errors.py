"""Every error of a router: one table, spoken in the dialect of the path that was asked."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from enum import Enum, auto
from typing import NamedTuple

import orjson
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from app.console.whatif import Busy
from app.core import outcomes
from app.core.errors import (
    AllWorkersBusy,
    BodiesTooLarge,
    BodyTimeout,
    BodyTooLarge,
    Crowded,
    InvalidRequest,
    NamespaceMissing,
    NoWorkers,
    PromptTooLarge,
    RedisUnavailable,
    RouterOverloaded,
    Superseded,
    WrongVersion,
    cut,
    shown,
    without_values,
)
from app.door.asked import PASSED_ON, PATHS, Api
from app.door.errors import (
    AnswerTimeout,
    ClientStalled,
    ContextTooLong,
    ModelUnavailable,
    RepeatedFailure,
    Stopping,
    Unauthorized,
    UnknownModel,
    Unreached,
    WorkerFailed,
)
from app.http.body import error_body


class Meaning(NamedTuple):
    """What an error is answered with. code: stable, part of the interface; "": an engine's error
    has none. kind: OpenAI's `type`, from which Anthropic's follows."""

    status: int
    code: str
    kind: str


class Ending(NamedTuple):
    """What metrics and logs have of how a request ended. status: answered, unless an answer had
    begun."""

    status: int
    outcome: str
    ended_by: str


FRAMEWORK_ERRORS = (
    ("bad_request", 400, "The request is not valid HTTP."),
    (
        "forbidden",
        403,
        "The console is for its own page, and changes nothing without `x-kvroute-console`.",
    ),
    ("not_found", 404, "There is no such path."),
    ("method_not_allowed", 405, "The path has no such method."),
    ("url_too_long", 414, "The URL has more than 32 KiB."),
    ("headers_too_large", 431, "Headers, or trailers and chunk extensions, have more than 64 KiB."),
    ("internal", 500, "An unforeseen error; the router's log has it."),
)
"""Code, status and meaning of the errors that are no KvrouteError."""
GONE = Ending(499, outcomes.GONE, "client")
_INVALID, _OVERLOADED, _FAULT = "invalid_request_error", "overloaded_error", "api_error"

ERRORS: Mapping[type[Exception], Meaning] = {
    ContextTooLong: Meaning(422, "context_length_exceeded", _INVALID),
    InvalidRequest: Meaning(422, "invalid_request", _INVALID),
    PromptTooLarge: Meaning(422, "prompt_too_large", _INVALID),
    Unauthorized: Meaning(401, "invalid_api_key", "authentication_error"),
    UnknownModel: Meaning(404, "model_not_found", _INVALID),
    BodyTimeout: Meaning(408, "body_timeout", _INVALID),
    Superseded: Meaning(409, "superseded", _INVALID),
    Busy: Meaning(409, "busy", _OVERLOADED),
    BodyTooLarge: Meaning(413, "body_too_large", _INVALID),
    AllWorkersBusy: Meaning(429, "all_workers_busy", _OVERLOADED),
    Crowded: Meaning(429, "router_overloaded", _OVERLOADED),
    RouterOverloaded: Meaning(429, "router_overloaded", _OVERLOADED),
    AnswerTimeout: Meaning(504, "answer_timeout", _FAULT),
    RepeatedFailure: Meaning(502, "repeated_failure", _FAULT),
    WorkerFailed: Meaning(502, "worker_failed", _FAULT),
    ModelUnavailable: Meaning(503, "no_workers", _OVERLOADED),
    NoWorkers: Meaning(503, "no_workers", _OVERLOADED),
    BodiesTooLarge: Meaning(503, "bodies_too_large", _OVERLOADED),
    NamespaceMissing: Meaning(503, "no_workers", _OVERLOADED),
    WrongVersion: Meaning(503, "wrong_version", _FAULT),
    RedisUnavailable: Meaning(503, "redis_unavailable", _FAULT),
    Stopping: Meaning(503, "stopping", _OVERLOADED),
}
INTERNAL = Meaning(500, "internal", _FAULT)
OF_THE_FRAMEWORK = {403: "forbidden", 404: "not_found", 405: "method_not_allowed"}
_UNSERVED = (
    *(AllWorkersBusy, BodiesTooLarge, Crowded, ModelUnavailable, NamespaceMissing, NoWorkers),
    *(RedisUnavailable, RouterOverloaded, WrongVersion),
)
"""What a request ends by that no worker has had, if none has failed before."""
UNSERVED_STATUS = b"x-unserved-status"
"""Header by which a balancer in front of several fleets asks for the status 425 for such a request,
so that it sends on no other. The answer's `x-status` is what it would have been."""
RETRIED = (429, 503)
"""Statuses whose answers say when to come again."""
INVALID = (401, 408, 413, 422)
"""Statuses that count as invalid requests."""
DONE = b"data: [DONE]\n\n"
_SAY_DONE = (Api.CHAT, Api.COMPLETIONS)
MAX_REASON = 200
"""Characters."""
MAX_RETRY_AFTER_S = 60
MAX_ERRORS = 100
"""Only a body with so many unknown fields has more. pydantic lists all of them or none, and a
million would take seconds, in which no request is answered."""

_OF_OPENAI = {"invalid_request": None, "prompt_too_large": "context_length_exceeded"}
"""Codes that clients of the OpenAI API know under another name."""
_ROOTS_OF_OPENAI = ("/v1/models", "/v1/chat/", "/v1/responses", "/v1/audio/", "/v1/images/")
"""Where only OpenAI's clients ask, be there a path or not."""
_OF_ANTHROPIC = {404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}


class Dialect(Enum):
    """Whose clients an answer is for."""

    OURS = auto()
    OPENAI = auto()
    ANTHROPIC = auto()


def dialect_of(path: str) -> Dialect:
    """How errors are told at `path`, which need not exist."""
    if path.startswith("/v1/messages"):
        return Dialect.ANTHROPIC
    if path in PATHS or path in PASSED_ON or path.startswith(_ROOTS_OF_OPENAI):
        return Dialect.OPENAI
    return Dialect.OURS


def meaning_of(error: Exception) -> Meaning:
    """What `error` is answered with."""
    for kind in type(error).__mro__:
        if kind in ERRORS:
            return ERRORS[kind]
    if isinstance(error, HTTPException):
        code = OF_THE_FRAMEWORK.get(error.status_code, "http_error")
        return Meaning(error.status_code, code, _INVALID)
    return INTERNAL


def ending_of(error: BaseException) -> Ending:
    """How a request at a path of OpenAI's or Anthropic's ended by `error`."""
    if isinstance(error, asyncio.CancelledError | ClientDisconnect):
        return GONE
    if isinstance(error, ClientStalled):
        return Ending(GONE.status, "client_stalled", "router")
    if not isinstance(error, Exception):
        return Ending(500, INTERNAL.code, "router")
    status, code, kind = meaning_of(error)
    return Ending(400 if status == 422 else status, _OF_OPENAI.get(code, code) or kind, "router")


def reason_of(error: Exception) -> str:
    """Why a request was refused, as logs may have it."""
    return cut(without_values(_message(error)), MAX_REASON)


def answer_to(error: Exception, path: str) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Status, headers and body of the answer to `error` at `path`."""
    status, _, _ = meaning_of(error)
    headers = []
    if status in RETRIED:
        seconds = error.retry_after_s if isinstance(error, AllWorkersBusy) else 1.0
        headers.append((b"retry-after", b"%d" % max(1, min(math.ceil(seconds), MAX_RETRY_AFTER_S))))
    if isinstance(error, RepeatedFailure):
        headers.append((b"x-should-retry", b"false"))  # the clients of OpenAI and Anthropic heed it
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, BodyTimeout | BodiesTooLarge):
        # Its rest is not waited for.
        headers.append((b"connection", b"close"))
    if isinstance(error, HTTPException):
        given = (error.headers or {}).items()
        headers += [(name.lower().encode(), value.encode()) for name, value in given]
    dialect = dialect_of(path)
    if status == 422 and dialect is not Dialect.OURS:
        status = 400
    return status, headers, _body(error, dialect)


def unserved(
    answer: tuple[int, list[tuple[bytes, bytes]], bytes],
) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """The same answer, for who may send the request to another fleet."""
    status, headers, body = answer
    return 425, [*headers, (b"x-status", b"%d" % status)], body


def is_unserved(error: Exception, *, has_failures: bool) -> bool:
    """Whether no worker has had a request that ended by `error`. has_failures: of workers."""
    return isinstance(error, Unreached) or (isinstance(error, _UNSERVED) and not has_failures)


def event_of(error: Exception, path: str) -> bytes:
    """The event that ends a stream for which `error` came too late to be its answer."""
    return event_with(_body(error, dialect_of(path)), path)


def event_with(body: bytes, path: str) -> bytes:
    """The same, of what would be the body of an answer with an error. As engines do, it says [DONE]
    behind an error where a whole stream ends so: some clients wait for that."""
    dialect = dialect_of(path)
    if PATHS.get(path) is Api.RESPONSES:
        inner = orjson.loads(body)["error"]
        failed = {"type": "error", "code": inner["code"], "message": inner["message"]}
        return b"event: error\ndata: " + orjson.dumps(failed) + b"\n\n"
    name = b"event: error\n" if dialect is Dialect.ANTHROPIC else b""
    event = name + b"data: " + body + b"\n\n"
    return event + DONE if PATHS.get(path) in _SAY_DONE else event


def _body(error: Exception, dialect: Dialect) -> bytes:
    return body_of(meaning_of(error), _message(error), getattr(error, "field", None), dialect)


def kind_of(status: int) -> str:
    """OpenAI's `type` of an error with that status."""
    if status in RETRIED:
        return _OVERLOADED
    return _INVALID if status < 500 else _FAULT


def body_of(meaning: Meaning, message: str, field: str | None, dialect: Dialect) -> bytes:
    """An error's body."""
    status, code, kind = meaning
    if dialect is Dialect.OURS:
        return orjson.dumps(error_body(code or kind, message, field))
    if dialect is Dialect.ANTHROPIC:
        kind = _OF_ANTHROPIC.get(status, kind)
        return orjson.dumps({"type": "error", "error": {"type": kind, "message": message}})
    code_there = _OF_OPENAI.get(code, code) or None
    return orjson.dumps(
        {"error": {"message": message, "type": kind, "param": field, "code": code_there}}
    )


def _message(error: Exception) -> str:
    if meaning_of(error).status == 500:
        return f"{type(error).__name__}; see the router's log"
    return str(error.detail if isinstance(error, HTTPException) else error)


def refusal_of(error: ValidationError) -> InvalidRequest:
    """What a caller is told of a bad body or query: the first bad field and its value, unless there
    are many."""
    count = error.error_count()
    if count > MAX_ERRORS:
        return InvalidRequest("body", f"{count:,} fields are unknown or wrong")
    first = error.errors(include_url=False, include_context=False)[0]
    field = cut(".".join(map(str, first["loc"]))) or "body"
    return InvalidRequest(field, f"{first['msg']}, got {shown(first['input'])}")
