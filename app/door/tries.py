"""Has one worker after another begin an answer to a request, until one does."""

from __future__ import annotations

import asyncio
import logging
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

from app.core.errors import KvrouteError, NoWorkers
from app.core.failures import Failure
from app.core.trust import Trust
from app.door import blame, whole_answer
from app.door.after_failure import NextStep, Try, TryCounts, after_try
from app.door.client import Headers
from app.door.connection import ConnectFailed, EngineAnswer, UpstreamError
from app.door.door import Door
from app.door.errors import AnswerTimeout, RepeatedFailure, Unreached, WorkerFailed
from app.door.forwarding import Outgoing
from app.door.lifecycle import Lifecycle
from app.door.opening import Beginning, opening_of
from app.door.transfer.base import (
    NO_TRANSFER,
    RefusedWithSource,
    SourceCall,
    SourceFailed,
    Transfer,
    of_rank,
)
from app.door.transfer.kv_lease import LeaseEnded, TaintedTarget
from app.door.upstream import CONNECT_S, MAX_WHOLE_BYTES
from app.policy.decision import Decision, Source

log = logging.getLogger(__name__)

FIRST_TOKEN_S, TIMES_EXPECTED = 120.0, 10.0
"""A worker has so long until its first token, and so many times what was predicted: longer, and it
hangs. What is predicted of engines that others use as well may be far too short."""


