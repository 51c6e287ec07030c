"""Errors of requests: a stream in Redis that routers write and trim."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, starmap
from typing import NamedTuple

from app.core.keys import Keyspace
from app.state.client import RedisClient
from app.state.connect import deadline
from app.state.scripts import Call, command
from app.state.streams import id_ms

TIMEOUT_S = 2.0
KEPT = 1000


class Error(NamedTuple):
    """One error. worker: "": none had it. cause: from a closed list. words: the engine's own, if
    any. request_id: of the last request that failed so."""

    model: str
    worker: str
    cause: str
    words: str
    request_id: str

    @property
    def kind(self) -> tuple[str, ...]:
        """Fields that equal errors share. Without a worker, `words` may be a client's, and do not
        count."""
        return self.model, self.worker, self.cause, self.words if self.worker else ""


class Errors(NamedTuple):
    """Equal errors of several requests. Times: ms, Redis clock."""

    error: Error
    requests: int
    first_ms: int
    last_ms: int

    def as_dict(self) -> dict[str, str | int]:
        counted = {"requests": self.requests, "first_ms": self.first_ms, "last_ms": self.last_ms}
        return self.error._asdict() | counted


def record(keyspace: Keyspace, error: Error, count: int) -> Call[bytes]:
    fields = chain.from_iterable(zip(Error._fields, error, strict=True))
    limit = ("MAXLEN", "~", KEPT, "*")
    return command(
        "record", "XADD", keyspace["errors"], *limit, *fields, "count", count, parse=bytes
    )


async def read(
    redis: RedisClient, keyspace: Keyspace, most: int = KEPT
) -> tuple[int, list[Errors]]:
    """Returns the Redis clock, ms, and the errors kept, equal ones together, latest first. Raises
    RedisUnavailable."""
    node = redis.node_of(keyspace["errors"]).client
    async with deadline(TIMEOUT_S), node.pipeline(transaction=False) as pipe:
        pipe.time()
        pipe.xrevrange(keyspace["errors"], count=most)
        (seconds, micros), entries = await pipe.execute()
    return seconds * 1000 + micros // 1000, together(starmap(_errors, entries))


def _errors(entry_id: bytes, fields: dict[bytes, bytes]) -> Errors:
    at_ms, count = id_ms(entry_id), fields.get(b"count", b"")
    texts = (fields.get(name.encode(), b"").decode(errors="replace") for name in Error._fields)
    return Errors(Error(*texts), int(count) if count.isdigit() else 1, at_ms, at_ms)


def together(rows: Iterable[Errors]) -> list[Errors]:
    """Returns the rows, latest first, with equal errors added up."""
    kinds: dict[tuple[str, ...], Errors] = {}
    for one in rows:
        kind = one.error.kind
        later = kinds.get(kind)
        if later is None:
            kinds[kind] = one
        else:
            kinds[kind] = later._replace(
                requests=later.requests + one.requests, first_ms=one.first_ms
            )
    return [*kinds.values()]
