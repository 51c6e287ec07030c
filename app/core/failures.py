"""What workers' failures have come to, as all routers share it: one circuit a worker."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum

from app.core.types import Incarnation

DRAINING = -1
TAINTED = "tainted"
"""The cause why a worker gets no requests whose engine may hold KV of one prompt as another's."""
SHARE_FADES_MS = 4000
"""By a factor of e, as in lua/lib/failures.lua."""
SHARE_COUNTS = 0.1
"""A smaller share of failed tries says nothing of a worker."""
SOON_S = 5.0
"""Longest pause of a worker that fails at once: its next trial costs hardly any time, and once it
is well again, it is not to be left out for long."""
LATE_S = 60.0
"""Of one that is waited for."""
RENEWED_MS = 2500
"""So long after its failure, or its pause, a worker has renewed its lease, or is gone."""
CAUSE = r"\w+"
ENTRY = re.compile(rf"(\d+) (\d+) (\d+) (\d+) (\d+) ([01]) ({CAUSE})", re.ASCII)


class Whose(StrEnum):
    """Which of the two workers that a request may have is at fault."""

    WORKER = "worker"
    SOURCE = "source"
    EITHER = "either"


@dataclass(frozen=True, slots=True)
class Failure:
    """How a worker has failed a request.

    cause: of letters, digits and _. whose: the source of the worker's KV, if it has one, may be at
    fault just as well, or is. weight: of the failure, from 0 to 1; 0: it is none, the worker only
    takes no more for now. in_a_row: how many failures in a row suspend the worker; 0: this one does
    not. most_s: longest pause. pause_s: at least so long, as the worker asks for. subject: the
    model or path that the worker lacks: it is left alone for that, and for nothing else; "": for
    all.
    """

    cause: str
    whose: Whose = Whose.EITHER
    weight: float = 0.3
    in_a_row: int = 1
    most_s: float = LATE_S
    pause_s: float = 0.0
    subject: str = ""


REPORTED = Failure("reported")
"""By a client that carries its requests itself."""


@dataclass(frozen=True, slots=True)
class Failing:
    """failures: in a row. until_ms: before that the worker gets no requests, as long as there is
    another one; DRAINING: it gets none at all, until that is undone or, if it is tainted, its
    engine has begun anew. share: of its tries lately that failed, as of at_ms. is_on_trial: it gets
    one request at a time until it answers one. cause: of the last failure."""

    failures: int
    until_ms: int
    share: float = 0.0
    at_ms: int = 0
    is_on_trial: bool = False
    cause: str = ""

    @property
    def drains(self) -> bool:
        return self.until_ms == DRAINING and self.cause != TAINTED

    @property
    def is_tainted(self) -> bool:
        return self.until_ms == DRAINING and self.cause == TAINTED

    def is_out(self, now_ms: int) -> bool:
        """Whether a lease that has lapsed was cut off for this, and the worker is not gone."""
        return self.until_ms == DRAINING or now_ms < max(self.until_ms, self.at_ms) + RENEWED_MS

    def pause_s(self, now_ms: int) -> float:
        """Seconds left of the pause."""
        return max(0, self.until_ms - now_ms) / 1000

    def share_at(self, now_ms: int) -> float:
        """The share by now, from 0 to 1; 0 if it is too small to say anything."""
        share = self.share * math.exp(min(0, self.at_ms - now_ms) / SHARE_FADES_MS)
        return share if share >= SHARE_COUNTS else 0.0


NOT_FAILING = Failing(0, 0)
IS_TAINTED = Failing(0, DRAINING, cause=TAINTED)


class FailingByWorker(dict[Incarnation, Failing]):
    """Of all others, `[...]` says NOT_FAILING: one may be out of service without having failed."""

    def __missing__(self, _: Incarnation) -> Failing:
        return NOT_FAILING


AWAY = b"away:"
"""What the name begins with under which Redis keeps since when a worker's agent is away."""
_AWAY = re.compile(rb"(\d{1,15}) (\d{1,15})")


def parse_away(text: bytes, now_ms: int) -> int | None:
    """Since when an agent is away, ms, by the Redis clock; None: it is not, or not any more."""
    match = _AWAY.fullmatch(text)
    return int(match[1]) if match and int(match[2]) > now_ms else None


def parse_failing(text: bytes) -> Failing | None:
    """What is kept in Redis; None: it cannot be read."""
    if text.startswith(b"draining"):
        return Failing(0, DRAINING)
    if text == TAINTED.encode():
        return IS_TAINTED
    match = ENTRY.fullmatch(text.decode(errors="replace"))
    if match is None:
        return None
    count, _, until_ms, share, at_ms, trial = map(int, match.groups()[:6])
    return Failing(count, until_ms, min(share, 1000) / 1000, at_ms, bool(trial), match[7])
