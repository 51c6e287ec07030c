"""Answers to errors: a table of each server's own, in three dialects."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum, auto
from typing import NamedTuple

import orjson
from starlette.exceptions import HTTPException

from app.core.errors import (
    BodiesTooLarge,
    BodyTimeout,
    BodyTooLarge,
    EncodingUnknown,
    InvalidRequest,
    NotAllowed,
    PromptTooLarge,
    Unauthorized,
    printable,
)
from app.http.body import error_body

Headers = list[tuple[bytes, bytes]]

INVALID, OVERLOADED, FAULT = "invalid_request_error", "overloaded_error", "api_error"
RETRIED = (429, 503)
"""Statuses whose answers say when to come again."""
MAX_RETRY_AFTER_S = 60

TAKES_NO_KEY = "does not take this router's key"


class Meaning(NamedTuple):
    """Answer to an error. code: stable, part of the interface; "": an engine's error has none.
    kind: OpenAI's `type`, from which Anthropic's follows."""

    status: int
    code: str
    kind: str


class Dialect(Enum):
    """Shapes of errors, by the clients that they are for."""

    OURS = auto()
    OPENAI = auto()
    ANTHROPIC = auto()


OF_ALL_SERVERS: Mapping[type[Exception], Meaning] = {
    InvalidRequest: Meaning(422, "invalid_request", INVALID),
    NotAllowed: Meaning(403, "not_allowed", "permission_error"),
    PromptTooLarge: Meaning(422, "prompt_too_large", INVALID),
    Unauthorized: Meaning(401, "invalid_api_key", "authentication_error"),
    BodyTimeout: Meaning(408, "body_timeout", INVALID),
    EncodingUnknown: Meaning(415, "encoding_unknown", INVALID),
    BodyTooLarge: Meaning(413, "body_too_large", INVALID),
    BodiesTooLarge: Meaning(503, "bodies_too_large", OVERLOADED),
}
INTERNAL = Meaning(500, "internal", FAULT)
OF_THE_FRAMEWORK = {403: "forbidden", 404: "not_found", 405: "method_not_allowed"}
OF_OPENAI = {"invalid_request": None, "prompt_too_large": "context_length_exceeded"}
"""Codes that clients of the OpenAI API know under another name."""
_ANTHROPIC_KINDS = {404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}


class ErrorTable:
    """Answers to a server's errors. errors: kind -> Meaning. server: whose log has more of an
    unforeseen error. lasting: kinds after which it is no use to come again."""

    def __init__(
        self,
        errors: Mapping[type[Exception], Meaning],
        server: str,
        lasting: tuple[type[Exception], ...] = (),
    ) -> None:
        self._errors = errors
        self._server = server
        self._lasting = lasting

    def meaning_of(self, error: Exception) -> Meaning:
        for kind in type(error).__mro__:
            if kind in self._errors:
                return self._errors[kind]
        if isinstance(error, HTTPException):
            code = OF_THE_FRAMEWORK.get(error.status_code, "http_error")
            return Meaning(error.status_code, code, INVALID)
        return INTERNAL

    def message_of(self, error: Exception) -> str:
        if self.meaning_of(error).status == 500:
            return f"{type(error).__name__}; see the {self._server}'s log"
        # Whatever of a request it repeats: it may be shown on a terminal.
        return printable(str(error.detail if isinstance(error, HTTPException) else error))

    def body(self, error: Exception, dialect: Dialect) -> bytes:
        field = getattr(error, "field", None)
        return body_of(self.meaning_of(error), self.message_of(error), field, dialect)

    def answer_to(self, error: Exception, dialect: Dialect) -> tuple[int, Headers, bytes]:
        status, _, _ = self.meaning_of(error)
        headers = []
        if status in RETRIED and not isinstance(error, self._lasting):
            seconds = math.ceil(getattr(error, "retry_after_s", 1.0))
            headers.append((b"retry-after", b"%d" % max(1, min(seconds, MAX_RETRY_AFTER_S))))
        if status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if isinstance(error, BodyTimeout | BodiesTooLarge):
            # Its rest is not waited for.
            headers.append((b"connection", b"close"))
        if isinstance(error, HTTPException):
            given = (error.headers or {}).items()
            headers += [(name.lower().encode(), value.encode()) for name, value in given]
        if status == 422 and dialect is not Dialect.OURS:
            status = 400
        return status, headers, self.body(error, dialect)


def kind_of(status: int) -> str:
    if status in RETRIED:
        return OVERLOADED
    return INVALID if status < 500 else FAULT


def body_of(meaning: Meaning, message: str, field: str | None, dialect: Dialect) -> bytes:
    status, code, kind = meaning
    if dialect is Dialect.OURS:
        return orjson.dumps(error_body(code or kind, message, field))
    if dialect is Dialect.ANTHROPIC:
        kind = _ANTHROPIC_KINDS.get(status, kind)
        return orjson.dumps({"type": "error", "error": {"type": kind, "message": message}})
    code_there = OF_OPENAI.get(code, code) or None
    return orjson.dumps(
        {"error": {"message": message, "type": kind, "param": field, "code": code_there}}
    )