@dataclass(slots=True)
class Tries:
    """One request's."""

    door: Door
    life: Lifecycle
    outgoing: Outgoing
    path: str
    headers: Headers
    tally: TryCounts = field(default_factory=TryCounts)
    _latest: EngineAnswer | None = None
    """The last answer that began, of which more may be to come than was read."""

    def abort(self) -> None:
        """Have no more of it come."""
        if self._latest is not None:
            self._latest.abort()

    async def begin(self) -> Beginning:
        """The beginning of an answer, by the worker that is the first to begin one. Raises as
        Carriage.run."""
        loop, patience = asyncio.get_running_loop(), self.door.patience
        streams = self.outgoing.asked.streams
        deadline_s = loop.time() + (patience.answer_s if streams else patience.whole_s)
        nobody: NoWorkers | None = None
        refusal: Beginning | None = None
        """What is answered if no other worker answers better."""
        failure: WorkerFailed | None = None
        then = NextStep.RETRY
        while then in (NextStep.RETRY, NextStep.ASK_AGAIN):
            is_late = False
            try:
                begun = await self._begun(deadline_s)
            except NoWorkers as error:
                # Its traceback refers to this frame, and that to all of the request.
                ended, nobody = Try.NOBODY, error.with_traceback(None)
            except UpstreamError as error:
                ended, failure = await self._failed(error)
                if ended is Try.BROKEN and (is_late := loop.time() >= deadline_s):
                    failure = AnswerTimeout(str(failure))
            else:
                if begun.failure is None:
                    is_own = begun.answer.status >= 400
                    if self.life.evidence.tries:
                        await self.life.evidence.judge(
                            is_answered=not is_own, is_own=is_own, began=is_own
                        )
                    return begun
                ended, refusal = Try.REFUSED, begun
                await self._refused(begun, begun.failure)
            then = after_try(
                ended,
                self.tally,
                None if refusal is None else refusal.failure,
                says_why=refusal is not None and refusal.says_why,
                is_late=is_late,
            )
            if then is NextStep.ASK_AGAIN and refusal is not None:
                self.tally.asked_again = True
                self.life.asks_again(refusal.worker)
        await self.life.evidence.judge(is_answered=False)
        if then is NextStep.REFUSE and refusal is not None:
            return refusal
        try:
            raise self._unanswered(failure, refusal, nobody)
        finally:
            failure = nobody = None  # they refer to this frame, and that to all of the request

    async def _begun(self, deadline_s: float) -> Beginning:
        """The beginning of the next worker's answer. Raises NoWorkers, UpstreamError."""
        decision = await self.life.decide()
        transfer = NO_TRANSFER
        if decision.source is not None:
            call = self._call(decision, decision.source, deadline_s)
            transfer = await self.door.sources.begin(call)
        begun = await self._sure(decision, transfer, deadline_s)
        self.abort()
        self._latest = begun.answer
        return begun

    async def _failed(self, error: UpstreamError) -> tuple[Try, WorkerFailed]:
        """Leave the worker that was asked, or its source; returns how that ended."""
        match error:
            case LeaseEnded() | RefusedWithSource() | TaintedTarget():
                return Try.NO_KV, self._goes_elsewhere(error)
            case SourceFailed():
                return Try.NO_KV, await self._source_failed(error)
        self.tally.broke(never_sent=isinstance(error, ConnectFailed))
        return Try.BROKEN, await self.broken(error)

    def _unanswered(
        self, failure: WorkerFailed | None, refusal: Beginning | None, nobody: NoWorkers | None
    ) -> KvrouteError:
        """failure: the last one. nobody: why no worker was asked."""
        if failure is not None:
            is_unreached = self.tally.nobody_had_it and not isinstance(failure, AnswerTimeout)
            return Unreached(str(failure)) if is_unreached else failure
        if refusal is None or refusal.failure is None:
            return nobody or NoWorkers("no worker is alive")
        said = f"{refusal.failure.cause} (status {refusal.answer.status})"
        return WorkerFailed(f"worker {refusal.worker.key}: {said}")

    async def _refused(self, begun: Beginning, failure: Failure) -> None:
        """Leave a worker whose answer another one is to better."""
        self.tally.refused += 1
        words = self.said(begun.first)
        if not blame.takes_no_more(failure):
            log.warning(
                "worker %s: %s (status %d): %s; request %s",
                *(begun.worker.key, failure.cause, begun.answer.status, words),
                self.life.record.request_id,
            )
        await self.life.worker_failed(failure, failure.cause, words)

    def said(self, by_engine: bytes) -> str:
        """As logs may have it."""
        return self.door.words.of(by_engine, self.outgoing.body)

    async def broken(self, error: UpstreamError) -> WorkerFailed:
        """Leave a worker that broke off; returns how it did."""
        worker = self.life.decision.worker
        failed = WorkerFailed(f"worker {worker.key}: {error}")
        log.warning("%s; request %s", failed, self.life.record.request_id)
        failure = blame.of_break(
            error.cause, is_late=error.is_late, is_whole=not self.outgoing.asked.streams
        )
        await self.life.worker_failed(failure, error.cause, str(error))
        if self.tally.has_broken_all:
            return RepeatedFailure(f"{failed}; so did another one while it had this request")
        return failed

    def _goes_elsewhere(self, error: UpstreamError) -> WorkerFailed:
        """What a source handed on, now or before, is at fault: leave its target, without a word
        against it."""
        failure = WorkerFailed(f"worker {self.life.decision.worker.key}: {error}")
        log.warning("%s; request %s", failure, self.life.record.request_id)
        self.tally.refused += 1
        self.life.goes_alone(error.cause, elsewhere=not isinstance(error, RefusedWithSource))
        return failure

    async def _source_failed(self, error: SourceFailed) -> WorkerFailed:
        source = self.life.decision.source
        assert source is not None
        failure = WorkerFailed(f"source {source.worker.key}: {error}")
        log.warning("%s; request %s", failure, self.life.record.request_id)
        self.tally.refused += 1
        await self.life.source_failed(error.failure, error.cause, str(error))
        return failure

    def _call(self, decision: Decision, source: Source, deadline_s: float) -> SourceCall:
        left_s = max(0.001, deadline_s - asyncio.get_running_loop().time())
        return SourceCall(
            kind=source.kind,
            source=source.worker,
            target=decision.worker,
            router=self.life.admitted.model.router,
            fetch=source.reservation.fetch if source.reservation else None,
            outgoing=self.outgoing,
            path=self.path,
            headers=self.headers,
            connect_s=min(CONNECT_S, left_s),
            answer_s=left_s,
            watch=partial(self.door.missing.waiting, self.life, source.worker),
            on_computed=partial(self.life.source_complete, decision),
        )

    async def _sure(self, decision: Decision, transfer: Transfer, deadline_s: float) -> Beginning:
        """As `_try`, if the worker has fetched, now and before, nothing of other prompts. Raises
        LeaseEnded and TaintedTarget besides."""
        leases, worker, lease = self.door.leases, decision.worker, transfer.lease
        sent_s = asyncio.get_running_loop().time()
        begun = None
        try:
            watched = nullcontext() if lease is None else leases.watched(lease)
            with self.door.missing.waiting(self.life, worker), watched:
                begun = await self._try(decision, transfer, deadline_s)
            if begun.failure is None and begun.answer.status == 200:
                router = self.life.admitted.model.router
                await leases.confirm(router, worker, lease, sent_s, self.headers)
        except BaseException:
            if begun is not None:
                begun.answer.abort()
            if lease is not None:
                leases.leave(lease)
            raise
        return begun

    async def _try(
        self,
        decision: Decision,
        transfer: Transfer,
        deadline_s: float,
        refused: frozenset[str] = frozenset(),
    ) -> Beginning:
        """The beginning of one worker's answer. refused: members that it has just refused. Raises
        UpstreamError, as RefusedWithSource and SourceFailed are."""
        worker = decision.worker
        engine = self.life.admitted.model.namespace, decision.incarnation
        without = refused | self.door.refused_by(*engine)
        left_s = max(0.001, deadline_s - asyncio.get_running_loop().time())
        if self.outgoing.asked.streams:
            left_s = min(left_s, FIRST_TOKEN_S + TIMES_EXPECTED * decision.expected_s)
        connect_s = min(CONNECT_S, left_s)
        more = [*self.life.trace.try_begins(str(worker.key)), *of_rank(worker)]
        body = self.outgoing.for_worker(worker, transfer.params, transfer.members, without)
        answering = self.door.upstream.send(
            worker.address,
            self.path,
            [*self.headers, *more],
            body,
            connect_s=connect_s,
            answer_s=left_s,
            # On a new connection nothing is sent twice.
            kept=self.life.record.tries == 1,
        )
        answer = await transfer.answer(answering)
        is_all = False
        failure: Failure | None
        in_events = self._is_in_events(answer)
        if in_events:
            first, failure = await opening_of(answer, left_s)
        else:
            first, is_all = await answer.read_up_to(MAX_WHOLE_BYTES, left_s)
            model = self.life.admitted.model.name
            failure = whole_answer.failure_of(
                *(answer.status, answer.headers, first),
                model=model,
                path=self.path,
                is_all=is_all,
            )
        if transfer.params and failure is None and 400 <= answer.status < 500:
            answer.abort()
            raise RefusedWithSource(f"answered {answer.status} to a request with a source")
        if answer.status in (400, 422) and not transfer.params:
            names = without | self.outgoing.named_in(first, worker)
            is_long = blame.of_length(answer.status, first) is not None
            if not is_long and self.outgoing.for_worker(worker, without=names) != body:
                answer.abort()
                self.life.trace.try_ends("members_refused")
                begun = await self._try(decision, transfer, deadline_s, names)
                if begun.answer.status < 400:
                    self.door.note_refused(*engine, names)
                return begun
        if failure is None and answer.status >= 400 and decision.trust is not Trust.BLIND:
            failure = blame.of_length(answer.status, first)
        return Beginning(worker, answer, first, is_all, in_events, failure)

    def _is_in_events(self, answer: EngineAnswer) -> bool:
        """Whether it should be. Engines that know no streams answer these as a whole."""
        is_stream = self.outgoing.asked.streams and answer.status == 200
        return is_stream and not whole_answer.is_json(answer.headers)
