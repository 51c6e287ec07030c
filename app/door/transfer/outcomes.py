"""Whether KV arrives between the pairs of workers that requests are sent to."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from dataclasses import dataclass, field

from app.core.types import WorkerKey
from app.core.worker_report import WorkerInfo
from app.policy.kv_lease import Transfers
from app.policy.pair_failures import PairFailures
from app.router.router import Router

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
MOST_S = 60.0
"""How long at most it takes a target's engine to tell what became of a transfer."""


@dataclass(slots=True, eq=False)
class PendingTransfers:
    """Of a target: what its engine had counted before some requests were sent there.

    pending: those that have not begun to be answered. ended_ms: when the last of them did, by the
    Redis clock.
    """

    router: Router
    target: WorkerInfo
    before: Transfers
    since_s: float
    sources: set[WorkerKey] = field(default_factory=set)
    pending: int = 0
    has_begun: bool = False
    ended_ms: int | None = None

    def began(self) -> None:
        """One is answered: what was to be fetched for it has arrived, or failed to."""
        self.pending -= 1
        self.has_begun = True
        if not self.pending:
            self.ended_ms = self.router.fleet.redis_now_ms


class PairTransfers:
    """Looks what became of transfers, while `run` runs: of some requests to a target at a time."""

    def __init__(self) -> None:
        self._awaited: dict[tuple[Router, WorkerKey], PendingTransfers] = {}
        self._pairs: defaultdict[Router, PairFailures] = defaultdict(PairFailures)

    def sent(
        self, router: Router, source: WorkerInfo, target: WorkerInfo
    ) -> PendingTransfers | None:
        """A target is about to be told to fetch. None: nobody looks what becomes of that."""
        key = router, target.key
        awaited = self._awaited.get(key)
        if awaited is None:
            before = router.fleet.transfers(target)
            if before is None:
                return None
            now_s = asyncio.get_running_loop().time()
            awaited = self._awaited[key] = PendingTransfers(router, target, before, now_s)
        if awaited.has_begun:
            return None
        awaited.sources.add(source.key)
        awaited.pending += 1
        return awaited

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            now_s = asyncio.get_running_loop().time()
            for key, awaited in list(self._awaited.items()):
                if self._is_over(awaited, now_s):
                    del self._awaited[key]
            for router, pairs in list(self._pairs.items()):
                router.fleet.pairs_left_alone = pairs.left_alone(now_s)
                if pairs.are_well:
                    del self._pairs[router]

    def _is_over(self, awaited: PendingTransfers, now_s: float) -> bool:
        now = awaited.router.fleet.transfers(awaited.target)
        if now is None or awaited.ended_ms is None or not now.is_of(awaited.ended_ms):
            return now_s > awaited.since_s + MOST_S
        if now.life == awaited.before.life:
            self._note(awaited, now, now_s)
        return True

    def _note(self, awaited: PendingTransfers, now: Transfers, now_s: float) -> None:
        failed = now.failed - awaited.before.failed
        arrived = now.arrived - awaited.before.arrived
        target, pairs = awaited.target.key, self._pairs[awaited.router]
        for source, _ in pairs.note(target, awaited.sources, failed, arrived, now_s):
            awaited.router.telemetry.pairs_left_alone.inc()
            log.warning(
                "KV of %s does not arrive at %s: nothing is split between the two for a while",
                *(source, target),
            )
