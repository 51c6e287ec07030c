"""Carries a request to a worker and the answer back."""

from __future__ import annotations

from app.core.errors import KvrouteError
from app.core.outcomes import of_refusal
from app.core.worker_report import WorkerInfo
from app.door import blame, whole_answer
from app.door.after_failure import NextStep, after_cut
from app.door.client import Client, Headers
from app.door.connection import UpstreamBroken, UpstreamError
from app.door.door import Door
from app.door.errors import RepeatedFailure, WorkerFailed
from app.door.forwarding import Outgoing, Parser
from app.door.lifecycle import Lifecycle
from app.door.members import headers_back
from app.door.migration import Migrating
from app.door.opening import Beginning
from app.door.record import Usage
from app.door.stream import Whole, usage_in
from app.door.tries import Tries


class Carriage:
    """One request on its way."""

    def __init__(
        self,
        door: Door,
        life: Lifecycle,
        outgoing: Outgoing,
        path: str,
        headers: Headers,
        client: Client,
    ) -> None:
        self.door = door
        self.life = life
        self.outgoing = outgoing
        self.client = client
        self._tries = Tries(door, life, outgoing, path, headers)

    async def run(self) -> None:
        """Have a worker answer; ends `life` unless it raises.

        Until the first byte has gone out to the client, another worker takes the place of one that
        failed; later, one goes on with a stream that can migrate. Raises as Router.route does;
        WorkerFailed if there is no further one to try, or one fails later; RepeatedFailure if no
        further one is to be tried.
        """
        try:
            await self._relay(await self._tries.begin())
        except WorkerFailed:
            await self.life.evidence.judge(is_answered=False)
            raise
        finally:
            self._tries.abort()
            self.life.evidence.withdraw()

    async def _relay(self, begun: Beginning) -> None:
        """Pass an answer on. While it migrates, another worker's beginning takes the place of
        `begun`."""
        life, client, answer = self.life, self.client, begun.answer
        headers = headers_back(answer.headers)
        status = answer.status
        if begun.whole and status == 200:
            status = 502 if begun.failure else whole_answer.status_of(begun.first)
        life.record.status = status
        if begun.whole:
            await self._relay_whole(begun, status, headers)
            return
        parser: Parser = self.outgoing.parser() if begun.in_events else Whole()
        if begun.in_events:
            life.hears(lambda: (parser.num_said, self._usage(parser, begun.worker)))
            headers = [each for each in headers if each[0] not in _OF_STREAMS]
            headers += _OF_STREAMS.items()
        await client.start(answer.status, headers)
        while True:
            try:
                with self.door.missing.waiting(life, begun.worker):
                    await self._pass(begun, parser)
            except UpstreamError as error:
                self._tries.tally.broke(never_sent=False)
                then = self._after_cut(parser)
                if then is NextStep.FINISH and isinstance(parser, Migrating):
                    rest = parser.ending()
                    break
                await self._leave(begun, parser, error, then)
            else:
                rest = parser.rest()
                break
        outcome = "ok"
        if parser.error:
            outcome = "error_event"
            life.record.error = self._tries.said(parser.error)
            if begun.failure is None and (failure := blame.of_event(parser.error)):
                await life.worker_failed(failure, failure.cause, life.record.error)
            await life.evidence.judge(is_answered=False)
        elif life.evidence.tries or life.marked:
            await life.answered()
        usage = self._usage(parser, begun.worker) if outcome == "ok" else None
        life.end(outcome, ended_by="worker", usage=usage)
        await client.send(rest, last=True)

    async def _relay_whole(self, begun: Beginning, status: int, headers: Headers) -> None:
        """status: what the client is to get."""
        life, failure = self.life, begun.failure
        if status < 400:
            life.first_token(is_seen=False)
            if life.evidence.tries or life.marked:
                await life.answered()
            most = self.outgoing.most_tokens(begun.worker)
            life.end("ok", usage=usage_in(begun.first, most))
            await self.client.whole(begun.answer.status, headers, begun.first)
            return
        is_full = failure is not None and blame.takes_no_more(failure)
        life.record.error = self._tries.said(begun.first)
        outcome = of_refusal(status, is_failure=failure is not None, is_full=is_full)
        life.end(outcome, ended_by="worker")
        await self.client.refuse(status, headers, begun.first, begun.worker)

    def _usage(self, parser: Parser, worker: WorkerInfo) -> Usage | None:
        return usage_in(parser.tail, self.outgoing.most_tokens(worker), parser.start)

    async def _pass(self, begun: Beginning, parser: Parser) -> None:
        """Pass the answer of one worker on. Raises UpstreamBroken."""
        piece = begun.first
        while piece:
            passed = parser.passed(piece)
            if parser.has_first_token:
                self.life.first_token()
            if passed:
                await self.client.send(passed)
            if parser.is_finished:
                self.life.record.is_said = True
            if parser.broken:
                raise UpstreamBroken(f"ended by {parser.broken}", cause=parser.broken)
            piece = await begun.answer.read(self.door.patience.between_s)
        if not (parser.is_finished or parser.has_ended) and begun.answer.status == 200:
            raise UpstreamBroken("ended before its answer did", cause=blame.CUT)

    def _after_cut(self, parser: Parser) -> NextStep:
        """What follows if the worker broke off in the midst of its answer."""
        is_finished = can_go_on = False
        if isinstance(parser, Migrating):
            is_finished = parser.is_finished
            can_go_on = parser.can_go_on and self.outgoing.goes_on(parser.output)
        return after_cut(self._tries.tally, is_finished=is_finished, can_go_on=can_go_on)

    async def _leave(
        self, begun: Beginning, parser: Parser, error: UpstreamError, then: NextStep
    ) -> None:
        """Have another worker go on with the answer. Raises WorkerFailed if none is to, or can."""
        begun.answer.abort()
        failure = await self._tries.broken(error)
        try:
            if then is not NextStep.MIGRATE or not isinstance(parser, Migrating):
                raise failure
            self.life.goes_on(parser.output)
            try:
                next_one = await self._tries.begin()
            except RepeatedFailure:
                raise
            except KvrouteError:
                raise failure from None
            begun.worker, begun.answer = next_one.worker, next_one.answer
            begun.first = next_one.first
            if begun.answer.status != 200:
                raise failure
        finally:
            del failure  # as in Tries.begin
        parser.goes_on()


_OF_STREAMS = {
    b"content-type": b"text/event-stream; charset=utf-8",
    b"x-accel-buffering": b"no",
    b"cache-control": b"no-cache",
}
