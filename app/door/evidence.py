"""Evidence of a request against workers that failed it, until it is known whose fault that was."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

from app.core.errors import KvrouteError
from app.core.failures import Counts, Failure, Suspects
from app.core.types import Incarnation
from app.core.verdicts import CALLER
from app.core.worker_report import WorkerInfo
from app.policy.health import counts_for
from app.router.router import Router
from app.state import leases

TRIES = 4
"""Workers that may refuse a request: no more than half of a fleet is suspended, and a few others
may have begun to fail just now."""
MAX_BROKEN = 2
"""Workers that may break off while they have a request: it may be what they break of."""
MAX_UNREACHED = 16
"""Workers that could not be connected to, and so never had the request."""


@dataclass(slots=True)
class TryCounts:
    """Workers that did not take a request (`refused`), broke off while they had it (`broken`), or
    could not be reached. asked_again: one that refused it was asked once more."""

    refused: int = 0
    broken: int = 0
    unreached: int = 0
    asked_again: bool = False

    def broke(self, *, never_sent: bool) -> None:
        self.unreached += never_sent
        self.broken += not never_sent

    @property
    def nobody_had_it(self) -> bool:
        return not (self.refused or self.broken)

    @property
    def has_broken_all(self) -> bool:
        """Whether workers may break of the request itself."""
        return self.broken >= MAX_BROKEN

    @property
    def is_over(self) -> bool:
        """Whether no further worker is to be asked."""
        return (
            self.has_broken_all
            or self.refused + self.broken >= TRIES
            or self.unreached >= MAX_UNREACHED
        )

    def may_ask_again(self, refusal: Failure | None) -> bool:
        """Whether the only worker that has answered may do better if it has the request again. One
        that broke off is not asked."""
        may_pass = refusal is not None and refusal.whose is Suspects.EITHER
        return may_pass and self.refused == 1 and not self.asked_again


class _FailedTry(NamedTuple):
    """A failed try. incarnations: of the worker, and of a source that may be at fault as well.
    Times are ms by the Redis clock. began: the worker had begun to answer."""

    failure: Failure
    incarnations: list[Incarnation]
    sent_ms: int | None
    failed_ms: int | None
    began: bool


class Evidence:
    """The failed `tries` of one request that are still to be judged. Until then this replica leaves
    their workers alone for the request's caller."""

    def __init__(self, router: Router, caller: str) -> None:
        self.tries: list[_FailedTry] = []
        self._router, self._caller = router, caller

    async def add(
        self,
        failure: Failure,
        workers: Iterable[WorkerInfo],
        sent_ms: int | None,
        *,
        began: bool = False,
    ) -> None:
        """Takes in a failed try."""
        fleet = self._router.fleet
        found = (fleet.incarnation_of(info.key) for info in workers)
        incs = [inc for inc in found if inc is not None]
        one = _FailedTry(failure, incs, sent_ms, fleet.redis_now_ms, began)
        if failure.counts is Counts.ALL:
            await self._tell([(one, failure)])
            return
        self.tries.append(one)
        fleet.suspected.update((CALLER + self._caller, inc) for inc in incs)

    async def judge(self, *, is_answered: bool, is_own: bool = False, began: bool = True) -> None:
        """Judges the tries, as another worker has answered the request, or none has. is_own: that
        is the request's own fault. began: False leaves out workers that had begun to answer, as the
        present one has only begun to."""
        tries = [one for one in self.tries if began or not one.began]
        num_failed = is_own + sum(one.failure.weight > 0 for one in tries)
        judged = ((one, counts_for(one.failure, is_answered, num_failed)) for one in tries)
        try:
            await self._tell((o, replace(o.failure, counts=c)) for o, c in judged if c is not None)
        finally:
            self._forget(tries)

    async def answered(self, worker: WorkerInfo, names: Sequence[str]) -> None:
        """Notes that a worker has answered to the end, and is no longer left alone for `names`."""
        await self.judge(is_answered=True)
        if names:
            with suppress(KvrouteError):
                await self._router.answers_again(worker, names)

    def withdraw(self) -> None:
        """Forgets what is still to be judged, of which nothing more will be known."""
        self._forget(self.tries)

    def _forget(self, tries: Iterable[_FailedTry]) -> None:
        suspected, name = self._router.fleet.suspected, CALLER + self._caller
        for one in list(tries):
            self.tries.remove(one)
            for inc in one.incarnations:
                suspected[name, inc] -= 1
                if not suspected[name, inc]:
                    del suspected[name, inc]

    async def _tell(self, judged: Iterable[tuple[_FailedTry, Failure]]) -> None:
        calls = [
            leases.suspend(
                *(self._router.keyspace, failure),
                caller=self._caller,
                incarnation=inc,
                sent_ms=one.sent_ms,
                failed_ms=one.failed_ms,
            )
            for one, failure in judged
            for inc in one.incarnations
        ]
        if calls:
            with suppress(KvrouteError):
                await self._router.count_failures(calls)
                await self._router.refresh()
