"""A request whose worker is picked here, and which a gateway carries."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from starlette.requests import ClientDisconnect

from app.core.errors import NoWorkers, RedisUnavailable, RoutingError
from app.core.failures import SOON_S, Failure, Suspects
from app.core.outcomes import of_refusal
from app.core.roles import Role
from app.core.types import WorkerKey
from app.core.worker_report import WorkerInfo
from app.door import blame
from app.door.answer.events import usage_in
from app.door.door import Door
from app.door.errors import AnswerTimeout, WorkerFailed
from app.door.forwarding import Headers, Outgoing, Recipient, headers_back
from app.door.lifecycle import Lifecycle
from app.door.transfer.base import of_rank
from app.edge.errors import event_of
from app.gateway import messages
from app.gateway.endpoints import Endpoints, several
from app.gateway.gateway_request import FIRST_BYTES, GatewayAnswer, GatewayRequest
from app.gateway.messages import FULL_DUPLEX_STREAMED, NONE
from app.policy.decision import Decision

MAX_LOOKED_AT = 16
MAX_FALLBACKS = 2
"""Further workers that a gateway is told, for a request that does not reach its own."""
"""Workers of which the least loaded are those to fall back to."""
MOVED_WITHIN_S = 0.5
UNREACHED = Failure(blame.UNREACHABLE, Suspects.WORKER, most_s=SOON_S)
"""Failure that a gateway tells of: the worker may have had the request, and broken off."""
REFUSED_WITHIN_S = 10.0
"""Time for a refusal's body; the rest is left out."""
_KEPT = (b"host", b"content-length", b"content-type", b"transfer-encoding")
_GATEWAY_HEADERS = (b":", b"x-envoy-", b"x-gateway-")


