"""Carries a request to a worker and the answer back."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from app.core.errors import KvrouteError, NoWorkers, RedisUnavailable
from app.core.worker_report import WorkerInfo
from app.door.bootstrap import Meetings, handover_of
from app.door.errors import RepeatedFailure, WorkerFailed
from app.door.forwarding import Outgoing, Parser
from app.door.lifecycle import Lifecycle
from app.door.members import headers_back
from app.door.migration import Migrating
from app.door.missing import Missing
from app.door.models import Model
from app.door.record import Usage
from app.door.sources import NOTHING, Call, Handover, LeaseEnded, SourceFailed, Sources, of_rank
from app.door.stream import TAIL_BYTES, Whole, usage_in
from app.door.upstream import ConnectFailed, EngineAnswer, Upstream, UpstreamBroken, UpstreamError
from app.policy.decision import Decision, Source
from app.policy.sources import TOGETHER

log = logging.getLogger(__name__)

Headers = Sequence[tuple[bytes, bytes]]

TRIES = 3
MAX_FAILED = 2
"""Workers that may fail while they have a request. It may be what they fail of, so that no more are
given it."""
CONNECT_S = 5.0
MAX_WHOLE_BYTES = 1024 * 1024
"""An answer that is not streamed is held back until it is complete, so that another worker can
still take its request; a larger one is passed on as it comes."""
FAILURES = (500, 502, 504)
BACK_PRESSURE = (429, 503)


class Client(Protocol):
    """Who takes an answer. All raise ClientStalled if it takes nothing for too long."""

    async def start(self, status: int, headers: Headers) -> None: ...

    async def send(self, piece: bytes, *, last: bool = False) -> None: ...

    async def refuse(self, status: int, headers: Headers, body: bytes, by: WorkerInfo) -> None:
        """A whole answer: an error, as the engine of that worker tells it."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds. answer: until an answer begins, over all tries. between: between pieces of one."""

    answer_s: float
    between_s: float


@dataclass(slots=True)
class _Begun:
    """An answer of which a first part is here. whole: all of it is."""

    worker: WorkerInfo
    answer: EngineAnswer
    first: bytes
    whole: bool


class Door:
    """Knows how to reach engines, and how long to wait for them."""

    def __init__(self, upstream: Upstream, patience: Patience, kv_lease_s: float) -> None:
        self.upstream = upstream
        self.sources = Sources(upstream, kv_lease_s)
        self.meetings = Meetings(upstream)
        self.patience = patience
        self.missing = Missing(upstream)

    async def run(self) -> None:
        """Look for workers that are gone, until cancelled."""
        await self.missing.run()

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

    async def pass_on(
        self, model: Model, body: bytes, path: str, headers: Headers, client: Client
    ) -> None:
        """Have any worker of `model` answer. Raises WorkerFailed if none does."""
        between_s = self.patience.between_s
        failure: UpstreamError | None = None
        for worker in random.sample(model.workers, min(TRIES, len(model.workers))):
            try:
                answer = await self.upstream.send(
                    worker.address, path, headers, body, connect_s=CONNECT_S, answer_s=between_s
                )
                piece, is_all = await answer.read_up_to(MAX_WHOLE_BYTES, between_s)
            except UpstreamError as error:
                failure = error
                continue
            try:
                headers = headers_back(answer.headers)
                if is_all and answer.status >= 400:
                    await client.refuse(answer.status, headers, piece, worker)
                    return
                more = [(b"content-length", b"%d" % len(piece))] if is_all else []
                await client.start(answer.status, headers + more)
                while not is_all and piece:
                    await client.send(piece)
                    piece = await answer.read(between_s)
                await client.send(piece, last=True)
            except UpstreamError as error:
                raise WorkerFailed(f"worker {worker.key}: {error}") from None
            finally:
                answer.abort()
            return
        raise WorkerFailed(f"model {model.name}: {failure}")


