"""Exceptions -> HTTP responses, all in the shape of schemas.ErrorBody."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from app.core.errors import (
    AllWorkersBusy,
    BodyTimeout,
    BodyTooLarge,
    CallerGone,
    InvalidRequest,
    KvrouteError,
    NamespaceMissing,
    NoWorkers,
    PromptTooLarge,
    RedisUnavailable,
    RouterOverloaded,
    Superseded,
    WrongVersion,
    cut,
    shown,
)
from app.http.body import CLOSE, error_body, http_error, json_response

log = logging.getLogger(__name__)

_RETRY = {"Retry-After": "1"}

ANSWERS: dict[type[KvrouteError], tuple[int, str, Mapping[str, str]]] = {
    InvalidRequest: (422, "invalid_request", {}),
    BodyTooLarge: (413, "body_too_large", {}),
    BodyTimeout: (408, "body_timeout", CLOSE),
    CallerGone: (499, "caller_gone", {}),
    Superseded: (409, "superseded", {}),
    PromptTooLarge: (422, "prompt_too_large", {}),
    AllWorkersBusy: (429, "all_workers_busy", _RETRY),
    RouterOverloaded: (429, "router_overloaded", _RETRY),
    NoWorkers: (503, "no_workers", _RETRY),
    NamespaceMissing: (503, "no_workers", _RETRY),
    WrongVersion: (503, "wrong_version", _RETRY),
    RedisUnavailable: (503, "redis_unavailable", _RETRY),
}
"""Status, code (stable, part of the interface) and headers."""
INVALID = (408, 413, 422)
"""Statuses that count as invalid requests."""
MAX_RETRY_AFTER_S = 60
MAX_ERRORS = 100
"""Only a body with so many unknown fields has more. pydantic lists all of them or none, and a
million would take seconds, in which no request is answered."""


def install(app: FastAPI) -> None:
    """Make `app` answer every error in that shape.

    A ValidationError is none of the caller's here: only decisions have bodies, see `answer`. For a
    bad query, FastAPI raises RequestValidationError.
    """
    app.add_exception_handler(KvrouteError, _kvroute_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, _query_error)
    app.add_exception_handler(Exception, _fault)


async def answer(request: Request, error: Exception) -> Response:
    """The answer to what the endpoint of a decision raised."""
    if isinstance(error, KvrouteError):
        return await _kvroute_error(request, error)
    if isinstance(error, ValidationError):
        _count(request, "invalid_request")
        return _validation_error(error)
    log.error("%s failed", request.url.path, exc_info=error)
    return await _fault(request, error)


async def _kvroute_error(request: Request, error: Exception) -> Response:
    known = (ANSWERS[kind] for kind in type(error).__mro__ if kind in ANSWERS)
    status, code, headers = next(known, (500, "internal", {}))
    field = error.field if isinstance(error, InvalidRequest) else None
    if isinstance(error, AllWorkersBusy):
        headers = {"Retry-After": str(_retry_after_s(error.retry_after_s))}
    if status in INVALID:
        _count(request, code)
    return json_response(error_body(code, str(error), field), status, headers)


def _retry_after_s(seconds: float) -> int:
    """Whole seconds, as the header requires."""
    return max(1, min(math.ceil(seconds), MAX_RETRY_AFTER_S))


def _count(request: Request, code: str) -> None:
    request.app.state.router.telemetry.refusals.labels(code).inc()


def _validation_error(error: ValidationError) -> Response:
    """Names the first bad field and its value, unless there are many."""
    count = error.error_count()
    if count > MAX_ERRORS:
        message = f"body: {count:,} fields are unknown or wrong"
        return json_response(error_body("invalid_request", message, "body"), 422)
    first = error.errors(include_url=False, include_context=False)[0]
    return _invalid(cut(".".join(map(str, first["loc"]))) or "body", first)


async def _query_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    _count(request, "invalid_request")
    first = error.errors()[0]
    return _invalid(str(first["loc"][-1]), first)


def _invalid(field: str, details: Mapping[str, Any]) -> Response:
    message = f"{field}: {details['msg']}, got {shown(details['input'])}"
    return json_response(error_body("invalid_request", message, field), 422)


async def _fault(_: Request, error: Exception) -> Response:
    """Answers any unforeseen error; the server logs it."""
    return json_response(
        error_body("internal", f"{type(error).__name__}; see the router's log"), 500
    )
