"""Has another worker compute a prompt, or hand on what it holds of it, for the one that decodes.

With NixlConnector (vLLM), the source answers the prompt with one token and says where the KV lies
(`kv_transfer_params`); whoever decodes is told that, and fetches it. The source lets go of it when
its lease ends. What is fetched after that belongs to others: the text is wrong, nothing in the
answer tells, and the engine that fetched it keeps it as the prompt's. So an answer counts only if
it began within the lease.

Our own engines take the same two requests, and one more, by which a source computes nothing. A
target names what it fetches by its hashes, and computes what has been let go of.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from app.core.worker_report import WorkerInfo
from app.door.asked import Api, Asked
from app.door.engines import TRANSFER
from app.door.forwarding import Outgoing
from app.door.members import Headers
from app.door.prompts import PromptIds
from app.door.upstream import Upstream, UpstreamError
from app.policy.decision import Source
from app.policy.sources import OWN_TRANSFER, Form, kept_s

NIXL = "nixl"
"""The way in which KV travels between vLLM's NixlConnectors."""
NIXL_PARAMS: Mapping[str, object] = {
    **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
    "do_remote_decode": True,
    "do_remote_prefill": False,
}
MAX_ANSWER_BYTES = 1024 * 1024
REFUSALS = (429, 500, 502, 503, 504)
LATE = 3.0
"""A source that takes so many times as long as was predicted, and over a third of its lease, may
have been held up after it had computed the prompt, when its lease had begun."""


class SourceFailed(UpstreamError):
    """A source computed nothing. suspend: whether it is to get no requests for a while."""

    def __init__(self, why: str, *, suspend: bool) -> None:
        super().__init__(why)
        self.suspend = suspend


class LeaseEnded(UpstreamError):
    """What was to be fetched may have been let go. is_fetched: the worker that decodes has taken it
    all the same."""

    def __init__(self, why: str, *, is_fetched: bool) -> None:
        super().__init__(why)
        self.is_fetched = is_fetched


@dataclass(frozen=True, slots=True)
class Handover:
    """params: what tells the worker that decodes where to fetch. until_s: by then, of the event
    loop's clock, its answer must have begun. members: of the body of both, if they work at once."""

    params: Mapping[str, Any] = field(default_factory=dict)
    until_s: float = float("inf")
    members: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Raises LeaseEnded."""
        if asyncio.get_running_loop().time() > self.until_s:
            raise LeaseEnded(
                "may hold KV that is not its prompt's, as its source's lease may have ended before "
                "it was fetched: if it was frozen, restart it",
                is_fetched=True,
            )


NOTHING = Handover()


def may_have_source(asked: Asked, fields: Mapping[str, Any], ids: PromptIds) -> bool:
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
    """What a decision's source is sent, and how long it may take."""

    source: Source
    outgoing: Outgoing
    path: str
    headers: Headers
    connect_s: float
    answer_s: float

    async def answered(self, upstream: Upstream, body: bytes) -> tuple[int, bytes]:
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
            raise SourceFailed(str(error), suspend=True) from None
        if answer.status in REFUSALS:
            raise SourceFailed(f"answered {answer.status}", suspend=answer.status in (502, 504))
        return answer.status, said


class Transfer(Protocol):
    """A way in which KV travels."""

    async def begin(self, call: Call) -> Handover:
        """Have the source hand the prompt on. NOTHING: it does not.

        Raises SourceFailed, LeaseEnded.
        """


class Nixl:
    """vLLM's NixlConnector."""

    def __init__(self, upstream: Upstream, kv_lease_s: float) -> None:
        self._upstream = upstream
        self._kv_lease_s = kv_lease_s

    async def begin(self, call: Call) -> Handover:
        clock = asyncio.get_running_loop().time
        began_s, source = clock(), call.source
        lease_s = kept_s(self._kv_lease_s, [source.worker])
        body = call.outgoing.for_source(source.worker, NIXL_PARAMS)
        params = _params(*await call.answered(self._upstream, body))
        if params is None:
            return NOTHING
        predicted_s = source.reservation.prefill_us / 1e6 if source.reservation else 0.0
        if clock() - began_s > max(lease_s / 3, LATE * predicted_s):
            raise LeaseEnded("took too long to hand on what it computed", is_fetched=False)
        return Handover(params, clock() + lease_s)


class Own:
    """Between our own engines. What the source has let go of, the target computes itself."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream

    async def begin(self, call: Call) -> Handover:
        asked = {"do_remote_decode": True}
        if call.source.form is Form.FETCH:
            asked["cached_only"] = True
        body = call.outgoing.for_source(call.source.worker, asked)
        params = _params(*await call.answered(self._upstream, body))
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


def of_rank(worker: WorkerInfo) -> Headers:
    rank = worker.key.dp_rank
    return [(b"x-data-parallel-rank", b"%d" % rank)] if rank else []


def _params(status: int, body: bytes) -> dict[str, Any] | None:
    """What tells the target where to fetch. None: what the source refuses, the target refuses as
    well, and tells the client."""
    if status != 200:
        return None
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    params = answer.get(TRANSFER) if isinstance(answer, dict) else None
    return params if isinstance(params, dict) and params else None
