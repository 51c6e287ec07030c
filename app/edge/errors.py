"""Every error of a router: one table, spoken in the dialect of the path that was asked."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import orjson
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.requests import ClientDisconnect
from typing_extensions import TypedDict

from app.core import outcomes
from app.core.errors import (
    AllWorkersBusy,
    BodiesTooLarge,
    Crowded,
    InvalidRequest,
    NamespaceMissing,
    NoWorkers,
    RedisUnavailable,
    RouterOverloaded,
    Superseded,
    WrongVersion,
    cut,
    shown,
    without_values,
)
from app.core.key_rules import KeyRules, Rate, RateLimited
from app.core.worker_report import WorkerInfo
from app.door.answer_request import PASSED_ON, PATHS, Api
from app.door.blame import is_path_missing
from app.door.engine.words import Cause, cause_in
from app.door.errors import (
    AnswerTimeout,
    ContextTooLong,
    ModelUnavailable,
    PathMissing,
    RepeatedFailure,
    Stopping,
    UnknownModel,
    Unreached,
    WorkerFailed,
)
from app.http.client import ClientStalled
from app.http.errors import (
    FAULT,
    INTERNAL,
    INVALID,
    OF_ALL_SERVERS,
    OF_OPENAI,
    OVERLOADED,
    TAKES_NO_KEY,
    Dialect,
    ErrorTable,
    Headers,
    Meaning,
    body_of,
    kind_of,
)


class ErrorDetail(TypedDict):
    code: str
    message: str
    field: str | None


class ErrorBody(TypedDict):
    """The one shape of every error. `code` is stable."""

    error: ErrorDetail


class OpenAIErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(TypedDict):
    """Errors in OpenAI's form."""

    error: OpenAIErrorDetail


class AnthropicErrorDetail(TypedDict):
    type: str
    message: str


class AnthropicError(TypedDict):
    """Errors in Anthropic's form."""

    type: str
    error: AnthropicErrorDetail


class ErrorOutcome(NamedTuple):
    """Ending of a request, for metrics and logs. status: of the answer, unless one had begun."""

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
    ("websocket_refused", 426, "A WebSocket is asked for; all answers are plain HTTP."),
    ("url_too_long", 414, "The URL has more than 32 KiB."),
    ("headers_too_large", 431, "Headers, or trailers and chunk extensions, have more than 64 KiB."),
    ("internal", 500, "An unforeseen error; the router's log has it."),
)
"""Code, status and meaning of the errors that are no KvrouteError."""
GONE = ErrorOutcome(499, outcomes.GONE, "client")

ERRORS: Mapping[type[Exception], Meaning] = {
    **OF_ALL_SERVERS,
    ContextTooLong: Meaning(422, "context_length_exceeded", INVALID),
    UnknownModel: Meaning(404, "model_not_found", INVALID),
    Superseded: Meaning(409, "superseded", INVALID),
    AllWorkersBusy: Meaning(429, "all_workers_busy", OVERLOADED),
    Crowded: Meaning(429, "router_overloaded", OVERLOADED),
    RateLimited: Meaning(429, "rate_limit_exceeded", "rate_limit_error"),
    RouterOverloaded: Meaning(429, "router_overloaded", OVERLOADED),
    AnswerTimeout: Meaning(504, "answer_timeout", FAULT),
    PathMissing: Meaning(404, "not_found", INVALID),
    RepeatedFailure: Meaning(502, "repeated_failure", FAULT),
    WorkerFailed: Meaning(502, "worker_failed", FAULT),
    ModelUnavailable: Meaning(503, "no_workers", OVERLOADED),
    NoWorkers: Meaning(503, "no_workers", OVERLOADED),
    NamespaceMissing: Meaning(503, "no_workers", OVERLOADED),
    WrongVersion: Meaning(503, "wrong_version", FAULT),
    RedisUnavailable: Meaning(503, "redis_unavailable", FAULT),
    Stopping: Meaning(503, "stopping", OVERLOADED),
}
_TABLE = ErrorTable(ERRORS, "router")
meaning_of = _TABLE.meaning_of
_UNSERVED = (
    *(AllWorkersBusy, BodiesTooLarge, Crowded, ModelUnavailable, NamespaceMissing, NoWorkers),
    *(RedisUnavailable, RouterOverloaded, WrongVersion),
)
"""Errors of requests that no worker has had, if none has failed before."""
UNSERVED_STATUS = b"x-unserved-status"
"""Header by which a balancer in front of several fleets asks for the status 425 for such a request,
so that it sends on no other. The answer's `x-status` is what it would have been."""
INVALID_STATUSES = (401, 408, 413, 415, 422)
"""Statuses that count as invalid requests."""
DONE = b"data: [DONE]\n\n"
_SAY_DONE = (Api.CHAT, Api.COMPLETIONS)
MAX_REASON = 200
"""Characters."""
MAX_ERRORS = 100
"""Only a body with so many unknown fields has more. pydantic lists all of them or none, and a
million would take seconds, in which no request is answered."""

