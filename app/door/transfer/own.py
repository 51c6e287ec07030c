"""Between our own engines: as vLLM's, and by one more request a source computes nothing.

A target names what it fetches by its hashes, and computes what has been let go of.
"""

from __future__ import annotations

from app.core.worker_report import WorkerInfo
from app.door.transfer.base import NO_TRANSFER, SourceCall, Transfer
from app.door.transfer.params import COMMON, Params, params_in
from app.door.upstream import Upstream
from app.policy.transfer import TransferKind


def own_params(body: bytes, source: WorkerInfo) -> Params | None:
    """As params.params_in."""
    return params_in(body, source, COMMON)


class Own:
    """A TransferProtocol."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream

    async def begin(self, call: SourceCall) -> Transfer:
        asked = {"do_remote_decode": True}
        if call.kind is TransferKind.FETCH:
            asked["cached_only"] = True
        body = call.outgoing.for_source(call.source, asked)
        params = await call.handed_on(self._upstream, body, own_params)
        call.on_computed()
        return NO_TRANSFER if params is None else Transfer(params)
