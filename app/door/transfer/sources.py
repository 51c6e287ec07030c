"""Has another worker compute a prompt, or hand on what it holds of it, for the one that decodes.

With NixlConnector (vLLM), the source answers the prompt with one token and says where the KV lies
(`kv_transfer_params`); whoever decodes is told that, and fetches it. The source lets go of it when
its lease ends. What is fetched after that belongs to others: the text is wrong, nothing in the
answer tells, and the engine that fetched it keeps it as the prompt's: see leases.py.

Our own engines take the same two requests, and one more, by which a source computes nothing. A
target names what it fetches by its hashes, and computes what has been let go of.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from typing import Any, Protocol

import orjson

from app.core.failures import Failure
from app.core.worker_report import WorkerInfo
from app.door import after_failure
from app.door.asked import AnswerRequest, Api
from app.door.forwarding import Outgoing
from app.door.members import Headers
from app.door.prompts import PromptIds
from app.door.transfer.handover import BrokenHandover, Params, nixl_params, own_params
from app.door.upstream import Upstream, UpstreamError
from app.policy.decision import Source
from app.policy.kv_lease import LeaseBooks
from app.policy.transfer import OWN_TRANSFER, TransferKind, kept_s

NIXL = "nixl"
"""The way in which KV travels between vLLM's NixlConnectors."""
NIXL_PARAMS: Mapping[str, object] = {
    **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
    "do_remote_decode": True,
    "do_remote_prefill": False,
}
MAX_ANSWER_BYTES = 1024 * 1024
MOST_OF_LEASE = 0.5
"""A source that answers after so much of its lease leaves too little of that, if nobody says when
it ends."""
TOOK_TOO_LONG = "took too long to hand on what it computed"
NUDGE_S = 3.0


class SourceFailed(UpstreamError):
    """A source computed nothing. failure: to be counted against it; None: none of its own."""

    def __init__(self, why: str, failure: Failure | None) -> None:
        super().__init__(why)
        self.failure = failure


def source_failed(error: UpstreamError) -> SourceFailed:
    """As a source that broke off has."""
    return SourceFailed(
        str(error), after_failure.of_break(error.cause, is_late=error.is_late, is_whole=False)
    )


class RefusedWithSource(UpstreamError):
    """The worker that decodes refuses the request as a client's fault, with what its source handed
    on in it: that may be what it refuses."""

    cause = "refused"


@dataclass(frozen=True, slots=True)
class Handover:
    """params: what tells the worker that decodes where to fetch. members: of the body of both, if
    they work at once. kept_s: the lease on what is to be fetched, and asked_s: from when on it
    counts, by the event loop's clock; inf: what is not there any more is not fetched. before: what
    the source's engine had counted by then."""

    params: Mapping[str, Any] = field(default_factory=dict)
    members: Mapping[str, Any] = field(default_factory=dict)
    asked_s: float = 0.0
    kept_s: float = inf
    before: LeaseBooks | None = None


NOTHING = Handover()


def may_have_source(asked: AnswerRequest, fields: Mapping[str, Any], ids: PromptIds) -> bool:
    """Whether one prompt is asked for, whose tokens are known, and its answer alone. Engines that
    work on a request together do so on any."""
    return (
        asked.api in (Api.CHAT, Api.COMPLETIONS)
        and ids.ids is not None
        and asked.reads_cache
        and not fields.get("echo")
        and not fields.get("use_beam_search")
        and all(fields.get(name) in (None, 1) for name in ("n", "best_of"))
    )