_OPENAI_ROOTS = ("/v1/models", "/v1/chat/", "/v1/responses", "/v1/audio/", "/v1/images/")
"""Paths, there or not, at which only OpenAI's clients ask."""


def dialect_of(path: str) -> Dialect:
    """Returns how errors are told at `path`, which need not exist."""
    if path.startswith("/v1/messages"):
        return Dialect.ANTHROPIC
    if path in PATHS or path in PASSED_ON or path.startswith(_OPENAI_ROOTS):
        return Dialect.OPENAI
    return Dialect.OURS


def ending_of(error: BaseException) -> ErrorOutcome:
    """Returns how a request at a path of OpenAI's or Anthropic's ended by `error`."""
    if isinstance(error, asyncio.CancelledError | ClientDisconnect):
        return GONE
    if isinstance(error, ClientStalled):
        return ErrorOutcome(GONE.status, "client_stalled", "router")
    if not isinstance(error, Exception):
        return ErrorOutcome(500, INTERNAL.code, "router")
    status, code, kind = meaning_of(error)
    return ErrorOutcome(
        400 if status == 422 else status, OF_OPENAI.get(code, code) or kind, "router"
    )


def reason_of(error: Exception) -> str:
    """Returns why a request was refused, as logs may have it."""
    return cut(without_values(_TABLE.message_of(error)), MAX_REASON)


def answer_to(error: Exception, path: str) -> tuple[int, Headers, bytes]:
    """Returns status, headers and body of the answer to `error` at `path`."""
    answer = _TABLE.answer_to(error, dialect_of(path))
    if isinstance(error, RateLimited):
        answer[1].append((b"retry-after-ms", b"%d" % max(1, round(1000 * error.retry_after_s))))
        answer[1].extend(limits_shown(error.rules, error.left, dialect_of(path)))
    if isinstance(error, RepeatedFailure):
        answer[1].append((b"x-should-retry", b"false"))  # clients of OpenAI and Anthropic heed it
    return answer


def unserved(
    answer: tuple[int, Headers, bytes],
) -> tuple[int, Headers, bytes]:
    """Returns the answer for those who may send the request to another fleet."""
    status, headers, body = answer
    return 425, [*headers, (b"x-status", b"%d" % status)], body


def is_unserved(error: Exception, *, has_failures: bool) -> bool:
    """Whether no worker has had a request that ended by `error`. has_failures: of workers."""
    return isinstance(error, Unreached) or (isinstance(error, _UNSERVED) and not has_failures)


def event_of(error: Exception, path: str) -> bytes:
    """Returns the event that ends a stream for which `error` came too late to be its answer."""
    return event_with(_TABLE.body(error, dialect_of(path)), path)


def event_with(body: bytes, path: str) -> bytes:
    """Returns an event with the body of an error's answer. As engines do, it says [DONE] behind the
    error where a whole stream ends so: some clients wait for that."""
    dialect = dialect_of(path)
    if PATHS.get(path) is Api.RESPONSES:
        inner = orjson.loads(body)["error"]
        failed = {"type": "error", "code": inner["code"], "message": inner["message"]}
        return b"event: error\ndata: " + orjson.dumps(failed) + b"\n\n"
    name = b"event: error\n" if dialect is Dialect.ANTHROPIC else b""
    event = name + b"data: " + body + b"\n\n"
    return event + DONE if PATHS.get(path) in _SAY_DONE else event