@dataclass(slots=True)
class _Carriage:
    """One request on its way. num_failed: workers that have failed while they had it."""

    door: Door
    life: Lifecycle
    outgoing: Outgoing
    path: str
    headers: Headers
    client: Client
    num_failed: int = 0

    async def run(self) -> None:
        begun = await self._begin()
        try:
            await self._relay(begun)
        finally:
            begun.answer.abort()

    async def _begin(self) -> _Begun:
        """The beginning of an answer, by the worker that is the first to begin one."""
        life, loop = self.life, asyncio.get_running_loop()
        deadline_s = loop.time() + self.door.patience.answer_s
        refusal: _Begun | None = None
        """What is answered if no other worker answers better."""
        failure: WorkerFailed | None = None
        for left in reversed(range(TRIES)):
            try:
                decision = await life.decide()
            except NoWorkers:
                break
            try:
                handover = await self._ask_source(decision, deadline_s)
                with self.door.missing.waiting(life, decision.worker):
                    begun = await self._try(decision, handover, deadline_s)
            except LeaseEnded as error:
                failure = self._lease_ended(error, decision)
                continue
            except SourceFailed as error:
                failure = await self._source_failed(error)
                continue
            except UpstreamError as error:
                failure = await self._failed(error)
                if isinstance(failure, RepeatedFailure) or loop.time() >= deadline_s:
                    break
                continue
            status = begun.answer.status
            if status not in FAILURES and status not in BACK_PRESSURE:
                return begun
            if refusal is not None:
                refusal.answer.abort()
            refusal = begun
            self.num_failed += status in FAILURES
            if not left or self.num_failed == MAX_FAILED:
                return refusal
            await self._leave(
                suspend=status in FAILURES and status != 500, is_full=status in BACK_PRESSURE
            )
        if refusal is not None:
            return refusal
        try:
            raise failure or NoWorkers("no worker is alive")
        finally:
            failure = None  # it refers to this frame, and that to all of the request

    async def _failed(self, error: UpstreamError) -> WorkerFailed:
        """Leave a worker that failed; returns how it did."""
        failure = WorkerFailed(f"worker {self.life.decision.worker.key}: {error}")
        log.warning("%s; request %s", failure, self.life.record.request_id)
        await self._leave(suspend=True)
        if not isinstance(error, ConnectFailed):  # else nothing of the request has reached it
            self.num_failed += 1
            if self.num_failed == MAX_FAILED:
                return RepeatedFailure(f"{failure}; so did another one while it had this request")
        return failure

    async def _leave(self, *, suspend: bool, is_full: bool = False) -> None:
        try:
            await self.life.worker_failed(suspend=suspend, is_full=is_full)
        except RedisUnavailable as error:
            log.debug("not told of a failed worker: %s", error)

    def _lease_ended(self, error: LeaseEnded, decision: Decision) -> WorkerFailed:
        worker = (
            decision.worker if error.is_fetched or not decision.source else decision.source.worker
        )
        failure = WorkerFailed(f"worker {worker.key}: {error}")
        log.warning("%s; request %s", failure, self.life.record.request_id)
        self.life.lease_ended(is_fetched=error.is_fetched)
        return failure

    async def _source_failed(self, error: SourceFailed) -> WorkerFailed:
        source = self.life.decision.source
        assert source is not None
        failure = WorkerFailed(f"source {source.worker.key}: {error}")
        log.warning("%s; request %s", failure, self.life.record.request_id)
        with suppress(RedisUnavailable):
            await self.life.source_failed(suspend=error.suspend)
        return failure

    async def _ask_source(self, decision: Decision, deadline_s: float) -> Handover:
        """What the decision's source hands on. Raises SourceFailed, LeaseEnded."""
        if decision.source is None:
            return NOTHING
        if decision.source.worker.kv_transfer == TOGETHER:
            return handover_of(decision.source.worker)
        source = decision.source
        try:
            with self.door.missing.waiting(self.life, source.worker):
                handover = await self.door.sources.ask(self._call(source, deadline_s))
        except UpstreamBroken as error:
            raise SourceFailed(str(error), suspend=True) from None
        self.life.source_complete(decision)
        return handover

    def _call(self, source: Source, deadline_s: float) -> Call:
        left_s = max(0.001, deadline_s - asyncio.get_running_loop().time())
        connect_s = min(CONNECT_S, left_s)
        return Call(source, self.outgoing, self.path, self.headers, connect_s, left_s)

    async def _try(self, decision: Decision, handover: Handover, deadline_s: float) -> _Begun:
        """The beginning of one worker's answer. Raises UpstreamError, as LeaseEnded and
        SourceFailed are."""
        worker = decision.worker
        left_s = max(0.001, deadline_s - asyncio.get_running_loop().time())
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
        if self.outgoing.asked.streams and answer.status == 200:
            first = await answer.read(left_s)
        else:
            first, is_all = await answer.read_up_to(MAX_WHOLE_BYTES, left_s)
        try:
            handover.check()
        except LeaseEnded:
            answer.abort()
            raise
        return _Begun(worker, answer, first, is_all)

    async def _relay(self, begun: _Begun) -> None:
        """Pass an answer on. While it migrates, another worker's beginning takes the place of
        `begun`."""
        life, client, answer = self.life, self.client, begun.answer
        headers = headers_back(answer.headers)
        life.record.status = answer.status
        if begun.whole:
            usage = self._usage(begun.first) if answer.status == 200 else None
            life.first_token(is_seen=False)
            life.end("ok" if answer.status < 400 else "refused", usage=usage)
            if answer.status >= 400:
                await client.refuse(answer.status, headers, begun.first, begun.worker)
                return
            headers.append((b"content-length", b"%d" % len(begun.first)))
            await client.start(answer.status, headers)
            await client.send(begun.first, last=True)
            return
        parser: Parser = Whole()
        if self.outgoing.asked.streams and answer.status == 200:
            parser = self.outgoing.parser()
            headers += _STREAM_HEADERS
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
        outcome = "error_event" if parser.failed else "ok"
        life.end(outcome, ended_by="worker", usage=self._usage(parser.tail))
        await client.send(rest, last=True)

    def _usage(self, text: bytes) -> Usage | None:
        most = self.outgoing.most_tokens(self.life.decision.worker)
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
                raise UpstreamBroken("told an error")
            piece = await begun.answer.read(self.door.patience.between_s)

    async def _migrate(self, begun: _Begun, parser: Parser, error: UpstreamError) -> None:
        """Have another worker go on with the answer. Raises WorkerFailed if none can."""
        failure = WorkerFailed(f"worker {self.life.decision.worker.key}: {error}")
        try:
            if not isinstance(parser, Migrating) or not parser.can_go_on:
                raise failure
            if not self.outgoing.goes_on(parser.output):
                raise failure
            begun.answer.abort()
            failure = await self._failed(error)
            if isinstance(failure, RepeatedFailure):
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


_STREAM_HEADERS = [(b"x-accel-buffering", b"no"), (b"cache-control", b"no-cache")]
