"""How a worker fails a request."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum

from app.core.verdicts import FAILED

SOON_S = 5.0
"""Longest pause of a worker that fails at once: its next trial costs hardly any time, and once it
is well again, it is not to be left out for long."""
LATE_S = 60.0
"""Of one that is waited for."""


class Suspects(StrEnum):
    """Whether of the two workers that a request may have its source may be at fault as well."""

    WORKER = "worker"
    EITHER = "either"


class Counts(IntEnum):
    """For whom a failure counts."""

    CALLER = 0
    """For the caller of the request, who alone has seen it, or whom alone it concerns."""
    WITNESSED = 1
    """For all once there are two witnesses: another caller that saw failures there, or another
    worker that answers the request."""
    ALL = 2


@dataclass(frozen=True, slots=True)
class Failure:
    """How a worker has failed a request.

    cause: of letters, digits and _. whose: the source of the worker's KV, if it has one, may be at
    fault just as well. weight: of the failure, from 0 to 1; 0: it is none, the worker only
    takes no more for now. in_a_row: how many failures in a row suspend the worker; 0: this one does
    not. most_s: longest pause. pause_s: at least so long, as the worker asks for. mark: FAILED, or
    the model or path that the worker lacks: it is left alone for that, and for nothing else.
    """

    cause: str
    whose: Suspects = Suspects.EITHER
    weight: float = 0.3
    in_a_row: int = 1
    most_s: float = LATE_S
    pause_s: float = 0.0
    mark: str = FAILED
    counts: Counts = Counts.WITNESSED


REPORTED = Failure("reported", weight=0.0, counts=Counts.CALLER)
"""By a client that carries its requests itself."""