def refusal_of(error: ValidationError | RequestValidationError) -> InvalidRequest:
    """Returns the error of a bad body or query: the first bad field and its value, unless there are
    many."""
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        place = first["loc"][1:]  # behind the word `query` or `path`
    else:
        count = error.error_count()
        if count > MAX_ERRORS:
            return InvalidRequest("body", f"{count:,} fields are unknown or wrong")
        first = error.errors(include_url=False, include_context=False)[0]
        place = first["loc"]
    field = cut(".".join(map(str, place))) or "body"
    return InvalidRequest(field, f"{first['msg']}, got {shown(first['input'])}")


def limits_shown(rules: KeyRules, left: Mapping[str, int], dialect: Dialect) -> Headers:
    """Returns the headers as the clients of that dialect read them. left: of requests and tokens;
    -1: not known."""
    return [
        (header.encode(), value.encode())
        for name in ("requests", "tokens")
        if (rate := getattr(rules, name)) is not None and left.get(name, -1) >= 0
        for header, value in _of(name, rate, left[name], dialect)
    ]


def _of(name: str, rate: Rate, left: int, dialect: Dialect) -> Iterator[tuple[str, str]]:
    full_s = max(0.0, rate.burst - left) / rate.per_s
    if dialect is Dialect.ANTHROPIC:
        begin, limit, remaining, reset = (
            f"anthropic-ratelimit-{name}-",
            "limit",
            "remaining",
            "reset",
        )
        at = datetime.now(UTC) + timedelta(seconds=full_s)
        when = at.isoformat(timespec="seconds").replace("+00:00", "Z")
    else:
        begin, when = "x-ratelimit-", f"{full_s:.3f}s"
        limit, remaining, reset = (f"{word}-{name}" for word in ("limit", "remaining", "reset"))
    yield begin + limit, str(rate.amount)
    yield begin + remaining, str(left)
    yield begin + reset, when


_TAKES_NO_KEY = f"{TAKES_NO_KEY}: see --worker-key, or --engine-api-key of `kvroute up`"
_WORKER_ERRORS = {
    401: _TAKES_NO_KEY,
    403: _TAKES_NO_KEY,
    404: "no longer has the model that it announced",
    407: _TAKES_NO_KEY,
}
MAX_MESSAGE = 2000
"""Characters. Engines may repeat the whole request."""
_TOO_LONG = re.compile(r"(?i)maximum context length|context_length_exceeded|prompt_too_large")


def told(status: int, body: bytes, path: str, worker: WorkerInfo) -> tuple[int, bytes]:
    """Returns status and body of the answer, where an engine has answered with an error.

    For a path that the engine lacks the status is 400: by a 404, balancers of clients take it that
    there is nothing at all. A client has no part in the key that a router has, nor in what a worker
    has announced.
    """
    cause = cause_in(body)
    if is_path_missing(status, body):
        engine = worker.engine or "an unknown engine"
        message = f"The model's engine ({engine}, worker {worker.key}) has no {path}."
        status, cause = 400, Cause(message, code="path_not_supported")
    elif (of_worker := _WORKER_ERRORS.get(status)) is not None:
        status, cause = 502, Cause(f"Worker {worker.key} {of_worker}.", code="worker_failed")
    elif cause is None:
        text = body.decode(errors="replace").strip()
        # What stands before an engine answers with pages.
        is_told = text and not text.startswith("<")
        cause = Cause(text if is_told else f"the engine answered {status}")
    if status == 422:
        status = 400
    code = cause.code
    if _TOO_LONG.search(f"{code} {cause.message}"):
        code = "context_length_exceeded"
    meaning = Meaning(status, code, kind_of(status))
    return status, body_of(meaning, cause.message[:MAX_MESSAGE], cause.field, dialect_of(path))
