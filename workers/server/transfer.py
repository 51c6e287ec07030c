"""KV that a request leaves for another worker, or has from one, as the two requests of vLLM's
NixlConnector say it: `kv_transfer_params`, which routers alone send.

To the source: {"do_remote_decode": true}; for a prefix that it holds, without computing anything,
{"do_remote_decode": true, "cached_only": true}. What its answer has under that name goes to the
target as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from app.core.errors import InvalidRequest, shown
from workers.kv.transfer.tcp import BlockSource

PARAMS = "kv_transfer_params"
CACHED = "remote_prefill_cached_tokens"
"""As of what vLLM calls so, the target says in its usage that no more was cached: what the source
has just computed was not, although the target has it from there."""
KEEP_S = 30.0
"""How long what was computed for another worker is kept for it, unless it fetches it."""
_TEXT = 255
"""The longest name of a host, and more than an id has."""


@dataclass(frozen=True, slots=True)
class Travels:
    """keeps: the prompt's KV is for another worker. held_only: what is held of it, computing
    nothing. source: who keeps KV of the prompt for this worker. cached_tokens: so many of them were
    cached there; None: that is not known."""

    keeps: bool = False
    held_only: bool = False
    source: BlockSource | None = None
    cached_tokens: int | None = None


STAYS = Travels()


def travels(fields: Mapping[str, Any]) -> Travels:
    """Raises InvalidRequest."""
    params = fields.get(PARAMS)
    if params is None:
        return STAYS
    if not isinstance(params, dict):
        raise InvalidRequest(PARAMS, f"needs an object, got {shown(params)}")
    keeps, held_only, fetches = (
        _flag(params, name) for name in ("do_remote_decode", "cached_only", "do_remote_prefill")
    )
    if keeps and fetches:
        raise InvalidRequest(PARAMS, "is either for a source or for a target")
    if not fetches:
        return Travels(keeps, keeps and held_only)
    source = BlockSource(
        _text(params, "remote_host"),
        _count(params, "remote_port", 1, 65535),
        _text(params, "remote_request_id"),
        _count(params, "remote_num_tokens", 1, 2**32),
    )
    is_known = params.get(CACHED) is not None
    return Travels(
        source=source, cached_tokens=_count(params, CACHED, 0, 2**32) if is_known else None
    )


def with_kept(body: bytes, kept: BlockSource | None, cached_tokens: int) -> bytes:
    """An answer that says where the KV of its prompt is kept."""
    if kept is None:
        return body
    return orjson.dumps({**orjson.loads(body), PARAMS: params_of(kept, cached_tokens)})


def params_of(kept: BlockSource, cached_tokens: int) -> dict[str, object]:
    """cached_tokens: those of the prompt that the source has not computed for it."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_host": kept.host,
        "remote_port": kept.port,
        "remote_request_id": kept.transfer_id,
        "remote_num_tokens": kept.num_tokens,
        CACHED: cached_tokens,
    }


def _flag(params: Mapping[str, object], name: str) -> bool:
    value = params.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidRequest(f"{PARAMS}.{name}", f"needs true or false, got {shown(value)}")
    return bool(value)


def _text(params: Mapping[str, object], name: str) -> str:
    value = params.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= _TEXT:
        raise InvalidRequest(f"{PARAMS}.{name}", f"needs a short text, got {shown(value)}")
    return value


def _count(params: Mapping[str, object], name: str, least: int, most: int) -> int:
    value = params.get(name)
    if type(value) is not int or not least <= value <= most:
        raise InvalidRequest(f"{PARAMS}.{name}", f"needs {least} to {most}, got {shown(value)}")
    return value
