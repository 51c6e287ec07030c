"""Errors in the shape that the clients of each API expect."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

import orjson

from app.core.errors import (
    AllWorkersBusy,
    BodyTimeout,
    BodyTooLarge,
    CallerGone,
    InvalidRequest,
    NamespaceMissing,
    NoWorkers,
    PromptTooLarge,
    RedisUnavailable,
    RouterOverloaded,
    Superseded,
    WrongVersion,
)
from app.door.asked import Api
from app.door.errors import (
    ContextTooLong,
    ModelUnavailable,
    RepeatedFailure,
    Unauthorized,
    UnknownModel,
    WorkerFailed,
)

log = logging.getLogger(__name__)

MAX_RETRY_AFTER_S = 60
_INVALID, _OVERLOADED = "invalid_request_error", "overloaded_error"

ERRORS: Mapping[type[Exception], tuple[int, str, str | None]] = {
    ContextTooLong: (400, _INVALID, "context_length_exceeded"),
    InvalidRequest: (400, _INVALID, None),
    PromptTooLarge: (400, _INVALID, "context_length_exceeded"),
    Unauthorized: (401, "authentication_error", "invalid_api_key"),
    UnknownModel: (404, _INVALID, "model_not_found"),
    BodyTimeout: (408, _INVALID, "body_timeout"),
    Superseded: (409, _INVALID, "superseded"),
    BodyTooLarge: (413, _INVALID, "body_too_large"),
    AllWorkersBusy: (429, _OVERLOADED, "all_workers_busy"),
    RouterOverloaded: (429, _OVERLOADED, "router_overloaded"),
    CallerGone: (499, _INVALID, "caller_gone"),
    RepeatedFailure: (502, "api_error", "repeated_failure"),
    WorkerFailed: (502, "api_error", "worker_failed"),
    ModelUnavailable: (503, _OVERLOADED, "no_workers"),
    NoWorkers: (503, _OVERLOADED, "no_workers"),
    NamespaceMissing: (503, _OVERLOADED, "no_workers"),
    WrongVersion: (503, "api_error", "wrong_version"),
    RedisUnavailable: (503, "api_error", "redis_unavailable"),
}
"""Status, type and code."""
_RETRIED = (429, 503)


def code_of(error: Exception) -> str:
    """A stable word for what `error` is."""
    _, kind, code = _known(error)
    return code or kind


def status_of(error: Exception) -> int:
    return _known(error)[0]


def headers_of(error: Exception) -> list[tuple[bytes, bytes]]:
    """The headers that belong to the answer to `error`."""
    headers = []
    status = status_of(error)
    if status in _RETRIED:
        seconds = error.retry_after_s if isinstance(error, AllWorkersBusy) else 1.0
        seconds = max(1, min(math.ceil(seconds), MAX_RETRY_AFTER_S))
        headers.append((b"retry-after", b"%d" % seconds))
    if isinstance(error, RepeatedFailure):
        headers.append((b"x-should-retry", b"false"))  # the clients of OpenAI and Anthropic heed it
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, BodyTimeout):
        headers.append((b"connection", b"close"))
    return headers


def body_of(error: Exception, api: Api = Api.CHAT) -> bytes:
    """The answer to `error`, as clients of `api` expect it."""
    status, kind, code = _known(error)
    message = "Internal error; see the router's log." if status == 500 else str(error)
    if api is Api.MESSAGES:
        kinds = {404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}
        kind = kinds.get(status, kind)
        return orjson.dumps({"type": "error", "error": {"type": kind, "message": message}})
    param = error.field if isinstance(error, InvalidRequest) else None
    if isinstance(error, UnknownModel):
        param = "model"
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}})


def event_of(error: Exception, api: Api) -> bytes:
    """The event that ends a stream for which `error` came too late to be its answer."""
    body = body_of(error, api)
    if api is Api.MESSAGES:
        return b"event: error\ndata: " + body + b"\n\n"
    if api is Api.RESPONSES:
        inner = orjson.loads(body)["error"]
        failed = {"type": "error", "code": inner["code"], "message": inner["message"]}
        return b"event: error\ndata: " + orjson.dumps(failed) + b"\n\n"
    return b"data: " + body + b"\n\n"


def _known(error: Exception) -> tuple[int, str, str | None]:
    for kind in type(error).__mro__:
        if kind in ERRORS:
            return ERRORS[kind]
    return 500, "api_error", "internal"
