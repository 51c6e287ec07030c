"""vLLM's NixlConnector: the source answers the prompt with one token, and says where its KV lies
(`kv_transfer_params`); whoever decodes is told that, and fetches it.

The source lets go of it when its lease ends. What is fetched after that belongs to others: the text
is wrong, nothing in the answer tells, and the engine that fetched it keeps it as the prompt's: see
kv_lease.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress

import orjson

from app.core.worker_report import WorkerInfo
from app.door.engine.connection import UpstreamError
from app.door.engine.upstream import Upstream
from app.door.forwarding import Headers
from app.door.transfer.base import (
    NO_TRANSFER,
    TOOK_TOO_LONG,
    SourceCall,
    SourceFailed,
    Transfer,
    of_rank,
)
from app.door.transfer.kv_lease import MARGIN_S, KvLease
from app.door.transfer.params import (
    COMMON,
    Checks,
    Params,
    are_blocks,
    is_count_or_none,
    is_text,
    params_in,
)
from app.policy.kv_lease import kept_s

ASKED: Mapping[str, object] = {
    **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
    "do_remote_decode": True,
    "do_remote_prefill": False,
}
MOST_OF_LEASE = 0.5
"""A source that answers after so much of its lease leaves too little of that, if nobody says when
it ends."""
NUDGE_S = 3.0
_NEEDED: Checks = COMMON | {
    "remote_num_tokens": (is_count_or_none, "a number of tokens"),
    "remote_engine_id": (is_text, "a short text"),
    "remote_block_ids": (are_blocks, "numbers of blocks"),
    "tp_size": (is_count_or_none, "a number of shards"),
    "transfer_mode": (lambda value: value in (None, "pull"), "pull"),
}


def nixl_params(body: bytes, source: WorkerInfo) -> Params | None:
    return params_in(body, source, _NEEDED)


class Nixl:
    """A TransferProtocol. kv_lease_s: of sources that say no less."""

    def __init__(self, upstream: Upstream, kv_lease_s: float) -> None:
        self._upstream = upstream
        self._kv_lease_s = kv_lease_s

    async def begin(self, call: SourceCall) -> Transfer:
        # The lease may begin as soon as the source has been asked: what is held up is its answer.
        asked_s = asyncio.get_running_loop().time()
        lease_s = kept_s(self._kv_lease_s, [call.source])
        fetch = call.fetch
        body = call.outgoing.for_source(call.source, ASKED)
        params = await call.handed_on(self._upstream, body, nixl_params)
        if fetch is None:
            took_s = asyncio.get_running_loop().time() - asked_s
            if params is not None and took_s > MOST_OF_LEASE * lease_s:
                raise SourceFailed(TOOK_TOO_LONG, None)
            lease_s -= min(MARGIN_S, lease_s / 4)
        call.on_computed()
        if params is None:
            return NO_TRANSFER
        streams = call.outgoing.asked.streams
        lease = KvLease(call.router, call.target, fetch, streams, asked_s + lease_s)
        if lease.has_ended:
            raise SourceFailed(TOOK_TOO_LONG, None)
        return Transfer(params, lease=lease)


async def nudge(upstream: Upstream, source: WorkerInfo, headers: Headers) -> None:
    """Has a source's engine make a step."""
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