@dataclass(frozen=True, slots=True)
class Call:
    """What a decision's source is sent, and how long it may take. books: what its engine has
    counted."""

    source: Source
    outgoing: Outgoing
    path: str
    headers: Headers
    connect_s: float
    answer_s: float
    books: Callable[[], LeaseBooks | None]

    async def handed_on(
        self,
        upstream: Upstream,
        body: bytes,
        params_in: Callable[[bytes, WorkerInfo], Params | None],
    ) -> Params | None:
        """What tells the target where to fetch; None: the source hands nothing on. What it refuses,
        the target refuses as well, and tells the client.

        params_in: reads its answer. Raises SourceFailed.
        """
        status, said = await self._answered(upstream, body)
        if status != 200:
            return None
        try:
            return params_in(said, self.source.worker)
        except BrokenHandover as error:
            raise SourceFailed(str(error), after_failure.BROKEN_HANDOVER) from None

    async def _answered(self, upstream: Upstream, body: bytes) -> tuple[int, bytes]:
        """The status and the body of its answer. Raises SourceFailed."""
        worker = self.source.worker
        try:
            answer = await upstream.send(
                worker.address,
                self.path,
                [*self.headers, *of_rank(worker)],
                body,
                connect_s=self.connect_s,
                answer_s=self.answer_s,
            )
            said, _ = await answer.read_up_to(MAX_ANSWER_BYTES, self.answer_s)
            answer.abort()
        except UpstreamError as error:
            raise source_failed(error) from None
        failure = after_failure.of_status(
            answer.status, answer.headers, model=str(self.outgoing.asked.model or "")
        )
        if failure is not None:
            raise SourceFailed(f"answered {answer.status}", failure)
        return answer.status, said


class Transfer(Protocol):
    """A way in which KV travels."""

    async def begin(self, call: Call) -> Handover:
        """Have the source hand the prompt on. NOTHING: it does not.

        Raises SourceFailed.
        """


class Nixl:
    """vLLM's NixlConnector."""

    def __init__(self, upstream: Upstream, kv_lease_s: float) -> None:
        self._upstream = upstream
        self._kv_lease_s = kv_lease_s

    async def begin(self, call: Call) -> Handover:
        # The lease may begin as soon as the source has been asked: what is held up is its answer.
        asked_s = asyncio.get_running_loop().time()
        worker = call.source.worker
        lease_s, before = kept_s(self._kv_lease_s, [worker]), call.books()
        body = call.outgoing.for_source(worker, NIXL_PARAMS)
        params = await call.handed_on(self._upstream, body, nixl_params)
        if params is None:
            return NOTHING
        if before is None and asyncio.get_running_loop().time() - asked_s > MOST_OF_LEASE * lease_s:
            raise SourceFailed(TOOK_TOO_LONG, None)
        return Handover(params, asked_s=asked_s, kept_s=lease_s, before=before)


class Own:
    """Between our own engines. What the source has let go of, the target computes itself."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream

    async def begin(self, call: Call) -> Handover:
        asked = {"do_remote_decode": True}
        if call.source.kind is TransferKind.FETCH:
            asked["cached_only"] = True
        body = call.outgoing.for_source(call.source.worker, asked)
        params = await call.handed_on(self._upstream, body, own_params)
        return NOTHING if params is None else Handover(params)


class Sources:
    """Asks the source of a decision in the way in which its KV travels."""

    def __init__(self, upstream: Upstream, kv_lease_s: float) -> None:
        self._ways: dict[str, Transfer] = {
            NIXL: Nixl(upstream, kv_lease_s),
            OWN_TRANSFER: Own(upstream),
        }

    async def ask(self, call: Call) -> Handover:
        """As Transfer.begin."""
        way = self._ways.get(call.source.worker.kv_transfer)
        return NOTHING if way is None else await way.begin(call)


async def nudge(upstream: Upstream, source: WorkerInfo, headers: Headers) -> None:
    """Have its engine make a step."""
    body = {"model": source.models[0] if source.models else "", "prompt": [1], "max_tokens": 1}
    with suppress(UpstreamError):
        answer = await upstream.send(
            source.address,
            "/v1/completions",
            [*headers, *of_rank(source)],
            orjson.dumps(body),
            connect_s=NUDGE_S,
            answer_s=NUDGE_S,
        )
        answer.abort()


def of_rank(worker: WorkerInfo) -> Headers:
    rank = worker.key.dp_rank
    return [(b"x-data-parallel-rank", b"%d" % rank)] if rank else []
