"""The bytes in which engines publish KV cache events.

A batch is the msgpack array [time, events, rank]. Its events are maps with a `type`, or, before
vLLM 0.24, arrays that begin with it; old and new ones may come together. Fields from
vllm/distributed/kv_events.py and sglang/srt/disaggregation/kv_events.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import msgspec

from workers.bridge.events.events import AllBlocksCleared, BlockRemoved, BlockStored, EngineEvent

KINDS = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})
ALWAYS_SAID = frozenset({"parent_block_hash", "lora_id", "medium", "lora_name"})
"""Fields that vLLM sends even if they are nil."""


class WireError(ValueError):
    """These bytes are not what engines publish."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What an engine published together. ts: when, seconds since 1970. rank: None if not said.

    num_unknown: events of kinds that are not known. num_broken: events of known kinds that cannot
    be read, and are therefore missed.
    """

    ts: float
    events: list[EngineEvent]
    rank: int | None
    num_unknown: int = 0
    num_broken: int = 0


_Hash = int | bytes


class _Stored(msgspec.Struct, tag="BlockStored"):
    # In the order of the arrays.
    block_hashes: list[_Hash]
    parent_block_hash: _Hash | None
    token_ids: list[Any]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    cache_salt: str | None = None
    lookahead_token_ids: list[list[int]] | None = None

    def event(self) -> BlockStored:
        return BlockStored(
            self.block_hashes,
            self.parent_block_hash,
            self.token_ids,
            self.block_size,
            medium=self.medium,
            lora_name=self.lora_name,
            cache_salt=self.cache_salt,
            extra_keys=self.extra_keys,
            group_idx=self.group_idx,
            kv_cache_spec_kind=self.kv_cache_spec_kind,
            locality=self.locality,
            lora_id=self.lora_id,
            kv_cache_spec_sliding_window=self.kv_cache_spec_sliding_window,
            lookahead_token_ids=self.lookahead_token_ids,
        )


class _RemovedInArray(msgspec.Struct, array_like=True, tag="BlockRemoved"):
    block_hashes: list[_Hash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None

    def event(self) -> BlockRemoved:
        return BlockRemoved(self.block_hashes, self.medium, self.group_idx, self.locality)


class _Removed(_RemovedInArray, array_like=False, tag="BlockRemoved"):
    remaining_copy_counts: list[int] | None = None

    def event(self) -> BlockRemoved:
        return BlockRemoved(
            self.block_hashes,
            self.medium,
            self.group_idx,
            self.locality,
            self.remaining_copy_counts,
        )


class _Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    def event(self) -> AllBlocksCleared:
        return AllBlocksCleared()


class _StoredInArray(_Stored, array_like=True, tag="BlockStored"):
    pass


class _ClearedInArray(_Cleared, array_like=True, tag="AllBlocksCleared"):
    pass


class _Kind(msgspec.Struct):
    type: str


_BATCH = msgspec.msgpack.Decoder(list[msgspec.Raw])
_EVENTS = msgspec.msgpack.Decoder(list[msgspec.Raw])
_TIME = msgspec.msgpack.Decoder(float)
_RANK = msgspec.msgpack.Decoder(int | None)
_MAP = msgspec.msgpack.Decoder(_Stored | _Removed | _Cleared)
_ARRAY = msgspec.msgpack.Decoder(_StoredInArray | _RemovedInArray | _ClearedInArray)
_KIND_OF_MAP = msgspec.msgpack.Decoder(_Kind)
_KIND_OF_ARRAY = msgspec.msgpack.Decoder(list[Any])
_ENCODER = msgspec.msgpack.Encoder()


def decode(payload: bytes) -> Batch:
    """Raises WireError if it is no batch at all. Fields that are not known are ignored."""
    try:
        ts, events, *rest = _BATCH.decode(payload)
        batch = [(_is_map(raw), raw) for raw in _EVENTS.decode(events)]
        rank = _RANK.decode(rest[0]) if rest else None
        at = _TIME.decode(ts)
    except (msgspec.MsgspecError, ValueError) as error:
        raise WireError(f"not a batch of events: {error}") from None
    decoded: list[EngineEvent] = []
    num_unknown = num_broken = 0
    for is_map, raw in batch:
        try:
            decoded.append((_MAP if is_map else _ARRAY).decode(raw).event())
        except msgspec.MsgspecError:
            if _kind_of(raw, is_map=is_map) in KINDS:
                num_broken += 1
            else:
                num_unknown += 1
    return Batch(at, decoded, rank, num_unknown, num_broken)


def encode(ts: float, events: Iterable[EngineEvent], rank: int | None = 0) -> bytes:
    """A batch as vLLM publishes it since 0.24."""
    return _ENCODER.encode([ts, [_as_map(event) for event in events], rank])


def _as_map(event: EngineEvent) -> dict[str, Any]:
    named = {f.name: getattr(event, f.name) for f in fields(event)}
    said = {name: v for name, v in named.items() if v is not None or name in ALWAYS_SAID}
    return {"type": type(event).__name__, **said}


def _is_map(raw: msgspec.Raw) -> bool:
    # The first byte says the type: 0x8* , 0xde and 0xdf are maps.
    first = bytes(memoryview(raw)[:1])
    return b"\x80" <= first <= b"\x8f" or first in (b"\xde", b"\xdf")


def _kind_of(raw: msgspec.Raw, *, is_map: bool) -> object:
    """What kind of event it claims to be; None if it claims nothing."""
    try:
        return _KIND_OF_MAP.decode(raw).type if is_map else _KIND_OF_ARRAY.decode(raw)[0]
    except (msgspec.MsgspecError, LookupError):
        return None
