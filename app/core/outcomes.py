"""How requests end: each outcome that metrics and logs have, and what kind of ending it is. Pure.

Outcomes that are not named here are codes of errors: the router refused the request.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What people ask of an ending."""

    OK = "ok"
    ENGINE = "engine"
    CUT = "cut"
    LEFT_BEFORE = "left_before"
    LEFT_AFTER = "left_after"
    UNFIT = "unfit"
    REFUSED = "refused"


KINDS = {
    Kind.OK: "answered to the end",
    Kind.ENGINE: "engines failed it: with an error, silence, or no connection",
    Kind.CUT: "its answer broke off",
    Kind.LEFT_BEFORE: "the client left before its first token",
    Kind.LEFT_AFTER: "the client left after its first token",
    Kind.UNFIT: "an engine refused it as the request's own fault",
    Kind.REFUSED: "the router refused it",
}
OK = "ok"
UNFIT = "refused"
ENGINE_ERROR = "engine_error"
ENGINE_FULL = "engine_full"
ERROR_EVENT = "error_event"
CUT = "cut"
LEFT_BEFORE, LEFT_AFTER = "left_before_token", "left_after_token"
NO_KEY = "invalid_api_key"
GONE = "client_gone"
"""One of these two, before it is known which."""
WORKER_FAILED = "worker_failed"
_NO_ANSWER = (WORKER_FAILED, "repeated_failure", "answer_timeout")
_KINDS = {
    OK: Kind.OK,
    UNFIT: Kind.UNFIT,
    ENGINE_ERROR: Kind.ENGINE,
    ENGINE_FULL: Kind.ENGINE,
    **dict.fromkeys(_NO_ANSWER, Kind.ENGINE),
    ERROR_EVENT: Kind.ENGINE,
    CUT: Kind.CUT,
    LEFT_BEFORE: Kind.LEFT_BEFORE,
    LEFT_AFTER: Kind.LEFT_AFTER,
}


ANSWERED = (Kind.OK, Kind.LEFT_AFTER, Kind.UNFIT)
"""Of requests with which a worker did not fail in the end."""
NEVER_CAME = (Kind.ENGINE, Kind.LEFT_BEFORE)
"""Of requests that were let in, and never got a token."""


def matching(*kinds: Kind) -> str:
    """The outcomes of these kinds, which are not REFUSED, as a pattern for Prometheus."""
    return "|".join(outcome for outcome, kind in _KINDS.items() if kind in kinds)


def kind_of(outcome: str) -> Kind:
    return _KINDS.get(outcome, Kind.REFUSED)


def told_apart(outcome: str, *, has_begun: bool, has_token: bool) -> str:
    """What a request ended by, by how far its answer was. has_begun: a worker's answer, for the
    client. has_token: the client has got one."""
    if outcome == GONE:
        return LEFT_AFTER if has_token else LEFT_BEFORE
    return CUT if has_begun and outcome in _NO_ANSWER else outcome


def of_refusal(status: int, *, is_failure: bool, is_full: bool) -> str:
    """Of a request whose answer is an engine's error. status: that the engine answered with.
    is_failure: of the engine. is_full: it only takes no more for now."""
    if is_full:
        return ENGINE_FULL
    return ENGINE_ERROR if is_failure or status >= 500 else UNFIT


@dataclass(slots=True)
class Ending:
    """What came of a request. Raises ValueError for numbers that no answer has.

    output_tokens: at least 1. ttft_ms: from the request to its first token; None: unknown.
    ended_ms: by the Redis clock; 0: unknown.
    """

    output_tokens: int
    ttft_ms: int | None = None
    ended_ms: int = 0

    def __post_init__(self) -> None:
        if self.output_tokens < 1 or (self.ttft_ms or 0) < 0:
            raise ValueError(f"{self}")
