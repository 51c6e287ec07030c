"""Whether a source still keeps what waits to be fetched, by what its engine counts. Pure.

When a lease ends is known to that engine alone: it begins somewhere between the source's request
and its answer, and a target that waits prolongs it. But the engine counts the leases that have
ended, and the targets that let it know of a fetch too late. It counts in steps, and makes none
while it is idle; nor does it overwrite anything then.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto
from typing import NamedTuple

from app.core.worker_report import WorkerInfo, process_of

MARGIN_MS = 1000
"""A reading may seem younger by so much: it takes no longer from an agent to Redis."""
STALE_MS = 5000
"""Older readings say nothing of now."""


class LeaseBooks(NamedTuple):
    """What a source's engine has counted. life: of the engine. ended: leases that ended before all
    was fetched. late: fetches that it heard of after that. steps: that it has made. read_ms: when
    that was read, by the Redis clock."""

    life: str
    ended: int
    late: int
    steps: int
    read_ms: float

    def is_of(self, by_ms: float) -> bool:
        """Whether all that was counted by then is in it."""
        return self.read_ms - MARGIN_MS >= by_ms

    def same_leases(self, other: LeaseBooks) -> bool:
        """Whether no lease has ended between the two, and nothing was fetched late."""
        return (self.ended, self.late) == (other.ended, other.late)


class Transfers(NamedTuple):
    """What an engine has counted of KV that it fetched. The others: as of LeaseBooks."""

    life: str
    arrived: int
    failed: int
    read_ms: float

    def is_of(self, by_ms: float) -> bool:
        return self.read_ms - MARGIN_MS >= by_ms


class Leases(Enum):
    """What has become of those that were there before."""

    KEPT = auto()
    """None has ended."""
    SOME_ENDED = auto()
    """Nobody knows whose."""
    UNKNOWN = auto()
    """Nobody says, or not yet."""


class Fetches(Enum):
    """What has become of what was to be fetched."""

    IN_TIME = auto()
    """Nothing was fetched late."""
    LATE = auto()
    """Something was."""
    UNKNOWN = auto()
    """Nobody says, or not yet."""


def kept_s(own_s: float, sources: Iterable[WorkerInfo]) -> float:
    """How long what waits to be fetched is kept for sure, as all of `sources` say. own_s: if none
    says less."""
    return min([own_s, *(info.kv_lease_s for info in sources if info.kv_lease_s)])


def leases(before: LeaseBooks | None, now: LeaseBooks | None, by_ms: float) -> Leases:
    """Since `before` was read, and until `by_ms`."""
    if before is None or now is None or not _are_of_one_life(before, now):
        return Leases.UNKNOWN
    if now.ended > before.ended:
        return Leases.SOME_ENDED
    return Leases.KEPT if now.is_of(by_ms) else Leases.UNKNOWN


def fetches(before: LeaseBooks | None, first: LeaseBooks | None, now: LeaseBooks | None) -> Fetches:
    """Since `before` was read, and until shortly before `first` was.

    An engine counts a fetch in the first step after it has heard of that: so `now` says for sure
    once there was a step since `first`.
    """
    if before is None or first is None or now is None:
        return Fetches.UNKNOWN
    if not _are_of_one_life(before, first) or not _are_of_one_life(first, now):
        return Fetches.UNKNOWN
    if now.late > before.late:
        return Fetches.LATE
    if first.ended == before.ended or now.steps > first.steps:
        return Fetches.IN_TIME
    return Fetches.UNKNOWN


def _are_of_one_life(before: LeaseBooks, now: LeaseBooks) -> bool:
    """Whether both are of one process, which alone goes on counting."""
    return (
        process_of(before.life) == process_of(now.life)
        and before.ended <= now.ended
        and before.late <= now.late
        and before.steps <= now.steps
    )
