"""Carries a request to a worker and the answer back."""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from math import isinf

from app.core.errors import KvrouteError, NoWorkers, RedisUnavailable
from app.core.failures import Failure, Whose
from app.core.outcomes import of_refusal
from app.core.worker_report import WorkerInfo
from app.door import after_failure, whole_answer
from app.door.after_failure import Tally
from app.door.any_worker import AnyWorker
from app.door.client import Client, Headers
from app.door.engine_words import EngineWords
from app.door.errors import AnswerTimeout, RepeatedFailure, Unreached, WorkerFailed
from app.door.forwarding import Outgoing, Parser
from app.door.lifecycle import Lifecycle
from app.door.members import headers_back
from app.door.migration import Migrating
from app.door.missing import MissingWorkers
from app.door.opening import Opening
from app.door.record import Usage
from app.door.stream import TAIL_BYTES, Whole, usage_in
from app.door.transfer.leases import KvLease, KvLeases, LeaseEnded, TaintedTarget
from app.door.transfer.outcomes import PairTransfers
from app.door.transfer.sglang import Meetings, handover_of
from app.door.transfer.sources import (
    NOTHING,
    TOOK_TOO_LONG,
    Call,
    Handover,
    RefusedWithSource,
    SourceFailed,
    Sources,
    nudge,
    of_rank,
    source_failed,
)
from app.door.upstream import (
    CONNECT_S,
    MAX_WHOLE_BYTES,
    ConnectFailed,
    EngineAnswer,
    Upstream,
    UpstreamBroken,
    UpstreamError,
)
from app.policy.decision import Decision, Source
from app.policy.kv_lease import Leases
from app.policy.transfer import TOGETHER
from app.policy.trust import Trust

log = logging.getLogger(__name__)

FIRST_TOKEN_S, TIMES_EXPECTED = 120.0, 10.0
"""A worker has so long until its first token, and so many times what was predicted: longer, and it
hangs. What is predicted of engines that others use as well may be far too short."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds. answer: until an answer begins, over all tries. whole: until one has come that comes
    in one piece. between: between pieces of one."""

    answer_s: float
    whole_s: float
    between_s: float


@dataclass(slots=True)
class _Begun:
    """An answer of which a first part is here. whole: all of it is. in_events: it is a stream.
    failure: why another worker is to be asked; None: it is one to pass on."""

    worker: WorkerInfo
    answer: EngineAnswer
    first: bytes
    whole: bool
    in_events: bool
    failure: Failure | None = None

    @property
    def says_why(self) -> bool:
        """Whether it tells an error, as its API has it, or as engines do."""
        is_error = self.failure is not None and self.failure.cause == after_failure.ERROR_EVENT
        return bool(self.first) and (is_error or self.answer.status >= 400)


