"""Has another worker compute a prompt, whose KV the one that decodes then fetches.

With NixlConnector (vLLM), the source answers the prompt with one token and says where the KV lies
(`kv_transfer_params`); whoever decodes is told that, and fetches it. The source lets go of it when
its lease ends. What is fetched after that belongs to others: the text is wrong, nothing in the
answer tells, and the engine that fetched it keeps it as the prompt's. So an answer counts only if
it began within the lease.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from app.core.worker_report import WorkerInfo
from app.door.asked import Api, Asked
from app.door.forwarding import Outgoing
from app.door.members import Headers
from app.door.prompts import PromptIds
from app.door.upstream import Upstream, UpstreamError
from app.policy.decision import Decision

NIXL = "nixl"
"""The way in which KV travels between vLLM's NixlConnectors."""
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


class Sources:
    """Asks sources, and waits for them for as long as they keep what they compute."""

    def __init__(self, upstream: Upstream, kv_lease_s: float) -> None:
        self._upstream = upstream
        self._kv_lease_s = kv_lease_s

    async def ask(
        self,
        decision: Decision,
        outgoing: Outgoing,
        path: str,
        headers: Headers,
        *,
        connect_s: float,
        answer_s: float,
    ) -> Handover:
        """Have the decision's source compute the prompt. NOTHING: it does not hand it on.

        Raises SourceFailed, LeaseEnded.
        """
        source = decision.source
        if source is None:
            return NOTHING
        clock = asyncio.get_running_loop().time
        began_s = clock()
        try:
            answer = await self._upstream.send(
                source.worker.address,
                path,
                [*headers, *of_rank(source.worker)],
                outgoing.for_source(source.worker),
                connect_s=connect_s,
                answer_s=answer_s,
            )
            body, _ = await answer.read_up_to(MAX_ANSWER_BYTES, answer_s)
            answer.abort()
        except UpstreamError as error:
            raise SourceFailed(str(error), suspend=True) from None
        if answer.status in REFUSALS:
            raise SourceFailed(f"answered {answer.status}", suspend=answer.status in (502, 504))
        params = _params(body) if answer.status == 200 else None
        if params is None:
            # What it refuses, the other refuses as well, and tells the client.
            return NOTHING
        predicted_s = source.reservation.prefill_us / 1e6 if source.reservation else 0.0
        if clock() - began_s > max(self._kv_lease_s / 3, LATE * predicted_s):
            raise LeaseEnded("took too long to hand on what it computed", is_fetched=False)
        return Handover(params, clock() + self._kv_lease_s)


def of_rank(worker: WorkerInfo) -> Headers:
    rank = worker.key.dp_rank
    return [(b"x-data-parallel-rank", b"%d" % rank)] if rank else []


def _params(body: bytes) -> dict[str, Any] | None:
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    params = answer.get("kv_transfer_params") if isinstance(answer, dict) else None
    return params if isinstance(params, dict) and params else None
