"""Reports of router replicas, and the history that they keep together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from app.core.keys import DATA_VERSION, Keyspace
from app.state.client import RedisClient
from app.state.connect import deadline
from app.state.scripts import Call, call
from app.state.streams import id_ms, pages_backwards

TIMEOUT_S = 2.0
SPOKE_MS = 5000
"""Time after its last report for which a replica counts as present."""
STEP_MS, KEPT = 5000, 720
MINUTE_MS, MINUTES_KEPT = 60_000, 1440
PAGE = 120
"""Samples read at a time: with two hundred workers, of 4 KB each."""


def beat(keyspace: Keyspace, replica: str, figures: Mapping[str, Any] | None) -> Call[int | None]:
    """Reports that a replica is there (figures None: it ends); returns the Redis clock in ms, or
    None if another release wrote the namespace, which then keeps nothing."""
    text = "" if figures is None else orjson.dumps(figures).decode()
    return call("beat", keyspace, replica, text, DATA_VERSION, parse=_clock)


def _clock(reply: int | None) -> int | None:
    return reply


async def read(
    redis: RedisClient, keyspace: Keyspace
) -> tuple[int, dict[str, tuple[int, dict[str, Any]]]]:
    """Returns the Redis clock and, of each replica, the time of its last report, ms, and its
    figures, without those that cannot be read. Raises RedisUnavailable."""
    node = redis.node_of(keyspace["replicas"]).client
    async with deadline(TIMEOUT_S), node.pipeline(transaction=False) as pipe:
        pipe.time()
        pipe.hgetall(keyspace["replicas"])
        (seconds, micros), entries = await pipe.execute()
    figures_of = {}
    for name, text in entries.items():
        at_ms, _, said = text.partition(b" ")
        figures = object_in(said)
        if at_ms.isdigit() and figures is not None:
            figures_of[name.decode(errors="replace")] = (int(at_ms), figures)
    return seconds * 1000 + micros // 1000, figures_of


async def present(redis: RedisClient, keyspace: Keyspace) -> dict[str, dict[str, Any]]:
    """Returns the figures of replicas that are present. Raises RedisUnavailable."""
    now_ms, said = await read(redis, keyspace)
    return {name: figures for name, (at_ms, figures) in said.items() if now_ms - at_ms <= SPOKE_MS}


def object_in(text: bytes) -> dict[str, Any] | None:
    """Returns the JSON object that `text` is; None if it is none."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def sample(keyspace: Keyspace, values: Mapping[str, Any], *, minute: bool = False) -> Call[int]:
    """Adds to the history; returns when its step began, ms by the Redis clock, or 0 if another
    replica has added it. minute: to that of the last day, which has a step each minute."""
    step_ms, kept = (MINUTE_MS, MINUTES_KEPT) if minute else (STEP_MS, KEPT)
    text = orjson.dumps(values).decode()
    return call("sample", keyspace, step_ms, kept, text, parse=int)


async def history(
    redis: RedisClient, keyspace: Keyspace, after_ms: int, *, minute: bool = False
) -> list[tuple[int, dict[str, Any]]]:
    """Returns samples after a time, oldest first, each with the time of its step. Raises
    RedisUnavailable."""
    key = keyspace["history_minutes" if minute else "history"]
    most = MINUTES_KEPT if minute else KEPT
    rows: list[tuple[int, dict[str, Any]]] = []
    pages = pages_backwards(redis, key, PAGE, oldest=f"({after_ms}", timeout_s=TIMEOUT_S)
    async for page in pages:
        for entry_id, fields in page:
            values = object_in(fields.get(b"sample", b""))
            if values is not None:
                rows.append((id_ms(entry_id), values))
        if len(rows) >= most:
            break
    return rows[most - 1 :: -1]
