"""Whether workers that decode fetch KV while its source still keeps it for them.

What is fetched after a lease has ended belongs to other prompts: the text is wrong, nothing in the
answer tells, and the engine keeps it as the prompt's, for others as well. So all replicas know from
Redis what each target is yet to fetch, by when (`Fetch`), and keep one rule: an answer that began
after a lease of its worker may have ended is given to nobody until the source has spoken, by a
reading of its engine from after that. What that engine has counted as late, its agent has told
Redis by then, which taints all targets that it may have been.

A target that has answered what it was sent later has fetched, as engines begin requests in order.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from app.core.errors import KvrouteError
from app.core.fetches import NIXL, Fetch
from app.core.types import WorkerKey
from app.core.worker_report import WorkerInfo
from app.door.engine.connection import UpstreamError
from app.door.engine.waits import Wait
from app.door.forwarding import Headers
from app.policy.kv_lease import STALE_MS, LeaseBooks, are_kept, has_spoken
from app.router.router import Router

LOOK_EVERY_S = 0.25
POLL_S = 0.05
SPEAKS_S = 15.0
"""How long at most a source is waited for."""
SETTLED_S = 2.0
"""How long before its lease may end Redis is told of a fetch that is known to have been in time: by
then most requests have told so themselves."""
MARGIN_S = 0.5
"""Seconds before its lease may end at which a target is given up, if nobody says when it does."""
MAY_HOLD = "may hold KV that is not its prompt's"
NOT_KNOWN = "took longer than its source's lease, and nobody says whether that had ended"
NOT_BEGUN = "has not begun, and its source's lease may have ended"


class LeaseEnded(UpstreamError):
    """Blocks to be fetched may have been let go."""

    cause = "lease_ended"


class TaintedTarget(UpstreamError):
    """Blocks that the worker has fetched for others may be in its answer."""

    cause = "tainted"


@dataclass(slots=True, eq=False)
class KvLease:
    """A target's lease on what its source keeps for it.

    fetch: as Redis knows it; None: the source's engine counts nothing. streams: the target's answer
    begins with its first token; else nobody sees that. until_s: until when the lease is sure, by
    the event loop's clock.
    """

    router: Router
    target: WorkerInfo
    fetch: Fetch | None
    streams: bool
    until_s: float
    sent_s: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    """Time at which the target was sent the request, or the wait for it was given up."""
    is_passed: bool = False
    """Whether the target has begun, in time, to answer what it was sent later."""

    @property
    def left_s(self) -> float:
        """Seconds for which the lease has not ended, whatever the source's engine says."""
        return self.until_s - asyncio.get_running_loop().time()

    @property
    def has_ended(self) -> bool:
        """Whether it may have."""
        fleet = self.router.fleet
        if self.left_s > 0 or self.fetch is None or fleet.redis_now_ms is None:
            return self.left_s <= 0
        books = fleet.lease_books(self.fetch.source)
        return not are_kept(self.fetch, books, fleet.redis_now_ms - STALE_MS)

    @property
    def is_lost(self) -> bool:
        """Whether a target that has not begun by now is not to be waited for."""
        return self.has_ended if self.streams or self.fetch is None else False


def _not_begun() -> LeaseEnded:
    return LeaseEnded(NOT_BEGUN)


