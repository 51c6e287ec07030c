"""Tries of one request that failed, and whether another worker is asked.

Until the first byte has gone out to the client, another worker takes the place of one that failed;
later, one goes on with a stream that can migrate. Whose fault a failure is, `blame` says.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from app.core.errors import NoWorkers
from app.core.failures import Failure
from app.core.worker_report import WorkerInfo
from app.door import blame
from app.door.door import Door
from app.door.engine.connection import ConnectFailed, EngineAnswer, UpstreamError
from app.door.errors import AnswerTimeout, RepeatedFailure, Unreached, WorkerFailed
from app.door.evidence import TryCounts
from app.door.forwarding import Outgoing
from app.door.lifecycle import Lifecycle
from app.door.transfer.base import RefusedWithSource, SourceFailed
from app.door.transfer.kv_lease import LeaseEnded, TaintedTarget

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Beginning:
    """The first part of an answer, by which it is judged. whole: all of it is there. in_events: it
    is a stream. failure: why another worker is to be asked; None: it is passed on."""

    worker: WorkerInfo
    answer: EngineAnswer
    first: bytes
    whole: bool
    in_events: bool
    failure: Failure | None = None

    @property
    def says_why(self) -> bool:
        """Whether it tells an error, as its API has it, or as engines do."""
        is_error = self.failure is not None and self.failure.cause == blame.ERROR_EVENT
        return bool(self.first) and (is_error or self.answer.status >= 400)


class Tries:
    """The workers that failed one request. refusal: the last answer that another worker was to
    better. failed: how the last one broke off. nobody: why no further one was chosen."""

    def __init__(self, door: Door, life: Lifecycle, outgoing: Outgoing) -> None:
        self.counts = TryCounts()
        self.begin()
        self._door, self._life, self._outgoing = door, life, outgoing

    def begin(self) -> None:
        """Forgets all but the counts: an answer is to begin."""
        self.refusal: Beginning | None = None
        self.failed: WorkerFailed | None = None
        self.nobody: NoWorkers | None = None

    @property
    def may_go_on(self) -> bool:
        """Whether another worker is to be asked."""
        is_late = isinstance(self.failed, AnswerTimeout)
        return self.nobody is None and not is_late and not self.counts.is_over

    async def note(self, error: NoWorkers | UpstreamError, deadline_s: float) -> None:
        """Leaves a worker that gave no answer. deadline_s: for one to begin, by the event loop's
        clock."""
        if isinstance(error, UpstreamError):
            self.failed = await self.leave(error)
            if not _is_of_kv(error) and asyncio.get_running_loop().time() >= deadline_s:
                self.failed = AnswerTimeout(str(self.failed))
        elif self.refusal is not None and self.counts.may_ask_again(self.refusal.failure):
            self.counts.asked_again = True
            self._life.asks_again(self.refusal.worker)
        else:
            # Its traceback refers to a frame, and that to all of the request.
            self.nobody = error.with_traceback(None)

    async def note_refusal(self, begun: Beginning, failure: Failure) -> None:
        """Leaves a worker whose answer another one is to better."""
        self.refusal = begun
        self.counts.refused += 1
        words = self.said(begun.first)
        if not blame.takes_no_more(failure):
            log.warning(
                "worker %s: %s (status %d): %s; request %s",
                *(begun.worker.key, failure.cause, begun.answer.status, words),
                self._life.request_id,
            )
        await self._life.worker_failed(failure, failure.cause, words)

    async def leave(self, error: UpstreamError) -> WorkerFailed:
        """Leaves the worker that was asked, or its source. Returns how that failed."""
        life, decision, counts = self._life, self._life.current, self.counts
        failed = WorkerFailed(f"worker {decision.worker.key}: {error}")
        if isinstance(error, SourceFailed):
            assert decision.source is not None
            failed = WorkerFailed(f"source {decision.source.worker.key}: {error}")
        log.warning("%s; request %s", failed, life.request_id)
        if isinstance(error, SourceFailed):
            counts.refused += 1
            await life.source_failed(error.failure, error.cause, str(error))
        elif _is_of_kv(error):  # without a word against the target
            counts.refused += 1
            life.goes_alone(error.cause, elsewhere=not isinstance(error, RefusedWithSource))
        else:
            counts.broke(never_sent=isinstance(error, ConnectFailed))
            is_whole = not self._outgoing.asked.streams
            failure = blame.of_break(error.cause, is_late=error.is_late, is_whole=is_whole)
            await life.worker_failed(failure, error.cause, str(error))
            if counts.has_broken_all:
                again = f"{failed}; so did another one while it had this request"
                return RepeatedFailure(again)
        return failed

    async def last(self) -> Beginning:
        """Returns the refusal that the client gets; raises what else the request ends by."""
        await self._life.judge(is_answered=False)
        refusal, failed, nobody = self.refusal, self.failed, self.nobody
        if refusal is not None and refusal.says_why:
            return refusal
        self.begin()
        try:
            if failed is not None:
                is_late = isinstance(failed, AnswerTimeout)
                is_unreached = self.counts.nobody_had_it and not is_late
                raise Unreached(str(failed)) if is_unreached else failed
            if refusal is not None and refusal.failure is not None:
                said = f"{refusal.failure.cause} (status {refusal.answer.status})"
                raise WorkerFailed(f"worker {refusal.worker.key}: {said}")
            raise nobody or NoWorkers("no worker is alive")
        finally:
            failed = nobody = None  # they refer to this frame, and that to all of the request

    def said(self, by_engine: bytes) -> str:
        """Returns an engine's words as logs may have them."""
        return self._door.words.of(by_engine, self._outgoing.body)


def _is_of_kv(error: UpstreamError) -> bool:
    """Whether what a source handed on, now or before, is at fault, and not the worker asked."""
    return isinstance(error, LeaseEnded | RefusedWithSource | TaintedTarget | SourceFailed)
