"""Events of a namespace: a stream that Redis trims. Scripts write most of it."""

from __future__ import annotations

from typing import Any, NamedTuple

from app.core.keys import Keyspace
from app.state.client import RedisClient
from app.state.connect import deadline
from app.state.scripts import Call, command
from app.state.streams import id_ms

TIMEOUT_S = 2.0
KEPT = 1000


class NamespaceEvent(NamedTuple):
    """One event. subject: a worker's key, a replica's name, or another name."""

    id: str
    at_ms: int
    kind: str
    subject: str
    text: str


def record(keyspace: Keyspace, kind: str, subject: str, text: str) -> Call[bytes]:
    fields = ("kind", kind, "subject", subject, "text", text)
    limit = ("MAXLEN", "~", KEPT, "*")
    return command("record", "XADD", keyspace["events"], *limit, *fields, parse=bytes)


async def read(
    redis: RedisClient, keyspace: Keyspace, after: str, most: int
) -> list[NamespaceEvent]:
    """Returns the newest `most` events after an id ("": after none), newest first. Raises
    RedisUnavailable."""
    async with deadline(TIMEOUT_S):
        entries: Any = await redis.xrevrange(
            keyspace["events"], min=f"({after}" if after else "-", count=most
        )
    return [
        NamespaceEvent(
            entry_id.decode(),
            id_ms(entry_id),
            *(fields.get(name, b"").decode(errors="replace") for name in _FIELDS),
        )
        for entry_id, fields in entries
    ]


_FIELDS = (b"kind", b"subject", b"text")
