"""Carries a request to a worker and the answer back."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from app.core.errors import KvrouteError, NoWorkers, RedisUnavailable
from app.door.errors import WorkerFailed
from app.door.events import Whole, usage_in
from app.door.forwarding import Outgoing, Parser, headers_for_client
from app.door.lifecycle import Lifecycle
from app.door.migration import Migrating
from app.door.missing import Missing
from app.door.models import Model
from app.door.upstream import Answer, Upstream, UpstreamBroken, UpstreamError

log = logging.getLogger(__name__)

Headers = Sequence[tuple[bytes, bytes]]

TRIES = 3
MIGRATIONS = 3
"""Of one answer."""
CONNECT_S = 5.0
MAX_WHOLE_BYTES = 1024 * 1024
"""An answer that is not streamed is held back until it is complete, so that another worker can
still take its request; a larger one is passed on as it comes."""
FAILURES = (500, 502, 504)
BACK_PRESSURE = (429, 503)


class Client(Protocol):
    """Who takes an answer. Both raise ClientStalled if it takes nothing for too long."""

    async def start(self, status: int, headers: Headers) -> None: ...

    async def send(self, piece: bytes, *, last: bool = False) -> None: ...


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds. answer: until an answer begins, over all tries. between: between pieces of one."""

    answer_s: float
    between_s: float


@dataclass(slots=True)
class _Begun:
    """An answer of which a first part is here. whole: all of it is."""

    answer: Answer
    first: bytes
    whole: bool


