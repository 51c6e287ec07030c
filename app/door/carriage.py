"""Carries a request to the worker that is chosen for it, and the answer back: the common path, from
top to bottom. What is not common leaves it: for further workers (`tries`), KV of a source
(`transfer`), and streams that another worker goes on with (`migration`)."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from functools import partial

from app.core.errors import KvrouteError, NoWorkers
from app.core.failures import Failure
from app.core.fetches import NIXL
from app.core.outcomes import OK, of_refusal
from app.core.trust import Trust
from app.door import blame
from app.door.answer.events import usage_in
from app.door.answer.migration import Migrating
from app.door.answer.stream import Whole, opening_of
from app.door.door import Door
from app.door.engine.connection import EngineAnswer, UpstreamBroken, UpstreamError
from app.door.engine.signs import Awaited
from app.door.engine.upstream import CONNECT_S, MAX_WHOLE_BYTES
from app.door.engine.waits import Wait
from app.door.errors import RepeatedFailure, WorkerFailed
from app.door.forwarding import Headers, Outgoing, Recipient, headers_back
from app.door.lifecycle import Lifecycle, Parser
from app.door.transfer.base import NO_TRANSFER, RefusedWithSource, SourceCall, Transfer, of_rank
from app.door.tries import Beginning, Tries
from app.policy.decision import Decision, Source

FIRST_TOKEN_S, TIMES_EXPECTED = 120.0, 10.0
"""A worker has so long until its first token, and so many times what was predicted: longer, and it
hangs. What is predicted of engines that others use as well may be far too short."""
_STREAM_HEADERS = {
    b"content-type": b"text/event-stream; charset=utf-8",
    b"x-accel-buffering": b"no",
    b"cache-control": b"no-cache",
}
_NONE: frozenset[str] = frozenset()


class Carriage:
    """One request on its way."""

    def __init__(
        self,
        door: Door,
        life: Lifecycle,
        outgoing: Outgoing,
        path: str,
        headers: Headers,
        client: Recipient,
    ) -> None:
        self.door = door
        self.life = life
        self.outgoing = outgoing
        self.client = client
        self._path = path
        self._headers = headers
        self._latest: EngineAnswer | None = None
        """The last answer that began, of which more may be to come than was read."""
        self._wait: Wait[Awaited]
        """Opened around each wait for the worker that has the request."""
        self._tries: Tries | None = None
        """None while no worker has failed."""

    async def run(self) -> None:
        """Has a worker answer, and ends `life` unless it raises. Raises as Router.route;
        WorkerFailed if no further worker is left to try, or one fails once the client has got
        something; RepeatedFailure if no further one is to be tried."""
        life = self.life
        try:
            await self._relay(await self._begin())
        except WorkerFailed:
            await life.judge(is_answered=False)
            raise
        finally:
            if self._latest is not None:
                self._latest.abort()
            if life.evidence is not None:
                life.evidence.withdraw()

    async def _begin(self) -> Beginning:
        """Returns the first answer that no other worker is to better. Raises as `run`."""
        streams, patience = self.outgoing.asked.streams, self.door.patience
        wait_s = patience.answer_s if streams else patience.whole_s
        deadline_s = asyncio.get_running_loop().time() + wait_s
        if self._tries is not None:
            self._tries.begin()
        while True:
            try:
                begun = await self._next(deadline_s)
            except (NoWorkers, UpstreamError) as error:
                await self._failed.note(error, deadline_s)
            else:
                if begun.failure is None:
                    if self.life.evidence is not None:
                        is_own = begun.answer.status >= 400
                        await self.life.judge(is_answered=not is_own, is_own=is_own, began=is_own)
                    return begun
                await self._failed.note_refusal(begun, begun.failure)
            if not self._failed.may_go_on:
                return await self._failed.last()

    @property
    def _failed(self) -> Tries:
        """The tries that failed, which are noted from the first one on."""
        if self._tries is None:
            self._tries = Tries(self.door, self.life, self.outgoing)
        return self._tries

    async def _next(self, deadline_s: float) -> Beginning:
        """Returns the beginning of the next worker's answer. Raises NoWorkers, UpstreamError."""
        decision = await self.life.decide()
        worker, transfer = decision.worker, NO_TRANSFER
        if decision.source is not None:
            call = self._call(decision, decision.source, deadline_s)
            transfer = await self.door.sources.begin(call)
        if worker.kv_transfer == NIXL:
            begun = await self._sure(decision, transfer, deadline_s)
        else:
            self._wait = self.door.missing.waiting(self.life, worker)
            with self._wait:
                begun = await self._ask(decision, transfer, deadline_s)
        if self._latest is not None:
            self._latest.abort()
        self._latest = begun.answer
        return begun

    async def _ask(
        self,
        decision: Decision,
        transfer: Transfer,
        deadline_s: float,
        refused: frozenset[str] = _NONE,
    ) -> Beginning:
        """Returns the beginning of one worker's answer. refused: members that it has just refused.
        Raises UpstreamError, of which RefusedWithSource and SourceFailed are."""
        life, outgoing, worker = self.life, self.outgoing, decision.worker
        assert life.model is not None
        engine = life.model.namespace, decision.incarnation
        without = refused | self.door.refused_by(*engine)
        left_s = max(0.001, deadline_s - asyncio.get_running_loop().time())
        if outgoing.asked.streams:
            left_s = min(left_s, FIRST_TOKEN_S + TIMES_EXPECTED * decision.expected_s)
        traced = () if life.trace is None else life.trace.try_begins(life.worker)
        body = outgoing.for_worker(worker, transfer.params, transfer.members, without)
        answering = self.door.upstream.send(
            worker.address,
            self._path,
            [*self._headers, *traced, *of_rank(worker)],
            body,
            connect_s=min(CONNECT_S, left_s),
            answer_s=left_s,
            # On a new connection nothing is sent twice.
            kept=life.tries == 1,
        )
        answer = await (answering if transfer is NO_TRANSFER else transfer.answer(answering))
        begun = await self._judged(decision, answer, left_s)
        if transfer.params and begun.failure is None and 400 <= answer.status < 500:
            answer.abort()
            raise RefusedWithSource(f"answered {answer.status} to a request with a source")
        if answer.status not in (400, 422) or transfer.params:
            return begun
        names = without | outgoing.named_in(begun.first, worker)
        is_long = blame.of_length(answer.status, begun.first) is not None
        if is_long or outgoing.for_worker(worker, without=names) == body:
            return begun
        answer.abort()
        if life.trace is not None:
            life.trace.try_ends("members_refused")
        begun = await self._ask(decision, transfer, deadline_s, names)
        if begun.answer.status < 400:
            self.door.note_refused(*engine, names)
        return begun

    async def _judged(self, decision: Decision, answer: EngineAnswer, left_s: float) -> Beginning:
        """Returns as much of an answer as tells whether it is passed on. left_s: for that much.
        Raises UpstreamBroken."""
        status, is_all = answer.status, False
        # Engines that know no streams answer these as a whole.
        in_events = (
            self.outgoing.asked.streams and status == 200 and not blame.is_json(answer.headers)
        )
        failure: Failure | None
        if in_events:
            first, failure = await opening_of(answer, left_s)
        else:
            first, is_all = await answer.read_up_to(MAX_WHOLE_BYTES, left_s)
            failure = blame.failure_of(
                *(status, answer.headers, first),
                model=self.life.model_name,
                path=self._path,
                is_all=is_all,
            )
        if failure is None and status >= 400 and decision.trust is not Trust.BLIND:
            failure = blame.of_length(status, first)
        return Beginning(decision.worker, answer, first, is_all, in_events, failure)

    async def _relay(self, begun: Beginning) -> None:
        """Passes an answer on. While it migrates, another worker's beginning takes the place of
        `begun`."""
        life, client, answer = self.life, self.client, begun.answer
        headers = headers_back(answer.headers)
        if begun.whole:
            await self._relay_whole(begun, headers)
            return
        life.status = answer.status
        parser: Parser = self.outgoing.parser() if begun.in_events else Whole()
        life.parser = parser
        if begun.in_events:
            headers = [each for each in headers if each[0] not in _STREAM_HEADERS]
            headers += _STREAM_HEADERS.items()
        await client.start(answer.status, headers)
        rest: bytes | None = None
        while rest is None:
            life.most_tokens = self.outgoing.most_tokens(begun.worker)
            try:
                with self._wait:
                    await self._pass(begun, parser)
                rest = parser.rest()
            except UpstreamError as error:
                if isinstance(parser, Migrating) and parser.is_finished:
                    rest = parser.ending()
                else:
                    begun = await self._migrated(begun, parser, error)
        if parser.error:
            await self._end_by_error(begun, parser.error)
        else:
            if life.marked or life.evidence is not None:
                await life.answered()
            life.end(OK, ended_by="worker", usage=life.told())
        await client.send(rest, last=True)

    async def _pass(self, begun: Beginning, parser: Parser) -> None:
        """Passes the answer of one worker on. Raises UpstreamBroken."""
        life, client = self.life, self.client

        def take(piece: bytes) -> bool:
            passed = parser.passed(piece)
            if parser.has_first_token:
                life.first_token()
            keeps_up = not passed or client.offer(passed)
            if parser.is_finished:
                life.is_said = True
            return keeps_up and not parser.broken

        may_come = True
        if begun.first:
            take(begun.first)
        while may_come:
            await client.taken()
            if parser.broken:
                raise UpstreamBroken(f"ended by {parser.broken}", cause=parser.broken)
            may_come = await begun.answer.give(take, self.door.patience.between_s)
        if not (parser.is_finished or parser.has_ended) and begun.answer.status == 200:
            raise UpstreamBroken("ended before its answer did", cause=blame.CUT)

    async def _relay_whole(self, begun: Beginning, headers: Headers) -> None:
        life, failure, status = self.life, begun.failure, begun.answer.status
        if status == 200:
            status = 502 if failure else blame.status_of(begun.first)
        life.status = status
        if status < 400:
            life.first_token(is_seen=False)
            if life.marked or life.evidence is not None:
                await life.answered()
            life.end(OK, usage=usage_in(begun.first, self.outgoing.most_tokens(begun.worker)))
            await self.client.whole(begun.answer.status, headers, begun.first)
            return
        is_full = failure is not None and blame.takes_no_more(failure)
        life.error = self._failed.said(begun.first)
        life.end(
            of_refusal(status, is_failure=failure is not None, is_full=is_full), ended_by="worker"
        )
        await self.client.refuse(status, headers, begun.first, begun.worker)

    async def _end_by_error(self, begun: Beginning, event: bytes) -> None:
        """Ends a stream in which the engine has told an error."""
        life = self.life
        life.error = self._failed.said(event)
        if begun.failure is None and (failure := blame.of_event(event)):
            await life.worker_failed(failure, failure.cause, life.error)
        await life.judge(is_answered=False)
        life.end("error_event", ended_by="worker")

    async def _migrated(self, begun: Beginning, parser: Parser, error: UpstreamError) -> Beginning:
        """Returns the beginning of what another worker says behind what has been passed on. Raises
        WorkerFailed if none is to go on, or can."""
        counts = self._failed.counts
        begun.answer.abort()
        may_go_on = isinstance(parser, Migrating) and parser.can_go_on
        failed = await self._failed.leave(error)
        try:
            if not isinstance(parser, Migrating) or not may_go_on or counts.is_over:
                raise failed
            if not self.outgoing.goes_on(parser.output):
                raise failed
            self.life.goes_on(parser.output)
            try:
                next_one = await self._begin()
            except RepeatedFailure:
                raise
            except KvrouteError:
                raise failed from None
            if next_one.answer.status != 200:
                raise failed
        finally:
            del failed  # it refers to this frame, and that to all of the request
        parser.goes_on()
        return next_one

    def _call(self, decision: Decision, source: Source, deadline_s: float) -> SourceCall:
        left_s = max(0.001, deadline_s - asyncio.get_running_loop().time())
        return SourceCall(
            kind=source.kind,
            source=source.worker,
            target=decision.worker,
            router=self.life.router,
            fetch=source.reservation.fetch if source.reservation else None,
            outgoing=self.outgoing,
            path=self._path,
            headers=self._headers,
            connect_s=min(CONNECT_S, left_s),
            answer_s=left_s,
            watch=partial(self.door.missing.waiting, self.life, source.worker),
            on_computed=partial(self.life.source_complete, decision),
        )

    async def _sure(self, decision: Decision, transfer: Transfer, deadline_s: float) -> Beginning:
        """Returns the beginning of a worker's answer, once it is sure that the worker has fetched
        nothing of other prompts. Raises as `_ask`, LeaseEnded and TaintedTarget."""
        door, worker, lease = self.door, decision.worker, transfer.lease
        sent_s = asyncio.get_running_loop().time()
        begun = None
        try:
            watched = nullcontext() if lease is None else door.leases.watched(lease)
            self._wait = door.missing.waiting(self.life, worker)
            with self._wait, watched:
                begun = await self._ask(decision, transfer, deadline_s)
            if begun.failure is None and begun.answer.status == 200:
                router = self.life.router
                await door.leases.confirm(router, worker, lease, sent_s, self._headers)
        except BaseException:
            if begun is not None:
                begun.answer.abort()
            if lease is not None:
                door.leases.leave(lease)
            raise
        return begun
