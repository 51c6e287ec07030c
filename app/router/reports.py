"""Reports of first tokens and ends, and of what is still carried. Nobody waits for most of them:
they ride with the next look-up, or go together a few milliseconds later."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from app.core.errors import RedisUnavailable
from app.core.outcomes import Ending
from app.core.usage import UsageSums, Who
from app.core.worker_report import WorkerInfo
from app.policy.decision import Decision
from app.policy.kv_lease import kept_s
from app.router.carried import Carried
from app.router.history import History
from app.router.maintenance import Maintenance
from app.router.replica import EVERY_S, Replica
from app.state import reservations
from app.state.reservations import Extension, ExtensionOutcome, PrefillComplete, Release
from app.state.scripts import Call

log = logging.getLogger(__name__)

AT_ONCE = 64
EXTENDED_AT_ONCE = 128
"""Extensions of one script, which takes Redis half a millisecond."""
LOOK_S = 1.0
"""Seconds between looks for what is to be extended."""
SOON_S = 0.005
"""Seconds that a report waits for a look-up that takes it along. A replica that is killed loses no
more of them, and what they would have released expires."""
MAX_UNREPORTED = 16_384
"""Reports beyond this many, which only a slow Redis can cause, push out the oldest."""


class _Event(StrEnum):
    """Events of a reservation, as metrics name them."""

    SOURCE_COMPLETE = "source_complete"
    PREFILL_COMPLETE = "prefill_complete"
    END = "released"


@dataclass(slots=True)
class _Report:
    """One report.

    began_by_ms: see `reservations.Release`. answer: whether there was such a reservation; None:
    nobody waits for that. ending: what came of the request; None: nobody says.
    answered: of an end: whether the worker has answered all of it, as far as anybody says.
    is_whole: of an end: whether it reports the first token as well.
    is_late: whether the same id may have been promised something else since.
    source_ttl_ms: how long a source keeps its blocks. late_ms: see `Release`.
    """

    reservation_id: str
    event: _Event
    began_by_ms: int | None
    answer: asyncio.Future[bool] | None
    ending: Ending | None = None
    answered: bool = True
    is_whole: bool = False
    is_late: bool = False
    source_ttl_ms: int = 0
    late_ms: int | None = None


@dataclass(slots=True)
class Trip:
    """Reports of one round trip to Redis.

    told: for each of the first calls, its reports, and likewise the following calls and extensions.
    counts: whether the last call tells what requests have used. settles: whether the last call, or
    the one before that, settles limits. replies: to the calls; None: it came to none.
    """

    told: list[list[_Report]]
    extensions: list[list[Extension]]
    calls: list[Call[Any]]
    counts: bool = False
    settles: bool = False
    replies: list[Any] | None = None

    @property
    def ids(self) -> set[str]:
        """Ids of all reservations that it reports on."""
        extended = {one.reservation_id for some in self.extensions for one in some}
        return extended | {report.reservation_id for some in self.told for report in some}


class Reports:
    """Reports to Redis. Of two reports of one reservation the second leaves once the first is
    answered.

    on_end: called after each round trip, as requests may wait for what was released.
    """

    def __init__(
        self,
        replica: Replica,
        history: History,
        maintenance: Maintenance,
        on_end: Callable[[], object],
    ) -> None:
        self._replica = replica
        self._history = history
        self._maintenance = maintenance
        self._on_end = on_end
        self._ttl_ms = round(replica.settings.reservation_ttl_s * 1000)
        self._carried = Carried()
        self._must_extend = False
        self._reports: deque[_Report] = deque()
        self._away: set[str] = set()
        """Reservations that Redis is being told of."""
        self._timer: asyncio.TimerHandle | None = None
        """Time to send the others; None: there are none, or they go once those are back."""
        self._counting: asyncio.TimerHandle | None = None
        """Time to tell what requests have used."""
        self._sending: asyncio.Task[None] | None = None

    def source_complete(
        self,
        reservation_id: str,
        sources: Iterable[WorkerInfo],
        answer: asyncio.Future[bool] | None = None,
    ) -> None:
        """Report that a prompt is computed, or ready to be handed on, at one of these sources."""
        now_ms = self._replica.fleet.redis_now_ms
        own_s = self._replica.settings.kv_lease_s
        ttl_ms = round(1000 * max(own_s, kept_s(own_s, sources)))
        event = _Event.SOURCE_COMPLETE
        self._add(_Report(reservation_id, event, now_ms, answer, source_ttl_ms=ttl_ms))

    def first_token(
        self,
        reservation_id: str,
        answer: asyncio.Future[bool] | None = None,
        *,
        late_ms: int | None = None,
    ) -> None:
        """Report that a request's first token is out; later, if Redis cannot be reached."""
        self._carried.first_token(reservation_id)
        now_ms = self._replica.fleet.redis_now_ms
        event = _Event.PREFILL_COMPLETE
        self._add(_Report(reservation_id, event, now_ms, answer, late_ms=late_ms))

    def end(
        self,
        reservation_id: str,
        answer: asyncio.Future[bool] | None = None,
        ending: Ending | None = None,
        *,
        answered: bool = True,
        late_ms: int | None = None,
    ) -> None:
        """Report that a request has ended. answered: its worker has answered it; else nothing is
        known.

        If Redis cannot be reached, the reservation is released once it is back.
        """
        self._carried.end(reservation_id)
        now_ms = self._replica.fleet.redis_now_ms
        report = _Report(reservation_id, _Event.END, now_ms, answer, ending, answered)
        report.late_ms = late_ms
        self._add(report)

    def carry(self, decision: Decision) -> None:
        """Keep reserved what the door carries, until it ends."""
        self._carried.add(decision, asyncio.get_running_loop().time())

    @property
    def carries(self) -> bool:
        return bool(self._carried)

    def forget(self, reservation_id: str) -> None:
        """Carry it no longer; somebody else releases what is reserved."""
        self._carried.end(reservation_id)

    async def run(self) -> None:
        """Extend what is carried, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self._must_extend = True
            self._send()

    def _add(self, report: _Report) -> None:
        if len(self._reports) >= MAX_UNREPORTED:
            self._failed(self._reports.popleft(), RedisUnavailable("too many reports wait"))
        self._reports.append(report)
        view = self._replica.fleet.last_view
        is_awaited = report.answer is not None or (view is not None and view.somebody_waits)
        if is_awaited or len(self._reports) >= AT_ONCE:
            self._send()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SOON_S, self._send)

    def count(self, who: Who, used: UsageSums) -> None:
        """Count what a request has used; Redis is told with its end."""
        self._replica.tally.add(who, used)
        if self._counting is None:
            loop = asyncio.get_running_loop()
            self._counting = loop.call_later(EVERY_S + SOON_S, self._send_count)

    def _send_count(self) -> None:
        self._counting = None
        if self._replica.tally.is_due:
            self._send()

    def _send(self) -> None:
        self._stop_timer()
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send_all())

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def finish(self) -> None:
        """Report what is left."""
        for wait_s in (EVERY_S, 0.0):  # what requests used that ended just now goes with the second
            self._send()
            if self._sending is not None:
                await self._sending
            await asyncio.sleep(wait_s)

    async def _send_all(self) -> None:
        is_first = True
        while is_first or self._reports or self._must_extend:
            is_first = False
            extensions = self._extensions() if self._must_extend else []
            with self._underway(self._take(), extensions) as trip:
                if not trip.calls:
                    return
                trip.replies = await self._replica.runner.run_each(trip.calls)

    @contextmanager
    def riding(self) -> Iterator[Trip]:
        """Yields what is to be told, which the caller sends before its own calls in one round trip,
        so that those see what was released. The caller sets the replies."""
        replica = self._replica
        if not (self._reports or replica.tally.is_due or replica.limiter.is_due):
            yield Trip([], [], [])
            return
        with self._underway(self._take(), []) as trip:
            yield trip

    @contextmanager
    def _underway(
        self, reports: list[_Report], extensions: list[list[Extension]]
    ) -> Iterator[Trip]:
        ends = [report for report in reports if report.event is _Event.END]
        others = [report for report in reports if report.event is not _Event.END]
        told = [some for some in (others, ends) if some]
        extending = [reservations.extend(self._replica.keyspace, some) for some in extensions]
        count, settle = self._replica.tally.take(), self._replica.limiter.take()
        calls: list[Call[Any]] = [*map(self._call, told), *extending]
        calls += [call for call in (settle, count) if call is not None]
        trip = Trip(told, extensions, calls, count is not None, settle is not None)
        ids = trip.ids
        self._away |= ids
        try:
            yield trip
        finally:
            self._away -= ids
            self._arrived(trip)
            if self._reports and self._timer is None:
                self._send()

    def _take(self) -> list[_Report]:
        """Returns up to AT_ONCE reports, of reservations that Redis is not being told of."""
        taken, left = list[_Report](), list[_Report]()
        while self._reports and len(taken) < AT_ONCE:
            report = self._reports.popleft()
            (left if report.reservation_id in self._away else taken).append(report)
        self._reports.extendleft(reversed(left))
        if not self._reports:
            self._stop_timer()
        return _joined(taken)

    def _arrived(self, trip: Trip) -> None:
        if trip.counts:
            is_counted = trip.replies is not None and isinstance(trip.replies[-1], bool)
            self._replica.tally.told(is_counted=is_counted)
        if trip.settles:
            settled = None if trip.replies is None else trip.replies[-1 - trip.counts]
            self._replica.limiter.told(settled)
        if trip.replies is None:
            # Whoever sent it was cancelled: it is told once more before the replica ends.
            for report in (report for some in trip.told for report in some):
                report.is_late = True
                self._reports.append(report)
            return
        if trip.extensions:
            extended = trip.replies[len(trip.told) :][: len(trip.extensions)]
            self._note_extended(trip.extensions, extended)
        for some, attempts in zip(trip.told, trip.replies, strict=False):
            if isinstance(attempts, RedisUnavailable):
                attempts = [attempts] * len(some)
            for report, attempt in zip(some, attempts, strict=True):
                self._answered(report, attempt)
        if trip.told:
            self._on_end()

    def _answered(self, report: _Report, attempt: str | RedisUnavailable | None) -> None:
        if isinstance(attempt, RedisUnavailable):
            self._failed(report, attempt)
            return
        if attempt is None:
            self._replica.telemetry.reservations_of("unknown").inc()
        else:
            self._note(report, attempt)
        if report.answer is not None and not report.answer.done():
            report.answer.set_result(attempt is not None)

    def _note(self, report: _Report, attempt: str) -> None:
        self._replica.telemetry.reservations_of(report.event).inc()
        if report.is_whole:
            self._replica.telemetry.reservations_of(_Event.PREFILL_COMPLETE).inc()
        if report.is_whole or report.event is _Event.PREFILL_COMPLETE:
            self._history.confirm(attempt)
        elif report.event is _Event.END:
            self._history.withdraw(attempt)
        if report.ending is not None:
            self._history.end(report.reservation_id, report.ending)

    def _extensions(self) -> list[list[Extension]]:
        """Returns what is due of all that is carried, but for what Redis is being told of, as what
        has ended must not be reserved again."""
        self._must_extend = False
        now_s = asyncio.get_running_loop().time()
        carried = self._carried.due(now_s, self._replica.fleet.last_view)
        due = [one for one in carried if one.reservation_id not in self._away]
        return [due[at : at + EXTENDED_AT_ONCE] for at in range(0, len(due), EXTENDED_AT_ONCE)]

    def _note_extended(
        self,
        extensions: list[list[Extension]],
        replies: list[list[ExtensionOutcome] | RedisUnavailable],
    ) -> None:
        now_s = asyncio.get_running_loop().time()
        for some, outcomes in zip(extensions, replies, strict=True):
            if isinstance(outcomes, RedisUnavailable):
                log.debug("%d reservations not extended: %s", len(some), outcomes)
                continue
            self._carried.extended(some, outcomes, now_s)
            made = outcomes.count(ExtensionOutcome.RESERVED_AGAIN)
            self._replica.telemetry.reservations_of("made_again").inc(made)

    def _call(self, reports: list[_Report]) -> Call[list[str | None]]:
        if reports[0].event is _Event.END:
            releases = [
                Release(
                    report.reservation_id,
                    began_by_ms=report.began_by_ms if report.is_late else None,
                    answered=report.answered,
                    whole=report.is_whole,
                    late_ms=report.late_ms,
                )
                for report in reports
            ]
            return reservations.release(self._replica.keyspace, releases)
        completed = [
            PrefillComplete(
                report.reservation_id,
                self._ttl_ms_after(report),
                report.began_by_ms if report.is_late else None,
                report.event is _Event.SOURCE_COMPLETE,
                report.late_ms,
            )
            for report in reports
        ]
        return reservations.prefill_complete(self._replica.keyspace, completed)

    def _ttl_ms_after(self, report: _Report) -> int:
        if report.event is _Event.SOURCE_COMPLETE:
            return report.source_ttl_ms
        is_carried = report.reservation_id in self._carried
        return reservations.CARRIED_MS if is_carried else self._ttl_ms

    def _failed(self, report: _Report, error: RedisUnavailable) -> None:
        report.is_late = True
        if report.began_by_ms is not None:
            self._maintenance.tell_soon(self._call([report]))
        if report.answer is not None and not report.answer.done():
            report.answer.set_exception(error)


def _joined(reports: list[_Report]) -> list[_Report]:
    """Returns the reports with each first token joined to its request's end, if both are there."""
    begun = {
        report.reservation_id: report.late_ms
        for report in reports
        if report.event is _Event.PREFILL_COMPLETE and report.answer is None
    }
    whole = {
        report.reservation_id: report
        for report in reports
        if report.event is _Event.END and report.reservation_id in begun
    }
    for report in whole.values():
        report.is_whole = True
        if report.late_ms is None:
            report.late_ms = begun[report.reservation_id]
    rest = [report for report in reports if report.reservation_id not in whole]
    return [*rest, *whole.values()] if whole else reports