class Door:
    """Knows how to reach engines, and how long to wait for them."""

    def __init__(self, upstream: Upstream, patience: Patience) -> None:
        self._upstream = upstream
        self._patience = patience
        self._missing = Missing(upstream)

    async def run(self) -> None:
        """Look for workers that are gone, until cancelled."""
        await self._missing.run()

    async def carry(
        self,
        life: Lifecycle,
        outgoing: Outgoing,
        path: str,
        headers: Headers,
        policy: str,
        client: Client,
    ) -> None:
        """Have a worker answer; ends `life` unless it raises.

        Until the first byte has gone out to the client, another worker takes the place of one that
        failed; later, one goes on with a stream that can migrate. Raises as Router.route does, and
        WorkerFailed if there is no further one to try, or one fails later.
        """

        async def begin() -> _Begun:
            return await self._begun(life, outgoing, path, headers, policy)

        begun = await begin()
        try:
            await self._relay(life, outgoing, begun, client, begin)
        finally:
            begun.answer.abort()

    async def pass_on(
        self, model: Model, body: bytes, path: str, headers: Headers, client: Client
    ) -> None:
        """Have any worker of `model` answer. Raises WorkerFailed if none does."""
        failure: UpstreamError | None = None
        for worker in random.sample(model.workers, min(TRIES, len(model.workers))):
            try:
                answer = await self._upstream.send(
                    worker.address,
                    path,
                    headers,
                    body,
                    connect_s=CONNECT_S,
                    answer_s=self._patience.between_s,
                )
                pieces = []
                while piece := await answer.read(self._patience.between_s):
                    pieces.append(piece)
            except UpstreamError as error:
                failure = error
                continue
            text = b"".join(pieces)
            length = (b"content-length", b"%d" % len(text))
            await client.start(answer.status, [*headers_for_client(answer.headers), length])
            await client.send(text, last=True)
            return
        raise WorkerFailed(f"model {model.name}: {failure}")

    async def _begun(
        self, life: Lifecycle, outgoing: Outgoing, path: str, headers: Headers, policy: str
    ) -> _Begun:
        deadline_s = asyncio.get_running_loop().time() + self._patience.answer_s
        refusal: _Begun | None = None
        """What is answered if no other worker answers better."""
        failure: WorkerFailed | None = None
        for left in reversed(range(TRIES)):
            try:
                decision = await life.decide(policy)
            except NoWorkers:
                break
            try:
                async with self._missing.waiting(life):
                    begun = await self._try(life, outgoing, path, headers, deadline_s)
            except UpstreamError as error:
                failure = WorkerFailed(f"worker {decision.worker.key}: {error}")
                log.warning("%s; request %s", failure, decision.request_id)
                await self._failed(life, suspend=True)
                continue
            status = begun.answer.status
            if status not in FAILURES and status not in BACK_PRESSURE:
                return begun
            if refusal is not None:
                refusal.answer.abort()
            refusal = begun
            if not left or (status == 500 and life.record.failed):
                return refusal
            await self._failed(life, suspend=status in FAILURES and status != 500)
        if refusal is not None:
            return refusal
        if failure is None:
            raise NoWorkers("no worker is alive")
        raise failure

    async def _failed(self, life: Lifecycle, *, suspend: bool) -> None:
        try:
            await life.worker_failed(suspend=suspend)
        except RedisUnavailable as error:
            log.debug("not told of a failed worker: %s", error)

    async def _try(
        self,
        life: Lifecycle,
        outgoing: Outgoing,
        path: str,
        headers: Headers,
        deadline_s: float,
    ) -> _Begun:
        """The beginning of one worker's answer. Raises UpstreamError."""
        worker = life.decision.worker
        left_s = max(0.001, deadline_s - asyncio.get_running_loop().time())
        more = life.trace.try_begins(str(worker.key))
        if worker.key.dp_rank:
            more = [*more, (b"x-data-parallel-rank", b"%d" % worker.key.dp_rank)]
        answer = await self._upstream.send(
            worker.address,
            path,
            [*headers, *more],
            outgoing.for_worker(worker),
            connect_s=min(CONNECT_S, left_s),
            answer_s=left_s,
        )
        try:
            if outgoing.asked.streams and answer.status == 200:
                return _Begun(answer, await answer.read(left_s), whole=False)
            pieces: list[bytes] = []
            size = 0
            while piece := await answer.read(left_s):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_WHOLE_BYTES:
                    return _Begun(answer, b"".join(pieces), whole=False)
            return _Begun(answer, b"".join(pieces), whole=True)
        except BaseException:
            answer.abort()
            raise

    async def _relay(
        self,
        life: Lifecycle,
        outgoing: Outgoing,
        begun: _Begun,
        client: Client,
        begin: Callable[[], Awaitable[_Begun]],
    ) -> None:
        """begin: asks for what `outgoing` is now. What it returns takes the place of `begun`."""
        asked, answer = outgoing.asked, begun.answer
        headers = headers_for_client(answer.headers)
        life.record.status = answer.status
        if begun.whole:
            headers.append((b"content-length", b"%d" % len(begun.first)))
            usage = usage_in(begun.first[-_TAIL:]) if answer.status == 200 else None
            life.first_token(is_seen=False)
            life.end("ok" if answer.status < 400 else "refused", usage=usage)
            await client.start(answer.status, headers)
            await client.send(begun.first, last=True)
            return
        parser: Parser = Whole()
        if asked.streams and answer.status == 200:
            parser = outgoing.parser()
            headers += _STREAM_HEADERS
        await client.start(answer.status, headers)
        while True:
            try:
                async with self._missing.waiting(life):
                    await self._pass(life, begun, parser, client)
            except UpstreamError as error:
                failure = WorkerFailed(f"worker {life.decision.worker.key}: {error}")
            else:
                rest = parser.rest()
                break
            if not isinstance(parser, Migrating):
                raise failure
            if parser.is_finished:
                rest = parser.ending()
                break
            await self._migrate(life, outgoing, begun, parser, begin, failure)
        outcome = "error_event" if parser.failed else "ok"
        life.end(outcome, ended_by="worker", usage=usage_in(parser.tail))
        await client.send(rest, last=True)

    async def _pass(self, life: Lifecycle, begun: _Begun, parser: Parser, client: Client) -> None:
        """Pass the answer of one worker on. Raises UpstreamBroken."""
        piece = begun.first
        while piece:
            passed = parser.passed(piece)
            if parser.has_first_token:
                life.first_token()
            if passed:
                await client.send(passed)
            if parser.is_broken:
                raise UpstreamBroken("told an error")
            piece = await begun.answer.read(self._patience.between_s)

    async def _migrate(
        self,
        life: Lifecycle,
        outgoing: Outgoing,
        begun: _Begun,
        parser: Migrating,
        begin: Callable[[], Awaitable[_Begun]],
        failure: WorkerFailed,
    ) -> None:
        """Have another worker go on with the answer. Raises `failure` if none can."""
        output = parser.output
        if not parser.can_go_on or life.record.migrations == MIGRATIONS:
            raise failure
        if not outgoing.goes_on(output):
            raise failure
        log.warning(
            "%s; request %s goes on elsewhere after %d tokens",
            failure,
            life.record.admitted.request_id,
            len(output),
        )
        begun.answer.abort()
        await self._failed(life, suspend=True)
        life.goes_on(output)
        try:
            next_one = await begin()
        except KvrouteError:
            raise failure from None
        begun.answer, begun.first = next_one.answer, next_one.first
        if begun.answer.status != 200:
            raise failure
        parser.goes_on()


_TAIL = 4096
_STREAM_HEADERS = [(b"x-accel-buffering", b"no"), (b"cache-control", b"no-cache")]
