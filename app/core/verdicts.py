"""Record of what speaks against a worker, for how long, and who says so, as Redis keeps it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Any

import orjson

from app.core.types import Incarnation

LATE = "late"
"""Mark of a worker whose first tokens come later than predicted."""
LATE_FADES_MS = 7000
"""Time in which lateness fades by a factor of e, as in lua/lib/late.lua."""
LATE_COUNTS_S = 0.2
LATE_TOLD_MS = 60_000
FAILED = "failed"
"""Mark of failures that count for all callers."""
LACKS, CALLER = "lacks ", "caller "
SHARE_FADES_MS = 4000
"""Time in which a share of failures fades by a factor of e, as in lua/lib/verdict.lua."""
SHARE_COUNTS = 0.1
"""Least share of failed tries that says anything of a worker."""
RENEWED_MS = 2500
"""Time after its failure, or its pause, by which a worker has renewed its lease, or is gone."""


class State(StrEnum):
    """A worker's state for requests, under the name that all output uses."""

    SERVING = "serving"
    AWAY = "away"  # and serves: its agent is not heard of, its engine answers
    TRIAL = "trial"  # after a pause it gets one request at a time, until it answers one
    PAUSED = "paused"  # it failed requests
    LAPSED = "lapsed"  # nothing is heard of it
    ILL = "ill"  # as its agent says of the engine
    DRAINING = "draining"
    TAINTED = "tainted"  # it may hold KV of one prompt as another's
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Conclusion from a worker's marks. until_ms: 0: not known. cause: "": none. witnesses: callers
    that saw failures of the worker."""

    state: State
    since_ms: int = 0
    until_ms: int = 0
    cause: str = ""
    witnesses: Sequence[str] = ()

    def told(self, now_ms: int) -> dict[str, Any]:
        """Returns the verdict for output: times in seconds from now; None is not known."""
        return {
            "state": self.state,
            "since_s": max(0, now_ms - self.since_ms) / 1000 if self.since_ms else None,
            "until_s": max(0, self.until_ms - now_ms) / 1000 if self.until_ms else None,
            "cause": self.cause or None,
            "witnesses": self.witnesses,
        }


SERVING = Verdict(State.SERVING)


@dataclass(frozen=True, slots=True)
class Mark:
    """One thing that speaks against a worker; times by the Redis clock. count, last_ms: failures in
    a row, and the time of the last. share: failed tries lately, in thousandths, as of at_ms. life:
    the engine's. late_ms: how much later than predicted first tokens come, as of at_ms."""

    since_ms: int = 0
    until_ms: int = 0
    cause: str = ""
    witnesses: Sequence[str] = field(default_factory=list)
    count: int = 0
    last_ms: int = 0
    share: int = 0
    at_ms: int = 0
    life: str = ""
    late_ms: int = 0

    def share_at(self, now_ms: int) -> float:
        """Returns the share of failed tries by now, 0 to 1; 0 if it is too small to say
        anything."""
        share = self.share / 1000 * math.exp(min(0, self.at_ms - now_ms) / SHARE_FADES_MS)
        return share if share >= SHARE_COUNTS else 0.0

    def late_s(self, now_ms: int) -> float:
        """Returns how late first tokens come, in seconds, fading so that the worker is tried again;
        0 once that is too little to say anything."""
        late_s = self.late_ms / 1000 * math.exp(min(0, self.at_ms - now_ms) / LATE_FADES_MS)
        return late_s if late_s >= LATE_COUNTS_S else 0.0


NO_MARK = Mark()
_TYPES = {name: type(value) for name, value in asdict(NO_MARK).items()}


class Marks(dict[str, Mark]):
    """Marks of a worker, by name: `tainted`, `draining`, `ill`, `away`, FAILED, and LACKS and
    CALLER with the model, path or caller for which the worker is avoided."""

    @property
    def failed(self) -> Mark:
        return self.get(FAILED, NO_MARK)

    @property
    def is_on_trial(self) -> bool:
        """Whether a worker that has a lease is on trial."""
        return self.failed.until_ms > 0

    @property
    def is_out(self) -> bool:
        """Whether the worker gets no requests, however few others are left."""
        return "tainted" in self or "draining" in self

    def first_tokens_late_s(self, now_ms: int) -> float | None:
        """Returns how much later than predicted first tokens came within a minute; None if in
        time."""
        late = self.get(LATE)
        if late is None or now_ms - late.at_ms >= LATE_TOLD_MS:
            return None
        return late.late_ms / 1000

    def away_ms(self, now_ms: int) -> int | None:
        """Returns since when the agent is away; None if it is not."""
        away = self.get("away", NO_MARK)
        return away.since_ms if away.until_ms > now_ms else None

    def verdict(self, now_ms: int, *, has_lease: bool) -> Verdict:
        renewed_ms = max(self.failed.until_ms, self.failed.at_ms) + RENEWED_MS
        reasons = (
            (State.TAINTED, "tainted", True),
            (State.DRAINING, "draining", True),
            (State.ILL, "ill", not has_lease),
            (State.PAUSED, FAILED, not has_lease and now_ms < renewed_ms),
            (State.TRIAL, FAILED, has_lease and self.is_on_trial),
            (State.AWAY, "away", has_lease and self.away_ms(now_ms) is not None),
        )
        for state, name, holds in reasons:
            if holds and name in self:
                why = self[name]
                until_ms = 0 if state is State.TRIAL else why.until_ms
                return Verdict(state, why.since_ms, until_ms, why.cause, why.witnesses)
        if not has_lease:
            return Verdict(State.LAPSED)
        callers = [name[len(CALLER) :] for name in self if name.startswith(CALLER)]
        last = max(self.values(), key=lambda mark: mark.last_ms, default=NO_MARK)
        return Verdict(State.SERVING, cause=last.cause, witnesses=last.witnesses or callers)


NO_MARKS = Marks()


class MarksByWorker(dict[Incarnation, Marks]):
    """Incarnation -> marks; NO_MARKS for all others."""

    def __missing__(self, _: Incarnation) -> Marks:
        return NO_MARKS


@lru_cache(maxsize=4096)
def parse_marks(text: bytes) -> Marks:
    """Returns the marks in a field of `verdicts`, without those that cannot be read."""

    def is_mark(mark: object) -> bool:
        return isinstance(mark, dict) and all(type(v) is _TYPES.get(n) for n, v in mark.items())

    try:
        told = orjson.loads(text).items()
    except (ValueError, AttributeError):
        return NO_MARKS
    return Marks({name: Mark(**mark) for name, mark in told if is_mark(mark)})


def is_readable(text: bytes) -> bool:
    """Whether there are marks, and all of them can be read."""
    marks = parse_marks(text)
    return bool(marks) and len(marks) == len(orjson.loads(text))