class Door:
    """Knows how to reach engines, and how long to wait for them."""

    def __init__(self, upstream: Upstream, patience: Patience, kv_lease_s: float) -> None:
        self.upstream = upstream
        self.sources = Sources(upstream, kv_lease_s)
        self.meetings = Meetings(upstream)
        self.patience = patience
        self.missing = MissingWorkers(upstream)
        self.words = EngineWords()
        self.any_worker = AnyWorker(upstream, patience.between_s, self.words)
        self.leases = KvLeases()
        self.transfers = PairTransfers()

    async def run(self) -> None:
        """Look for workers that are gone, and after leases, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.missing.run())
            tasks.create_task(self.leases.run())
            tasks.create_task(self.transfers.run())

    async def carry(
        self,
        life: Lifecycle,
        outgoing: Outgoing,
        path: str,
        headers: Headers,
        client: Client,
    ) -> None:
        """Have a worker answer; ends `life` unless it raises.

        Until the first byte has gone out to the client, another worker takes the place of one that
        failed; later, one goes on with a stream that can migrate. Raises as Router.route does;
        WorkerFailed if there is no further one to try, or one fails later; RepeatedFailure if no
        further one is to be tried.
        """
        await _Carriage(self, life, outgoing, path, headers, client).run()


@dataclass(slots=True)
class _Carriage:
    """One request on its way.

    refusals: decisions whose workers have answered that they fail, and how. That is counted against
    them, and taken back if no other worker answers better.
    """

    door: Door
    life: Lifecycle
    outgoing: Outgoing
    path: str
    headers: Headers
    client: Client
    tally: Tally = field(default_factory=Tally)
    refusals: list[tuple[Decision, Failure]] = field(default_factory=list)
    _open: ExitStack = field(default_factory=ExitStack)
    """Aborts the last answer that began, of which more may be to come than was read."""
    _is_asked_again: bool = False

    async def run(self) -> None:
        with self._open:
            await self._relay(await self._begin())

    async def _begin(self) -> _Begun:
        """The beginning of an answer, by the worker that is the first to begin one."""
        life, loop = self.life, asyncio.get_running_loop()
        streams, patience = self.outgoing.asked.streams, self.door.patience
        deadline_s = loop.time() + (patience.answer_s if streams else patience.whole_s)
        nobody: NoWorkers | None = None
        refusal: _Begun | None = None
        """What is answered if no other worker answers better."""
        failure: WorkerFailed | None = None
        while not self.tally.is_over:
            try:
                decision = await life.decide()
            except NoWorkers as error:
                if self._is_asked_again or not self._may_pass(refusal):
                    nobody = error
                    break
                self._is_asked_again = True
                life.asks_again()
                continue
            try:
                handover = await self._ask_source(decision, deadline_s)
                begun = await self._sure(decision, handover, deadline_s)
            except (LeaseEnded, RefusedWithSource, TaintedTarget) as error:
                failure = self._goes_elsewhere(error, decision)
                continue
            except SourceFailed as error:
                failure = await self._source_failed(error)
                continue
            except UpstreamError as error:
                failure = await self._broken(error)
                if loop.time() >= deadline_s:
                    failure = AnswerTimeout(str(failure))
                    break
                if isinstance(failure, RepeatedFailure):
                    break
                continue
            self._open.close()
            self._open.callback(begun.answer.abort)
            if begun.failure is None:
                if begun.answer.status >= 400:
                    await self._pardon()
                return begun
            refusal = begun
            await self._refused(decision, begun, begun.failure)
        if len(self.refusals) > 1:
            await self._pardon()
        if refusal is not None and refusal.says_why:
            return refusal
        try:
            raise self._unanswered(failure, refusal, nobody)
        finally:
            failure = nobody = None  # they refer to this frame, and that to all of the request

    def _unanswered(
        self, failure: WorkerFailed | None, refusal: _Begun | None, nobody: NoWorkers | None
    ) -> KvrouteError:
        """failure: the last one. nobody: why no worker was asked."""
        if failure is not None:
            is_unreached = self.tally.nobody_had_it and not isinstance(failure, AnswerTimeout)
            return Unreached(str(failure)) if is_unreached else failure
        if refusal is None or refusal.failure is None:
            return nobody or NoWorkers("no worker is alive")
        said = f"{refusal.failure.cause} (status {refusal.answer.status})"
        return WorkerFailed(f"worker {refusal.worker.key}: {said}")

    def _may_pass(self, refusal: _Begun | None) -> bool:
        """Whether the only worker that had it may do better if it has it again."""
        failure = refusal.failure if refusal is not None else None
        return (
            failure is not None
            and (self.tally.refused, self.tally.broken) == (1, 0)
            and failure.whose is Whose.EITHER
        )

    async def _refused(self, decision: Decision, begun: _Begun, failure: Failure) -> None:
        """Leave a worker whose answer another one is to better."""
        self.tally.refused += 1
        words = self._said(begun.first)
        if not after_failure.takes_no_more(failure):
            self.refusals.append((decision, failure))
            log.warning(
                "worker %s: %s (status %d): %s; request %s",
                *(begun.worker.key, failure.cause, begun.answer.status, words),
                self.life.record.request_id,
            )
        await self._leave(failure, failure.cause, words)

    def _said(self, by_engine: bytes) -> str:
        """As logs may have it."""
        return self.door.words.of(by_engine, self.outgoing.body)

    async def _pardon(self) -> None:
        """What workers refused, others refuse too: that is the request's own fault."""
        try:
            await self.life.pardon(self.refusals)
        except RedisUnavailable as error:
            log.debug("workers not pardoned: %s", error)
        self.refusals = []

    async def _broken(self, error: UpstreamError) -> WorkerFailed:
        """Leave a worker that broke off; returns how it did."""
        worker = self.life.decision.worker
        failed = WorkerFailed(f"worker {worker.key}: {error}")
        log.warning("%s; request %s", failed, self.life.record.request_id)
        failure = after_failure.of_break(
            error.cause, is_late=error.is_late, is_whole=not self.outgoing.asked.streams
        )
        await self._leave(failure, error.cause, str(error))
        self.tally.broke(never_sent=isinstance(error, ConnectFailed))
        if self.tally.has_broken_all:
            return RepeatedFailure(f"{failed}; so did another one while it had this request")
        return failed

    async def _leave(self, failure: Failure | None, cause: str, words: str) -> None:
        try:
            await self.life.worker_failed(failure, cause, words)
        except RedisUnavailable as error:
            log.debug("not told of a failed worker: %s", error)

    def _goes_elsewhere(self, error: UpstreamError, decision: Decision) -> WorkerFailed:
        """What a source handed on, now or before, is at fault: leave its target, without a word
        against it."""
        failure = WorkerFailed(f"worker {decision.worker.key}: {error}")
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
        with suppress(RedisUnavailable):
            await self.life.source_failed(error.failure, error.cause, str(error))
        return failure

    async def _ask_source(self, decision: Decision, deadline_s: float) -> Handover:
        """What the decision's source hands on. Raises SourceFailed."""
        if decision.source is None:
            return NOTHING
        if decision.source.worker.kv_transfer == TOGETHER:
            return handover_of(decision.source.worker)
        source = decision.source
        try:
            with self.door.missing.waiting(self.life, source.worker):
                handover = await self.door.sources.ask(self._call(source, deadline_s))
        except UpstreamBroken as error:
            raise source_failed(error) from None
        self.life.source_complete(decision)
        return handover

    def _call(self, source: Source, deadline_s: float) -> Call:
        left_s = max(0.001, deadline_s - asyncio.get_running_loop().time())
        connect_s = min(CONNECT_S, left_s)
        books = partial(self.life.admitted.model.router.fleet.lease_books, source.worker)
        return Call(source, self.outgoing, self.path, self.headers, connect_s, left_s, books)

    def _lease(self, decision: Decision, handover: Handover) -> KvLease | None:
        """What the target has of its source; None: it needs none. Raises SourceFailed."""
        if decision.source is None or isinf(handover.kept_s):
            return None
        source = decision.source.worker
        lease = KvLease(
            self.life.admitted.model.router,
            source,
            decision.worker,
            self.outgoing.asked.streams,
            handover.asked_s,
            handover.kept_s,
            handover.before,
            partial(nudge, self.door.upstream, source, self.headers),
        )
        if not lease.is_sure and lease.state() is not Leases.KEPT:
            raise SourceFailed(TOOK_TOO_LONG, None)
        return lease

    async def _sure(self, decision: Decision, handover: Handover, deadline_s: float) -> _Begun:
        """As `_try`, if the worker has fetched, now and before, nothing of other prompts. Raises
        LeaseEnded and TaintedTarget besides."""
        leases, worker = self.door.leases, decision.worker
        lease, sent_s = self._lease(decision, handover), asyncio.get_running_loop().time()
        begun = awaited = None
        try:
            with ExitStack() as waits:
                waits.enter_context(self.door.missing.waiting(self.life, worker))
                if lease is not None:
                    waits.enter_context(leases.watched(lease))
                    awaited = self.door.transfers.sent(lease.router, lease.source, worker)
                begun = await self._try(decision, handover, deadline_s)
            if awaited is not None:
                awaited.began()
            if begun.failure is None and begun.answer.status == 200:
                await leases.confirm(worker.key, sent_s, lease)
                if self.life.admitted.model.router.fleet.is_tainted(worker.key):
                    raise TaintedTarget("may hold KV that is not its prompt's")
        except BaseException:
            if begun is not None:
                begun.answer.abort()
            if lease is not None:
                leases.leave(lease)
            raise
        return begun

    async def _try(self, decision: Decision, handover: Handover, deadline_s: float) -> _Begun:
        """The beginning of one worker's answer. Raises UpstreamError, as RefusedWithSource and
        SourceFailed are."""
        worker = decision.worker
        left_s = max(0.001, deadline_s - asyncio.get_running_loop().time())
        if self.outgoing.asked.streams:
            left_s = min(left_s, FIRST_TOKEN_S + TIMES_EXPECTED * decision.expected_s)
        connect_s = min(CONNECT_S, left_s)
        more = [*self.life.trace.try_begins(str(worker.key)), *of_rank(worker)]
        answering = self.door.upstream.send(
            worker.address,
            self.path,
            [*self.headers, *more],
            self.outgoing.for_worker(worker, handover.params, handover.members),
            connect_s=connect_s,
            answer_s=left_s,
            # On a new connection nothing is sent twice.
            kept=self.life.record.tries == 1,
        )
        if handover.members and decision.source is not None:
            answering = self.door.meetings.beside(
                self._call(decision.source, deadline_s),
                worker,
                handover,
                answering,
                watch=self.door.missing.waiting(self.life, decision.source.worker),
                on_computed=partial(self.life.source_complete, decision),
            )
        answer = await answering
        is_all = False
        failure: Failure | None
        in_events = self._is_in_events(answer)
        if in_events:
            first, failure = await _opening(answer, left_s)
        else:
            first, is_all = await answer.read_up_to(MAX_WHOLE_BYTES, left_s)
            model = self.life.admitted.model.name
            failure = whole_answer.failure_of(
                *(answer.status, answer.headers, first),
                model=model,
                path=self.path,
                is_all=is_all,
            )
        if handover.params and failure is None and 400 <= answer.status < 500:
            answer.abort()
            raise RefusedWithSource(f"answered {answer.status} to a request with a source")
        if failure is None and decision.trust is not Trust.BLIND:
            failure = after_failure.of_length(answer.status, first)
        return _Begun(worker, answer, first, is_all, in_events, failure)

    def _is_in_events(self, answer: EngineAnswer) -> bool:
        """Whether it should be. Engines that know no streams answer these as a whole."""
        is_stream = self.outgoing.asked.streams and answer.status == 200
        return is_stream and not whole_answer.is_json(answer.headers)

    async def _relay(self, begun: _Begun) -> None:
        """Pass an answer on. While it migrates, another worker's beginning takes the place of
        `begun`."""
        life, client, answer = self.life, self.client, begun.answer
        headers = headers_back(answer.headers)
        status = answer.status
        if begun.whole and status == 200:
            status = 502 if begun.failure else whole_answer.status_of(begun.first)
        life.record.status = status
        if begun.whole and status >= 400:
            failure = begun.failure
            is_full = failure is not None and after_failure.takes_no_more(failure)
            life.record.error = self._said(begun.first)
            outcome = of_refusal(status, is_failure=failure is not None, is_full=is_full)
            life.end(outcome, ended_by="worker")
            await client.refuse(status, headers, begun.first, begun.worker)
            return
        if begun.whole:
            life.first_token(is_seen=False)
            life.end("ok", usage=self._usage(begun.first, begun.worker))
            await client.whole(answer.status, headers, begun.first)
            return
        parser: Parser = Whole()
        if begun.in_events:
            parser = self.outgoing.parser()
            life.hears(lambda: (parser.num_said, self._usage(parser.tail, begun.worker)))
            headers = [each for each in headers if each[0] not in _OF_STREAMS]
            headers += _OF_STREAMS.items()
        await client.start(answer.status, headers)
        while True:
            try:
                with self.door.missing.waiting(life, begun.worker):
                    await self._pass(begun, parser)
            except UpstreamError as error:
                if isinstance(parser, Migrating) and parser.is_finished:
                    rest = parser.ending()
                    break
                await self._migrate(begun, parser, error)
            else:
                rest = parser.rest()
                break
        outcome = "ok"
        if parser.failed:
            outcome = "error_event"
            life.record.error = self._said(parser.error)
            if begun.failure is None and (failure := after_failure.of_event(parser.error)):
                await self._leave(failure, failure.cause, life.record.error)
        usage = self._usage(parser.tail, begun.worker) if outcome == "ok" else None
        life.end(outcome, ended_by="worker", usage=usage)
        await client.send(rest, last=True)

    def _usage(self, text: bytes, worker: WorkerInfo) -> Usage | None:
        most = self.outgoing.most_tokens(worker)
        return usage_in(text[-TAIL_BYTES:], most)

    async def _pass(self, begun: _Begun, parser: Parser) -> None:
        """Pass the answer of one worker on. Raises UpstreamBroken."""
        piece = begun.first
        while piece:
            passed = parser.passed(piece)
            if parser.has_first_token:
                self.life.first_token()
            if passed:
                await self.client.send(passed)
            if parser.is_broken:
                raise UpstreamBroken("told an error", cause=after_failure.ERROR_EVENT)
            piece = await begun.answer.read(self.door.patience.between_s)
        if not parser.has_ended and begun.answer.status == 200:
            raise UpstreamBroken("ended before its answer did", cause=after_failure.CUT)

    async def _migrate(self, begun: _Begun, parser: Parser, error: UpstreamError) -> None:
        """Have another worker go on with the answer. Raises WorkerFailed if none can."""
        begun.answer.abort()
        failure = await self._broken(error)
        try:
            if not isinstance(parser, Migrating) or not parser.can_go_on:
                raise failure
            if not self.outgoing.goes_on(parser.output) or isinstance(failure, RepeatedFailure):
                raise failure
            self.life.goes_on(parser.output)
            try:
                next_one = await self._begin()
            except RepeatedFailure:
                raise
            except KvrouteError:
                raise failure from None
            begun.worker, begun.answer = next_one.worker, next_one.answer
            begun.first = next_one.first
            if begun.answer.status != 200:
                raise failure
        finally:
            del failure  # as in _begin
        parser.goes_on()


async def _opening(answer: EngineAnswer, within_s: float) -> tuple[bytes, Failure | None]:
    """What has come of a stream once it says something, and how it fails if that is an error. What
    says nothing for long, or at length, is passed on as it is."""
    loop, opening = asyncio.get_running_loop(), Opening()
    until_s = loop.time() + within_s
    while not opening.is_over:
        left_s = until_s - loop.time()
        if opening.text and left_s <= 0:
            break
        opening.take(await answer.read(left_s))
    if opening.is_empty:
        return opening.text, after_failure.wrong(after_failure.EMPTY)
    if opening.is_foreign:
        return opening.text, after_failure.wrong(after_failure.FOREIGN)
    return opening.text, after_failure.of_event(opening.error) if opening.error else None


_OF_STREAMS = {
    b"content-type": b"text/event-stream; charset=utf-8",
    b"x-accel-buffering": b"no",
    b"cache-control": b"no-cache",
}
