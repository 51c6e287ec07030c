"""Failures of workers: how much each counts, and for whom."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum

from app.core.verdicts import FAILED

SOON_S = 5.0
"""Longest pause, seconds, of a worker that fails at once: its next trial costs hardly any time."""
LATE_S = 60.0
"""Longest pause, seconds, of a worker whose failures have to be waited for."""


class Suspects(StrEnum):
    """Workers that may be at fault: the request's own, or its source as well."""

    WORKER = "worker"
    EITHER = "either"


class Counts(IntEnum):
    """Callers for whom a failure counts."""

    CALLER = 0
    """Only the caller that saw the failure."""
    WITNESSED = 1
    """Any caller, once there are two witnesses: another caller that saw failures of the worker, or
    another worker that answers the request."""
    ALL = 2


@dataclass(frozen=True, slots=True)
class Failure:
    """A worker's failure of a request.

    cause: letters, digits and _. whose: whether the source of the worker's KV, if any, may be at
    fault just as well. weight: 0 to 1; 0: no failure, the worker is only full for now. in_a_row:
    failures in a row that suspend the worker; 0: this one never does. most_s: longest pause.
    pause_s: shortest pause, as the worker asks. mark: FAILED, or the model or path that the worker
    lacks, for which alone it is then avoided.
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
