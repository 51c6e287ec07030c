"""What carries requests to workers at one replica, and for how long it waits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial

from app.core.types import Incarnation
from app.door.any_worker import AnyWorker
from app.door.engine_words import EngineWords
from app.door.missing import MissingWorkers
from app.door.transfer.kv_lease import KvLeases
from app.door.transfer.nixl import nudge
from app.door.transfer.sources import Sources
from app.door.upstream import Upstream

MAX_REFUSING = 4096
"""Engines that are remembered for members of requests that they do not take."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds. answer: until an answer begins, over all tries. whole: until one has come that comes
    in one piece. between: between pieces of one."""

    answer_s: float
    whole_s: float
    between_s: float


class Door:
    """Knows how to reach engines, and how long to wait for them, while its tasks run."""

    def __init__(self, upstream: Upstream, patience: Patience, kv_lease_s: float) -> None:
        self.upstream = upstream
        self.sources = Sources(upstream, kv_lease_s)
        self.patience = patience
        self.missing = MissingWorkers(upstream)
        self.words = EngineWords()
        self.any_worker = AnyWorker(upstream, patience.between_s, self.words)
        self.leases = KvLeases(partial(nudge, upstream))
        self._refused = dict[tuple[str, Incarnation], frozenset[str]]()

    def refused_by(self, namespace: str, engine: Incarnation) -> frozenset[str]:
        """Returns members, of those that routers add to requests, that an engine does not take."""
        return self._refused.get((namespace, engine), frozenset())

    def note_refused(self, namespace: str, engine: Incarnation, members: frozenset[str]) -> None:
        """Remembers members that an engine does not take; the engine noted first makes room."""
        if len(self._refused) >= MAX_REFUSING:
            del self._refused[next(iter(self._refused))]
        self._refused[namespace, engine] = members

    @property
    def tasks(self) -> Mapping[str, Callable[[], Awaitable[None]]]:
        """What runs beside the requests until cancelled, by its name in logs and metrics."""
        return {"missing_workers": self.missing.run, "kv_leases": self.leases.run}
