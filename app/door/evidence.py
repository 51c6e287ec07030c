"""What a request has against workers that failed it, until it is known whose fault that was."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from app.core.errors import KvrouteError
from app.core.failures import Counts, Failure
from app.core.types import Incarnation
from app.core.verdicts import CALLER
from app.core.worker_report import WorkerInfo
from app.policy.health import counts_for
from app.router.router import Router
from app.state import leases


class _FailedTry(NamedTuple):
    """incarnations: of the worker, and of its source if that may be at fault just as well. Times by
    the Redis clock. began: whether the worker had begun to answer."""

    failure: Failure
    incarnations: list[Incarnation]
    sent_ms: int | None
    failed_ms: int | None
    began: bool


class Evidence:
    """Of one request. Until it is judged, this replica leaves the workers alone for its caller."""

    def __init__(self, router: Router, caller: str) -> None:
        self.tries: list[_FailedTry] = []
        """That are still to be judged."""
        self._router, self._caller = router, caller

    async def add(
        self,
        failure: Failure,
        workers: Iterable[WorkerInfo],
        sent_ms: int | None,
        *,
        began: bool = False,
    ) -> None:
        """Take in a failed try."""
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
        """Another worker has answered the request, or none has. is_own: that is the request's own
        fault. began: False: it has only begun to, which says nothing of those that had as well."""
        tries = [one for one in self.tries if began or not one.began]
        num_failed = is_own + sum(one.failure.weight > 0 for one in tries)
        judged = ((one, counts_for(one.failure, is_answered, num_failed)) for one in tries)
        try:
            await self._tell((o, replace(o.failure, counts=c)) for o, c in judged if c is not None)
        finally:
            self._forget(tries)

    async def answered(self, worker: WorkerInfo, names: Sequence[str]) -> None:
        """That worker has answered to the end, and is left alone for these no more."""
        await self.judge(is_answered=True)
        if names:
            with suppress(KvrouteError):
                await self._router.answers_again(worker, names)

    def withdraw(self) -> None:
        """Nothing will be known of what is still to be judged."""
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