class GatewayCarriage:
    """Takes the place of the door's Carriage, and has its words, where a gateway asks."""

    def __init__(
        self,
        gateway: GatewayRequest,
        endpoints: Endpoints,
        send_ids: bool,
        obey_test_header: bool,
        door: Door,
        life: Lifecycle,
        outgoing: Outgoing,
        path: str,
        headers: Headers,
        client: Recipient,
    ) -> None:
        self._gateway = gateway
        self._endpoints = endpoints
        self._obey_test_header = obey_test_header
        self._door = door
        self._life = life
        self._outgoing = outgoing
        self._path = path
        self._headers = headers
        self._client = client
        self._at: Mapping[WorkerKey, str] = {}
        """Endpoints of the workers that may be picked."""
        self._allowed: list[str] | None = None
        """Endpoints to which the gateway confines the request, if it does."""
        self._chosen: list[str] = []
        """Endpoints that a test asks for, in its order."""
        self._worker: WorkerInfo
        """Worker that has the request."""
        if not send_ids:
            outgoing.ids = replace(outgoing.ids, are_sent=False)
        if gateway.answer_mode != FULL_DUPLEX_STREAMED:
            # What was not asked for could not be taken out again.
            outgoing.asked = replace(outgoing.asked, wants_usage=True)

    async def run(self) -> None:
        """Have the gateway send the request to a worker, and end `life` unless an error is raised.
        Raises the errors of Router.route; AnswerTimeout; ClientDisconnect if the gateway leaves
        before it has told of the end."""
        await self._confine()
        decision = await self._decide()
        self._worker = decision.worker
        body = self._outgoing.for_worker(decision.worker)
        going = messages.goes_to(
            ",".join(self._told(decision)), *self._changes(decision.worker), body
        )
        pieces = messages.pieces(body, has_trailers=self._gateway.has_trailers)
        await self._gateway.hand_on(going, *pieces)
        await self._follow()

    @property
    def _workers(self) -> Sequence[WorkerInfo]:
        assert self._life.model is not None
        return self._life.model.workers

    async def _confine(self) -> None:
        """Exclude workers that the gateway cannot reach, or does not let be picked. Raises
        NoWorkers if none is left."""
        life, workers = self._life, self._workers
        self._at = at = await self._endpoints.of(workers)
        first = self._gateway.first
        hint = messages.metadata_in(first, messages.SUBSET_HINT, messages.SUBSET)
        allowed = None if hint is None else several(hint)
        about = dict(self._gateway.headers)
        if self._obey_test_header and messages.TEST_SELECTION in about:
            chosen = several(about[messages.TEST_SELECTION].decode("latin-1"))
            self._chosen = [each for each in chosen if each in at.values()]
            allowed = self._chosen[:1] or chosen or allowed
        self._allowed = allowed
        if allowed is not None:
            self._at = at = {key: each for key, each in at.items() if each in allowed}
        if not at:
            raise NoWorkers("no worker is alive among those that the gateway may send it to")
        request = life.asks
        request.local_only = True
        if len(at) < len(workers):
            others = (str(info.key) for info in workers if info.key not in at)
            request.exclude = request.exclude.union(others)

    async def _decide(self) -> Decision:
        """Returns a decision for a worker that the gateway may send the request to: others may have
        come while the request waited."""
        while True:
            decision = await self._life.decide()
            key = decision.worker.key
            if key in self._at:
                return decision
            endpoint = (await self._endpoints.of([decision.worker])).get(key)
            if endpoint and (self._allowed is None or endpoint in self._allowed):
                self._at = {**self._at, key: endpoint}
                return decision
            self._life.passes_over([str(key)])
            self._life.goes_alone("out of the gateway's reach", elsewhere=False)

    def _told(self, decision: Decision) -> list[str]:
        first = self._at[decision.worker.key]
        if self._chosen:
            return [first, *(each for each in self._chosen if each != first)]
        return [first, *self._fallbacks(decision)]

    def _fallbacks(self, decision: Decision) -> list[str]:
        """Returns endpoints of some of the least loaded other workers that take the request."""
        life, chosen = self._life, decision.worker
        view = life.router.fleet.last_view
        if view is None or len(self._at) < 2:
            return []
        excluded = life.asks.exclude

        def may_be(info: WorkerInfo) -> bool:
            return (
                info.key != chosen.key
                and info.key in self._at
                and (info.role, info.engine) == (chosen.role, chosen.engine)
                and info.role is not Role.PREFILL
                and not excluded & {str(info.key), info.key.worker_id}
                and of_rank(info) == of_rank(chosen)
            )

        fitting = [at for at, info in enumerate(view.infos) if may_be(info)]
        some = random.sample(fitting, min(len(fitting), MAX_LOOKED_AT))
        some.sort(key=view.total)
        return [self._at[view.infos[at].key] for at in some[:MAX_FALLBACKS]]

    def _changes(self, worker: WorkerInfo) -> tuple[Headers, list[bytes]]:
        given = {*self._gateway.headers}
        going = [*self._headers, *of_rank(worker)]
        names = {name for name, _ in going}
        dropped = {
            name
            for name, _ in given
            if name not in names and name not in _KEPT and not name.startswith(_GATEWAY_HEADERS)
        }
        return [each for each in going if each not in given], sorted(dropped)

    async def _beginning(self) -> messages.Request:
        patience = self._door.patience
        most_s = patience.answer_s if self._outgoing.asked.streams else patience.whole_s
        try:
            async with asyncio.timeout(most_s):
                while (said := await self._gateway.read()) is not None:
                    if said.HasField("response_headers"):
                        return said
        except TimeoutError:
            raise AnswerTimeout(f"worker {self._worker.key}: no answer in {most_s:g} s") from None
        raise ClientDisconnect

    async def _follow(self) -> None:
        headers = await self._beginning()
        answer = GatewayAnswer(headers, self._outgoing, self._gateway.answer_mode)
        await self._moved(headers)
        is_over = headers.response_headers.end_of_stream
        self._life.status = answer.status
        if answer.is_refusal and not is_over:
            await self._refuse(answer)
            is_over = True
        else:
            await self._begins(answer, is_all=is_over)
        while not is_over and (said := await self._gateway.read()) is not None:
            is_over = await self._passes(answer, said)
        if not is_over and self._gateway.answer_mode != NONE:
            raise ClientDisconnect
        await self._end(answer)

    async def _begins(self, answer: GatewayAnswer, *, is_all: bool) -> None:
        if answer.in_events:
            self._life.parser = answer.parser
            self._life.most_tokens = self._outgoing.most_tokens(self._worker)
        await self._client.start(answer.status, [])
        if is_all:
            return
        if self._gateway.answer_mode == NONE and answer.status < 400:
            self._life.first_token(is_seen=False)

    async def _refuse(self, answer: GatewayAnswer) -> None:
        """Tell a refusal in the words of the API, which takes its body. Raises ClientDisconnect."""
        is_whole = False
        with suppress(TimeoutError):
            async with asyncio.timeout(REFUSED_WITHIN_S):
                while not is_whole and len(answer.first) < FIRST_BYTES:
                    said = await self._gateway.read()
                    if said is None:
                        raise ClientDisconnect
                    if said.HasField("response_trailers"):
                        break
                    is_whole = said.response_body.end_of_stream
                    answer.passed(said.response_body.body, is_last=is_whole)
        headers: Headers = []
        if not is_whole:  # more would follow behind what is told in its place
            self._gateway.answers_itself()
            headers = headers_back([each for each in answer.headers if each[0][:1] != b":"])
        await self._client.refuse(answer.status, headers, answer.first, self._worker)

    async def _passes(self, answer: GatewayAnswer, said: messages.Request) -> bool:
        is_duplex = self._gateway.answer_mode == FULL_DUPLEX_STREAMED
        if said.HasField("response_trailers"):
            rest = answer.goes_on(answer.passed(b"", is_last=True), is_last=True)
            if is_duplex and any(rest):
                await self._client.send(b"".join(rest))
            await self._gateway.say(messages.answer_trailers())
            return True
        if not said.HasField("response_body"):
            return False
        piece, is_last = said.response_body.body, bool(said.response_body.end_of_stream)
        passed = answer.passed(piece, is_last=is_last)
        if answer.parser.has_first_token:
            self._life.first_token()
        if not is_duplex:
            await self._client.send(piece, last=is_last)
        elif goes_on := answer.goes_on(passed, is_last=is_last):
            if is_last and answer.parser.broken:
                failed = WorkerFailed(f"worker {self._worker.key}: ended by {answer.parser.broken}")
                goes_on.append(event_of(failed, self._path))
            await self._client.send(b"".join(goes_on), last=is_last)
        return is_last

    async def _end(self, answer: GatewayAnswer) -> None:
        life, parser = self._life, answer.parser
        failure, cause = self._failure_of(answer), ""
        if failure is not None:
            cause = failure.cause
        if answer.status >= 400:
            is_full = failure is not None and blame.takes_no_more(failure)
            outcome = of_refusal(answer.status, is_failure=failure is not None, is_full=is_full)
        elif parser.error:
            outcome = "error_event"
        else:
            outcome = "ok" if failure is None else "worker_failed"
        words = self._door.words.of(answer.error, self._outgoing.body) if outcome != "ok" else ""
        life.error = words
        usage = None
        if outcome == "ok":
            most = self._outgoing.most_tokens(self._worker)
            usage = usage_in(parser.tail, most, parser.start)
            life.first_token(is_seen=False)
            await life.answered()
        if failure is not None:
            await self._leave(failure, cause, words)
            await life.judge(is_answered=False)
        life.end(outcome, ended_by="" if outcome == "ok" else "worker", usage=usage)

    def _failure_of(self, answer: GatewayAnswer) -> Failure | None:
        """Returns how the worker failed, or None if it did not, or nobody can tell."""
        if answer.is_of_gateway:
            return UNREACHED
        if answer.in_events:
            if answer.parser.error:
                return blame.of_event(answer.parser.error)
            if answer.parser.broken:
                return blame.wrong(answer.parser.broken)
            is_cut = answer.sees_all and not answer.parser.has_ended
            return blame.wrong(blame.CUT) if is_cut else None
        if not answer.first and answer.status in (200, 404, 405):
            return None  # only a body says whose fault that is
        return blame.failure_of(
            *(answer.status, answer.headers, answer.first),
            model=self._life.model_name,
            path=self._path,
            is_all=False,
        )

    async def _moved(self, said: messages.Request) -> None:
        """Move the reservation to the worker that the gateway has sent the request to, if that is
        another one."""
        served = messages.metadata_in(said, messages.LB, messages.SERVED)
        if not served or served == self._at[self._worker.key]:
            return
        workers = self._workers
        there = [info for info in workers if self._at.get(info.key) == served]
        if not there:
            return
        await self._leave(UNREACHED, blame.UNREACHABLE, f"served at {served} instead")
        self._worker = there[0]
        self._life.passes_over(str(info.key) for info in workers if info not in there)
        # It is there now, whether or not that worker takes more: the answer waits for no slot.
        with suppress(RoutingError, RedisUnavailable, TimeoutError):
            async with asyncio.timeout(MOVED_WITHIN_S):
                self._worker = (await self._life.decide()).worker

    async def _leave(self, failure: Failure, cause: str, words: str) -> None:
        if self._life.held is not None:
            await self._life.worker_failed(failure, cause, words)
        else:  # it was moved to where no slot was free
            await self._life.against().add(failure, [self._worker], None)
