"""KV that an engine keeps for another worker to fetch, judged by the engine's counters. Pure.

Only the engine knows when such a lease ends: it begins somewhere between the source's request and
its answer, and a target that waits prolongs it. But the engine counts the leases that have ended,
and the targets that let it know of a fetch too late. It counts in steps, makes none while it is
idle, and overwrites nothing then.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from app.core.fetches import Fetch
from app.core.worker_report import ForwardPassMetrics, WorkerInfo, process_of

MARGIN_MS = 1000
"""A reading takes at most so long from an agent to Redis."""
STALE_MS = 5000
"""Older readings say nothing of now."""


class LeaseBooks(NamedTuple):
    """Counters of a source's engine.

    life: of the engine; "": unknown. ended: leases that ended before all was fetched. steps: that
    it has made. read_ms: when the counters were read, by the Redis clock.
    """

    life: str
    ended: int
    steps: int
    read_ms: float

    def is_of(self, by_ms: float) -> bool:
        """Whether the counters include all that was counted by `by_ms`."""
        return self.read_ms - MARGIN_MS >= by_ms


def counts_leases(metrics: ForwardPassMetrics) -> bool:
    """Whether an engine counts what a late fetch can be known by."""
    counts = (metrics.kv_leases_ended, metrics.kv_fetched_late, metrics.engine_steps)
    return None not in counts


def kept_s(own_s: float, sources: Iterable[WorkerInfo]) -> float:
    """Returns for how many seconds each of `sources` surely keeps what is to be fetched; own_s if
    none says."""
    return min((info.kv_lease_s for info in sources if info.kv_lease_s), default=own_s)


def are_kept(fetch: Fetch, now: LeaseBooks | None, by_ms: float) -> bool:
    """Whether the source has let go of nothing since a fetch was reserved, as of `by_ms`."""
    is_known = now is not None and now.is_of(by_ms) and not is_void(fetch, now)
    return is_known and now is not None and now.ended == fetch.ended


def is_void(fetch: Fetch, now: LeaseBooks) -> bool:
    """Whether the source's engine has begun anew since the fetch was reserved, and hands nothing
    on."""
    return began_anew(fetch.source_life, now.life) or now.ended < fetch.ended


def has_spoken(fetch: Fetch, first: LeaseBooks, now: LeaseBooks) -> bool:
    """Whether `now` tells of all fetches that were late by shortly before `first` was read.

    An engine counts a fetch in the first step after it has heard of it.
    """
    return is_void(fetch, now) or first.ended == fetch.ended or now.steps > first.steps


def began_anew(life: str, now: str | None) -> bool:
    """Whether an engine with the life `life` has begun another process. None, "": unknown."""
    return bool(life and now) and process_of(life) != process_of(now or "")
