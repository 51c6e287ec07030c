"""What goes to an engine: the client's own bytes, but for the few members that change."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from app.core.worker_report import WorkerInfo
from app.door.asked import Api, Asked
from app.door.body import JsonBody
from app.door.engines import ids_field
from app.door.prompts import PromptIds

_HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
_OURS = frozenset(
    (
        b"host",
        b"content-length",
        b"authorization",
        b"x-api-key",
        b"accept-encoding",
        b"expect",
        b"x-request-id",
        b"traceparent",
        b"tracestate",
        b"x-data-parallel-rank",
        b"x-tenant-id",
        b"x-priority",
        b"x-balancer-id",
    )
)
_FROM_ENGINES = _HOP_BY_HOP | {b"content-length", b"server", b"date", b"x-request-id"}


def headers_for_engine(
    headers: Iterable[tuple[bytes, bytes]], request_id: str, worker_key: str
) -> list[tuple[bytes, bytes]]:
    """A client's headers as they go on, with our own in place of what is between it and us."""
    kept = [
        (name, value)
        for name, value in headers
        if name not in _HOP_BY_HOP and name not in _OURS and not name.startswith(b"x-smg-")
    ]
    kept.append((b"x-request-id", request_id.encode()))
    if worker_key:
        kept.append((b"authorization", b"Bearer " + worker_key.encode()))
    return kept


def headers_for_client(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """An engine's headers as they go on."""
    return [(name, value) for name, value in headers if name.lower() not in _FROM_ENGINES]


@dataclass(slots=True)
class Outgoing:
    """One request as each kind of engine takes it."""

    body: JsonBody
    asked: Asked
    ids: PromptIds | None
    _made: dict[str, bytes] = field(default_factory=dict)

    def for_worker(self, worker: WorkerInfo) -> bytes:
        """The body for an engine of that kind."""
        field_name = (
            ids_field(self.asked.api, worker.engine) if self.ids and self.ids.are_sent else ""
        )
        body = self._made.get(field_name)
        if body is None:
            body = self._made[field_name] = self._make(field_name)
        return body

    def _make(self, ids_field: str) -> bytes:
        changes: dict[str, object] = {}
        if ids_field:
            assert self.ids is not None
            ids = self.ids.ids
            is_nested = ids_field == "kv_transfer_params"
            changes[ids_field] = {"prompt_token_ids": ids} if is_nested else ids
        if self.asked.streams and not self.asked.wants_usage and self.asked.api in _USAGE_ASKED_FOR:
            options = self.body.fields.get("stream_options") or {}
            changes["stream_options"] = {**options, "include_usage": True}
        return self.body.spliced(changes, ()) if changes else self.body.raw


_USAGE_ASKED_FOR = (Api.CHAT, Api.COMPLETIONS)
"""Others always say it."""