class KvLeases:
    """Looks after requests whose targets have yet to begin, while `run` runs.

    nudge: has a worker's engine make a step.
    """

    def __init__(self, nudge: Callable[[WorkerInfo, Headers], Awaitable[None]]) -> None:
        self._nudge = nudge
        self._open: set[Wait[KvLease]] = set()
        self._sent: defaultdict[WorkerKey, set[KvLease]] = defaultdict(set)
        """Leases that targets have not answered in time yet."""

    def watched(self, lease: KvLease) -> Wait[KvLease]:
        """Returns a context manager around the wait for a target to begin. Raises LeaseEnded within
        it."""
        self._sent[lease.target.key].add(lease)
        return Wait(self._open, _not_begun, lease)

    async def confirm(
        self,
        router: Router,
        target: WorkerInfo,
        lease: KvLease | None,
        sent_s: float,
        headers: Headers,
    ) -> None:
        """Returns once it is sure that a target, whose answer begins now, has fetched nothing late,
        for this request or another.

        sent_s: when the request was sent, by the event loop's clock. headers: for engines. Raises
        LeaseEnded, TaintedTarget.
        """
        if target.kv_transfer != NIXL:
            return
        fleet, now_s = router.fleet, asyncio.get_running_loop().time()
        began_ms = fleet.redis_now_ms or 0
        fetches = await self._ended(router, target, began_ms)
        if lease is not None and lease.left_s <= 0:
            if lease.fetch is None:
                raise LeaseEnded(NOT_KNOWN)
            fetches[lease.fetch.attempt] = lease.fetch
        if fetches:
            await self._until_spoken(router, fetches.values(), began_ms, headers)
            try:
                await router.refresh()
            except KvrouteError as error:
                raise LeaseEnded(f"{NOT_KNOWN}: {error}") from None
            # One that has dropped what it held is tainted no more, but this is of before.
            if (fleet.engine_life(target.key) or "") != target.engine_life:
                raise TaintedTarget(MAY_HOLD)
        if fleet.is_tainted(target.key):
            raise TaintedTarget(MAY_HOLD)
        if lease is not None:
            self._sent[target.key].discard(lease)
        for other in self._sent.get(target.key, ()):
            other.is_passed |= other.sent_s < sent_s and now_s < other.until_s
        sent_ms = began_ms - 1000 * (now_s - sent_s)
        own = lease.fetch.attempt if lease is not None and lease.fetch is not None else None
        over = [a for a, one in fetches.items() if a == own or one.until_ms < sent_ms]
        await _settle(router, over)

    async def _ended(self, router: Router, target: WorkerInfo, by_ms: int) -> dict[str, Fetch]:
        """Returns, by attempt, what the target may have begun to fetch late by then, as far as
        Redis can be asked."""
        if not router.fleet.knows_fetches(by_ms):
            with suppress(KvrouteError):
                await router.refresh()
        return {one.attempt: one for one in router.fleet.late_fetches(target.key, by_ms)}

    async def _until_spoken(
        self, router: Router, fetches: Iterable[Fetch], began_ms: int, headers: Headers
    ) -> None:
        """Returns once the engines of all sources have told of what was late by then. Raises
        LeaseEnded if one does not."""
        # Of each source, the one since which the most leases may have ended.
        by_source = {one.source: one for one in sorted(fetches, key=lambda f: -f.ended)}
        for fetch in by_source.values():
            if not await self._has_spoken(router, fetch, began_ms, headers):
                raise LeaseEnded(NOT_KNOWN)

    async def _has_spoken(
        self, router: Router, fetch: Fetch, began_ms: int, headers: Headers
    ) -> bool:
        loop, fleet = asyncio.get_running_loop(), router.fleet
        ends_s = loop.time() + SPEAKS_S
        first: LeaseBooks | None = None
        while loop.time() < ends_s:
            source, books = fleet.known(fetch.source), fleet.lease_books(fetch.source)
            if source is None:
                return True  # it is gone, and hands nothing on
            if first is None and books is not None and books.is_of(began_ms):
                first = books
                if not has_spoken(fetch, first, books):
                    await self._nudge(source, headers)
            if first is not None and books is not None and has_spoken(fetch, first, books):
                return True
            await asyncio.sleep(POLL_S)
        return False

    def leave(self, lease: KvLease) -> None:
        """Ends the wait for a target, which may fetch all the same."""
        lease.sent_s, lease.is_passed = asyncio.get_running_loop().time(), False

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            for watch in list(self._open):
                if watch.about.is_lost:
                    watch.end()
            passed: defaultdict[Router, list[str]] = defaultdict(list)
            for target, some in list(self._sent.items()):
                due = {one for one in some if one.left_s < SETTLED_S}
                for one in due:
                    if one.is_passed and one.fetch is not None:
                        passed[one.router].append(one.fetch.attempt)
                some -= due
                if not some:
                    del self._sent[target]
            for router, attempts in passed.items():
                await _settle(router, attempts)


async def _settle(router: Router, attempts: list[str]) -> None:
    """Has Redis forget fetches that were in time, or of which nothing came too late."""
    if attempts:
        with suppress(KvrouteError):
            await router.settle_fetches(attempts)
