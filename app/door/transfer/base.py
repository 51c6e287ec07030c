"""Protocols of transfers: one worker computes a prompt, or hands on what it holds, for the one that
decodes."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from app.core.failures import Failure
from app.core.fetches import Fetch
from app.core.worker_report import WorkerInfo
from app.door import blame
from app.door.engine.connection import EngineAnswer, UpstreamError
from app.door.engine.upstream import Upstream
from app.door.forwarding import Headers, Outgoing
from app.door.transfer.kv_lease import KvLease
from app.door.transfer.params import BadParams, Params
from app.policy.transfer import TransferKind
from app.router.router import Router

MAX_ANSWER_BYTES = 1024 * 1024
TOOK_TOO_LONG = "took too long to hand on what it computed"


class SourceFailed(UpstreamError):
    """A source computed nothing. failure: to be counted against it; None: none of its own."""

    def __init__(self, why: str, failure: Failure | None) -> None:
        super().__init__(why)
        self.failure = failure


class RefusedWithSource(UpstreamError):
    """The worker that decodes refuses the request as a client's fault, with what its source handed
    on in it: that may be what it refuses."""

    cause = "refused"


@dataclass(frozen=True, slots=True)
class Transfer:
    """Result of a protocol for one request; by default nothing is transferred. params: tell the
    target where to fetch. members: of both bodies, if both workers work at once. lease: on what is
    fetched; None if what has gone is not fetched."""

    params: Mapping[str, Any] = field(default_factory=dict)
    members: Mapping[str, Any] = field(default_factory=dict)
    lease: KvLease | None = None

    async def answer(self, answering: Coroutine[Any, Any, EngineAnswer]) -> EngineAnswer:
        """Returns the beginning of the target's answer. Raises SourceFailed, and what `answering`
        raises."""
        return await answering


NO_TRANSFER = Transfer()


@dataclass(frozen=True, slots=True)
class SourceCall:
    """Request to the source of a decision, and how long it may take.

    fetch: what Redis knows of it; None: nothing. watch: raises UpstreamBroken within it once the
    source is gone. on_computed: called when the source has done all that it does for this request.
    """

    kind: TransferKind
    source: WorkerInfo
    target: WorkerInfo
    router: Router
    fetch: Fetch | None
    outgoing: Outgoing
    path: str
    headers: Headers
    connect_s: float
    answer_s: float
    watch: Callable[[], AbstractContextManager[None]]
    on_computed: Callable[[], None]

    async def handed_on(
        self,
        upstream: Upstream,
        body: bytes,
        params_in: Callable[[bytes, WorkerInfo], Params | None],
    ) -> Params | None:
        """Returns what tells the target where to fetch; None if the source hands nothing on: what
        it refuses, the target refuses as well, and tells the client. params_in: reads its answer.
        Raises SourceFailed."""
        try:
            with self.watch():
                answer = await self.send(upstream, body)
                said, _ = await answer.read_up_to(MAX_ANSWER_BYTES, self.answer_s)
                answer.abort()
        except UpstreamError as error:
            raise failed(error) from None
        self.check(answer)
        if answer.status != 200:
            return None
        try:
            return params_in(said, self.source)
        except BadParams as error:
            raise SourceFailed(str(error), blame.BAD_PARAMS) from None

    async def send(self, upstream: Upstream, body: bytes) -> EngineAnswer:
        """Returns the beginning of the source's answer. Raises UpstreamError."""
        return await upstream.send(
            self.source.address,
            self.path,
            [*self.headers, *of_rank(self.source)],
            body,
            connect_s=self.connect_s,
            answer_s=self.answer_s,
        )

    def check(self, answer: EngineAnswer) -> None:
        """Raises SourceFailed if its status says that the source is at fault."""
        model = str(self.outgoing.asked.model or "")
        failure = blame.of_status(answer.status, answer.headers, model=model)
        if failure is not None:
            raise SourceFailed(f"answered {answer.status}", failure)


class TransferProtocol(Protocol):
    """Protocol between the engines of one `kv_transfer`."""

    async def begin(self, call: SourceCall) -> Transfer:
        """Has the source do what it does before the target is sent the request. Raises
        SourceFailed."""


def failed(error: UpstreamError) -> SourceFailed:
    """Returns how a source failed that broke off."""
    failure = blame.of_break(error.cause, is_late=error.is_late, is_whole=False)
    return SourceFailed(str(error), failure)


def of_rank(worker: WorkerInfo) -> Headers:
    """Returns the headers by which one address tells its ranks apart."""
    rank = worker.key.dp_rank
    return [(b"x-data-parallel-rank", b"%d" % rank)] if rank else []
