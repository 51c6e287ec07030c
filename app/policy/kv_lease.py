"""Whether a source still keeps what waits to be fetched, by what its engine counts. Pure.

When a lease ends is known to that engine alone: it begins somewhere between the source's request
and its answer, and a target that waits prolongs it. But the engine counts the leases that have
ended, and the targets that let it know of a fetch too late. It counts in steps, and makes none
while it is idle; nor does it overwrite anything then.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from app.core.fetches import Fetch
from app.core.worker_report import ForwardPassMetrics, WorkerInfo, process_of

MARGIN_MS = 1000
"""A reading may seem younger by so much: it takes no longer from an agent to Redis."""
STALE_MS = 5000
"""Older readings say nothing of now."""


class LeaseBooks(NamedTuple):
    """What a source's engine has counted. life: of the engine; "": not known. ended: leases that
    ended before all was fetched. steps: that it has made. read_ms: when that was read, by the Redis
    clock."""

    life: str
    ended: int
    steps: int
    read_ms: float

    def is_of(self, by_ms: float) -> bool:
        """Whether all that was counted by then is in it."""
        return self.read_ms - MARGIN_MS >= by_ms


def counts_leases(metrics: ForwardPassMetrics) -> bool:
    """Whether an engine counts what it takes to know of a late fetch."""
    counts = (metrics.kv_leases_ended, metrics.kv_fetched_late, metrics.engine_steps)
    return None not in counts


def kept_s(own_s: float, sources: Iterable[WorkerInfo]) -> float:
    """How long what waits to be fetched is kept for sure by each of `sources`. own_s: if none
    says."""
    return min((info.kv_lease_s for info in sources if info.kv_lease_s), default=own_s)


def are_kept(fetch: Fetch, now: LeaseBooks | None, by_ms: float) -> bool:
    """Whether the source has let go of nothing since a fetch was reserved, as of `by_ms`."""
    is_known = now is not None and now.is_of(by_ms) and not is_void(fetch, now)
    return is_known and now is not None and now.ended == fetch.ended


def is_void(fetch: Fetch, now: LeaseBooks) -> bool:
    """Whether the source's engine has begun anew since: then it hands nothing on."""
    return began_anew(fetch.source_life, now.life) or now.ended < fetch.ended


def has_spoken(fetch: Fetch, first: LeaseBooks, now: LeaseBooks) -> bool:
    """Whether `now` tells of all fetches that were late by shortly before `first` was read.

    An engine counts a fetch in the first step after it has heard of that; of one that has let go of
    nothing, none is late.
    """
    return is_void(fetch, now) or first.ended == fetch.ended or now.steps > first.steps


def began_anew(life: str, now: str | None) -> bool:
    """Whether an engine that was in the one life has begun another process. None, "": that is not
    known."""
    return bool(life and now) and process_of(life) != process_of(now or "")
