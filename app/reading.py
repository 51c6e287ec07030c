"""Reads the keys of a namespace alongside a running cluster: read-only, in bounded steps."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from app.core.errors import ConfigError, RedisUnavailable
from app.core.keys import Keyspace
from app.core.redis import deadline
from app.core.topology import Client

STEP_KEYS = 200
STEP_FIELDS = 1000
STEP_TIMEOUT_S = 5.0
SETTLED = re.compile(rb"[1-9]\d{0,5}")
BUCKET_BITS = re.compile(rb"0*([1-9]|1\d|2[0-4])")
"""What lua/lib/bucket.lua reads as bucket bits: anybody may have written there."""


@dataclass(frozen=True, slots=True)
class Control:
    """The keys of a namespace outside the index, all from one moment."""

    now_ms: int
    meta: dict[bytes, bytes]
    workers: dict[bytes, bytes]
    current: dict[bytes, bytes]
    leases: dict[bytes, float]
    writers: dict[bytes, bytes]
    load: dict[bytes, bytes]
    reservations: dict[bytes, bytes]
    expiry: set[bytes]
    requests: dict[bytes, dict[bytes, bytes]]
    prefills: dict[bytes, list[bytes]]


async def read_control(redis: Client, keyspace: Keyspace) -> Control:
    """Reads the keys in one transaction, once the incarnations are known."""
    node = redis.node_of(keyspace["meta"]).client
    async with deadline(STEP_TIMEOUT_S):
        incs: Any = await node.hkeys(keyspace["writers"])
        async with node.pipeline(transaction=True) as pipe:
            pipe.time()
            for name in ("meta", "workers", "current", "writers", "load", "reservations"):
                pipe.hgetall(keyspace[name])
            for name in ("leases", "expiry"):
                pipe.zrange(keyspace[name], 0, -1, withscores=True)
            for inc in incs:
                pipe.hgetall(keyspace[f"requests:{readable(inc)}"])
                pipe.lrange(keyspace[f"prefills:{readable(inc)}"], 0, -1)
            (seconds, micros), *replies = await pipe.execute()
    hashes, (lease_list, expiry), families = replies[:6], replies[6:8], replies[8:]
    meta, workers, current, writers, load, reservations = hashes
    return Control(
        now_ms=seconds * 1000 + micros // 1000,
        meta=meta,
        workers=workers,
        current=current,
        leases=dict(lease_list),
        writers=writers,
        load=load,
        reservations=reservations,
        expiry={request for request, _ in expiry},
        requests=dict(zip(incs, families[::2], strict=True)),
        prefills=dict(zip(incs, families[1::2], strict=True)),
    )


def readable(raw: bytes) -> str:
    """The text of what should be text but may be anything."""
    return raw.decode(errors="replace")


def settled(keyspace: Keyspace, meta: dict[bytes, bytes], field: str) -> int:
    """A number in `meta`. Raises ConfigError for a bad one, as anybody may have written there."""
    text = meta.get(field.encode(), b"")
    if not SETTLED.fullmatch(text):
        raise ConfigError(f"{keyspace['meta']}: {field} is {readable(text)!r}")
    return int(text)


async def bucket_bits_of(redis: Client, shard: Keyspace) -> int | None:
    """A shard's bucket bits; None: there are none, or none that make sense."""
    found: Any = await redis.hget(shard["shard"], "bucket_bits")
    bits = BUCKET_BITS.fullmatch(found or b"")
    return int(bits[1]) if bits else None


async def buckets(
    redis: Client, keyspace: Keyspace
) -> AsyncIterator[tuple[Redis, dict[bytes, int]]]:
    """All buckets of the index with their shards, a few at a time, and the server they are on."""
    async for node, keys in scan(redis, keyspace.pattern + ":blocks:*"):
        # A key that ends in a tenant's name may match as well.
        parsed = {key: keyspace.parse(key) or (None, "") for key in keys}
        yield (
            node,
            {
                key: shard
                for key, (shard, name) in parsed.items()
                if shard is not None and name.startswith("blocks:")
            },
        )


async def contents(node: Redis, keys: Sequence[bytes]) -> list[dict[bytes, bytes] | None]:
    """What is in each hash; None for a key that is not a hash. Raises RedisUnavailable.

    Read in parts: while Redis reads a bucket of a hundred thousand blocks, it answers nobody else.
    """
    async with deadline(STEP_TIMEOUT_S), node.pipeline(transaction=False) as pipe:
        for key in keys:
            pipe.hscan(key, count=STEP_FIELDS)
        replies = await pipe.execute(raise_on_error=False)
    found: list[dict[bytes, bytes] | None] = []
    for key, reply in zip(keys, replies, strict=True):
        if isinstance(reply, Exception):
            if not str(reply).startswith("WRONGTYPE"):
                raise RedisUnavailable(f"{readable(key)}: {reply}") from reply
            found.append(None)
            continue
        cursor, entries = reply
        while cursor:
            async with deadline(STEP_TIMEOUT_S):
                cursor, more = await node.hscan(key, cursor, count=STEP_FIELDS)
            entries |= more
        found.append(entries)
    return found


async def scan(redis: Client, pattern: str) -> AsyncIterator[tuple[Redis, list[bytes]]]:
    """All keys that match, a few at a time, with the server they are on."""
    async with deadline(STEP_TIMEOUT_S):
        masters = await redis.masters()
    for master in masters:
        cursor = -1
        while cursor != 0:
            async with deadline(STEP_TIMEOUT_S):
                found: Any = await master.scan(max(cursor, 0), match=pattern, count=1000)
            cursor, keys = found
            for at in range(0, len(keys), STEP_KEYS):
                yield master, keys[at : at + STEP_KEYS]
