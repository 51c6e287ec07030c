"""Bytes in which engines publish KV cache events.

A batch is the msgpack array [time, events, rank]. Its events are maps with a `type`, or, before
vLLM 0.24, arrays that begin with it; old and new ones may come together. Fields from
vllm/distributed/kv_events.py and sglang/srt/disaggregation/kv_events.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from workers.bridge.events.events import BlockRemoved, BlockStored, EngineEvent

FIELDS = {
    "BlockStored": BlockStored.__struct_fields__,
    "BlockRemoved": BlockRemoved.__struct_fields__[:-1],
    "AllBlocksCleared": (),
}
"""Order of the elements of arrays, which were given up before events had more fields."""
ALWAYS_SAID = frozenset({"parent_block_hash", "lora_id", "medium", "lora_name"})
"""Fields that vLLM sends even if they are nil."""


class WireError(ValueError):
    """Bytes that are no batch of events."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Events that an engine published together. ts: seconds since 1970. rank: None if not said.

    num_unknown: events of kinds that are not known. num_broken: events of known kinds that cannot
    be read, and are therefore missed.
    """

    ts: float
    events: list[EngineEvent]
    rank: int | None
    num_unknown: int = 0
    num_broken: int = 0


_PARTS = msgspec.msgpack.Decoder(list[msgspec.Raw])
_TIME = msgspec.msgpack.Decoder(float)
_RANK = msgspec.msgpack.Decoder(int | None)
_EVENT: msgspec.msgpack.Decoder[EngineEvent] = msgspec.msgpack.Decoder(EngineEvent)
_ANYTHING = msgspec.msgpack.Decoder()
_ENCODER = msgspec.msgpack.Encoder()


def decode(payload: bytes) -> Batch:
    """Returns a batch without fields that are not known. Raises WireError if it is no batch at
    all."""
    try:
        ts, events, *rest = _PARTS.decode(payload)
        parts = _PARTS.decode(events)
        rank = _RANK.decode(rest[0]) if rest else None
        at = _TIME.decode(ts)
    except (msgspec.MsgspecError, ValueError) as error:
        raise WireError(f"not a batch of events: {error}") from None
    decoded: list[EngineEvent] = []
    num_unknown = num_broken = 0
    for raw in parts:
        try:
            event = _event_of(raw)
        except msgspec.MsgspecError:
            num_broken += 1
            continue
        if event is None:
            num_unknown += 1
        else:
            decoded.append(event)
    return Batch(at, decoded, rank, num_unknown, num_broken)


def _event_of(raw: msgspec.Raw) -> EngineEvent | None:
    """Returns None for an event of an unknown kind. Raises MsgspecError for a broken one."""
    try:
        return _EVENT.decode(raw)
    except msgspec.ValidationError:
        told = _ANYTHING.decode(raw)
    if isinstance(told, list) and told and isinstance(told[0], str):
        told = {**dict(zip(FIELDS.get(told[0], ()), told[1:], strict=False)), "type": told[0]}
    if not isinstance(told, dict) or told.get("type") not in FIELDS:
        return None
    event: EngineEvent = msgspec.convert(told, EngineEvent, builtin_types=(bytes,))
    return event


def encode(ts: float, events: Iterable[EngineEvent], rank: int | None = 0) -> bytes:
    """Returns a batch as vLLM publishes it since 0.24."""
    return _ENCODER.encode([ts, [_as_map(event) for event in events], rank])


def _as_map(event: EngineEvent) -> dict[str, object]:
    told = msgspec.structs.asdict(event).items()
    said = {name: value for name, value in told if value is not None or name in ALWAYS_SAID}
    return {"type": type(event).__name__, **said}
