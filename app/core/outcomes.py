"""Endings of requests: each outcome that metrics and logs have, and its kind.

Outcomes that are not named here are codes of errors: the router refused the request.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """Kinds of endings."""

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
"""The client left: LEFT_BEFORE or LEFT_AFTER, before it is known which."""
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
"""Kinds of requests that their worker did not fail in the end."""
NEVER_CAME = (Kind.ENGINE, Kind.LEFT_BEFORE)
"""Kinds of requests that were let in, and never got a token."""


def matching(*kinds: Kind) -> str:
    """Returns a Prometheus pattern of the outcomes of these kinds, which must not be REFUSED."""
    return "|".join(outcome for outcome, kind in _KINDS.items() if kind in kinds)


def kind_of(outcome: str) -> Kind:
    return _KINDS.get(outcome, Kind.REFUSED)


def told_apart(outcome: str, *, has_begun: bool, has_token: bool) -> str:
    """Returns the outcome that counts, by how far the answer was. has_begun: the client has got
    some of a worker's answer. has_token: the client has got a token."""
    if outcome == GONE:
        return LEFT_AFTER if has_token else LEFT_BEFORE
    return CUT if has_begun and outcome in _NO_ANSWER else outcome


def of_refusal(status: int, *, is_failure: bool, is_full: bool) -> str:
    """Returns the outcome of a request that an engine answers with an error. status: the engine's.
    is_failure: whether the engine is at fault. is_full: whether the engine is only full for now."""
    if is_full:
        return ENGINE_FULL
    return ENGINE_ERROR if is_failure or status >= 500 else UNFIT


@dataclass(slots=True)
class Ending:
    """Figures of a request that ended. Raises ValueError for numbers that no answer has.
    output_tokens: at least 1. ttft_ms: from the request to its first token; None: unknown.
    ended_ms: by the Redis clock; 0: unknown."""

    output_tokens: int
    ttft_ms: int | None = None
    ended_ms: int = 0

    def __post_init__(self) -> None:
        if self.output_tokens < 1 or (self.ttft_ms or 0) < 0:
            raise ValueError(f"{self}")
