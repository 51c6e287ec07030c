"""Has the source of a decision do its part, by the protocol by which its KV travels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.core.fetches import NIXL
from app.core.worker_report import WorkerInfo
from app.door.answer_request import AnswerRequest, Api
from app.door.engine.upstream import Upstream
from app.door.prompts.prompts import PromptIds
from app.door.transfer.base import NO_TRANSFER, SourceCall, Transfer, TransferProtocol
from app.door.transfer.nixl import Nixl
from app.door.transfer.params import COMMON, Params, params_in
from app.door.transfer.sglang import Sglang
from app.policy.pairing import OWN_TRANSFER, TOGETHER
from app.policy.transfer import TransferKind


def own_params(body: bytes, source: WorkerInfo) -> Params | None:
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


class Sources:
    """Protocols by their names."""

    def __init__(self, upstream: Upstream, kv_lease_s: float) -> None:
        self._protocols: dict[str, TransferProtocol] = {
            NIXL: Nixl(upstream, kv_lease_s),
            OWN_TRANSFER: Own(upstream),
            TOGETHER: Sglang(upstream),
        }

    async def begin(self, call: SourceCall) -> Transfer:
        """Has a source do its part, by its protocol. Raises SourceFailed."""
        protocol = self._protocols.get(call.source.kv_transfer)
        if protocol is None:
            call.on_computed()
            return NO_TRANSFER
        return await protocol.begin(call)
