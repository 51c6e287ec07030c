"""Reads of a namespace's keys beside a running cluster, in bounded steps."""

from __future__ import annotations

import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.exceptions import OutOfMemoryError

from app.core import registration
from app.core.chains import BLOCKS_PER_BUCKET, bucket_name
from app.core.errors import ConfigError, RedisUnavailable, WrongVersion
from app.core.keys import DATA_VERSION, Keyspace
from app.state.client import RedisClient
from app.state.connect import deadline

STEP_KEYS = 200
STEP_FIELDS = 1000
STEP_TIMEOUT_S = 5.0
META_NUMBER = re.compile(rb"[1-9]\d{0,5}")
BUCKET_BITS = re.compile(rb"0*([1-9]|1\d|2[0-4])")
"""Bucket bits as lua/lib/bucket.lua reads them: anybody may have written there."""


@dataclass(frozen=True, slots=True)
class Control:
    """Workers of a namespace, as its keys say, all from one moment."""

    now_ms: int
    meta: dict[bytes, bytes]
    workers: dict[bytes, bytes]
    current: dict[bytes, bytes]
    leases: dict[bytes, float]
    writers: dict[bytes, bytes]
    load: dict[bytes, bytes]
    verdicts: dict[bytes, bytes]


async def read_together(node: Redis, queue: Callable[[Pipeline], object]) -> list[Any]:
    """Returns the replies to the commands that `queue` puts into a pipeline, all from one moment.

    A Redis whose memory is full refuses transactions, as it would have to keep their commands. Then
    the commands are only sent together: it seldom serves others in between, but may. Raises
    RedisUnavailable.
    """
    async with deadline(STEP_TIMEOUT_S):
        try:
            return await _execute(node, queue, transaction=True)
        except OutOfMemoryError:
            return await _execute(node, queue, transaction=False)


async def _execute(
    node: Redis, queue: Callable[[Pipeline], object], *, transaction: bool
) -> list[Any]:
    async with node.pipeline(transaction=transaction) as pipe:
        queue(pipe)
        replies: list[Any] = await pipe.execute()
    return replies


async def read_control(redis: RedisClient, keyspace: Keyspace) -> Control:
    """Returns the workers' keys, from one moment. Raises WrongVersion, RedisUnavailable."""

    def queue(pipe: Pipeline) -> None:
        pipe.time()
        for name in ("meta", "workers", "current", "writers", "load", "verdicts"):
            pipe.hgetall(keyspace[name])
        pipe.zrange(keyspace["leases"], 0, -1, withscores=True)

    node = redis.node_of(keyspace["meta"]).client
    (seconds, micros), *replies = await read_together(node, queue)
    meta, workers, current, writers, load, verdicts, lease_list = replies
    check_version(keyspace, meta, workers.values())
    now_ms = seconds * 1000 + micros // 1000
    return Control(now_ms, meta, workers, current, dict(lease_list), writers, load, verdicts)


@dataclass(frozen=True, slots=True)
class ReservationRecords:
    """Reservations of a namespace. reservations, expiry: read in parts, so a request that comes or
    goes meanwhile may be in one only. on: what each incarnation has, from one moment."""

    reservations: dict[bytes, bytes]
    expiry: dict[bytes, float]
    on: dict[bytes, OnWorker]


class OnWorker(NamedTuple):
    """Reservations on one incarnation. load: None if it has none, as it has ended."""

    load: bytes | None
    requests: dict[bytes, bytes]
    prefills: list[bytes]


async def read_reservations(
    redis: RedisClient, keyspace: Keyspace, incarnations: Iterable[bytes]
) -> ReservationRecords:
    """Returns what is reserved, read in parts: all of 50,000 requests would keep Redis busy for 0.1
    s."""
    node = redis.node_of(keyspace["meta"]).client
    reservations: dict[bytes, bytes] = {}
    async for fields in _parts(node.hscan, keyspace["reservations"]):
        reservations |= fields
    expiry: dict[bytes, float] = {}
    async for members in _parts(node.zscan, keyspace["expiry"]):
        expiry |= dict(members)
    on: dict[bytes, OnWorker] = {}
    for inc in incarnations:
        on[inc] = OnWorker(*await read_together(node, partial(_queue_reserved, keyspace, inc)))
    return ReservationRecords(reservations, expiry, on)


def _queue_reserved(keyspace: Keyspace, inc: bytes, pipe: Pipeline) -> None:
    pipe.hget(keyspace["load"], readable(inc))
    pipe.hgetall(keyspace[f"requests:{readable(inc)}"])
    pipe.lrange(keyspace[f"prefills:{readable(inc)}"], 0, -1)


async def _parts(scan_part: Callable[..., Awaitable[Any]], key: str) -> AsyncIterator[Any]:
    cursor = -1
    while cursor != 0:
        async with deadline(STEP_TIMEOUT_S):
            cursor, entries = await scan_part(key, max(cursor, 0), count=STEP_KEYS)
        yield entries


def readable(raw: bytes) -> str:
    """Returns the text of what should be text but may be anything."""
    return raw.decode(errors="replace")


def check_version(
    keyspace: Keyspace, meta: dict[bytes, bytes], workers: Iterable[bytes] = ()
) -> None:
    """Raises WrongVersion if another release wrote the namespace, like other_version in
    lua/lib/meta.lua. workers: their entries, which say it if `meta` has lost it."""
    text = meta.get(b"version", b"")
    if META_NUMBER.fullmatch(text):
        held = {int(text)}
    else:
        held = set()
        for entry in workers:
            with suppress(ValueError):
                held.add(registration.version_in(entry))
    if held and DATA_VERSION not in held:
        raise WrongVersion(keyspace.namespace, max(held), DATA_VERSION)


def number_of(keyspace: Keyspace, meta: dict[bytes, bytes], field: str) -> int:
    """Returns a number in `meta`. Raises ConfigError for a bad one, as anybody may have written
    there, and WrongVersion if another release wrote it."""
    check_version(keyspace, meta)
    text = meta.get(field.encode(), b"")
    if not META_NUMBER.fullmatch(text):
        raise ConfigError(f"{keyspace['meta']}: {field} is {readable(text)!r}")
    return int(text)


async def bucket_bits_of(redis: RedisClient, shard: Keyspace) -> int | None:
    bits: Any = await redis.hget(shard["shard"], "bucket_bits")
    return parse_bucket_bits(bits)


def parse_bucket_bits(text: bytes | None) -> int | None:
    """Returns the bucket bits that `text` spells; None if there are none that make sense."""
    bits = BUCKET_BITS.fullmatch(text or b"")
    return int(bits[1]) if bits else None


async def fill(
    redis: RedisClient, keyspace: Keyspace, shards: int, rng: random.Random, samples: int = 256
) -> float:
    """Returns blocks in the index per block it was laid out for, from at least `samples` of its
    buckets. Every shard gives as many; those whose layout cannot be read do not count. Raises
    RedisUnavailable."""
    each = -(-samples // max(shards, 1))
    blocks = laid_out = 0
    for shard in map(keyspace.of_shard, range(shards)):
        async with deadline(STEP_TIMEOUT_S):
            bits = await bucket_bits_of(redis, shard)
            if bits is None:
                continue
            async with redis.node_of(shard["shard"]).client.pipeline(transaction=False) as pipe:
                for _ in range(each):
                    number = rng.randrange(1 << bits)
                    pipe.hlen(shard[f"blocks:{bucket_name(number, bits)}"])
                lengths = await pipe.execute(raise_on_error=False)
        blocks += sum(n for n in lengths if isinstance(n, int))
        laid_out += each * BLOCKS_PER_BUCKET
    return blocks / laid_out if laid_out else 0.0


async def buckets(
    redis: RedisClient, keyspace: Keyspace
) -> AsyncIterator[tuple[Redis, dict[bytes, int]]]:
    """Yields all buckets of the index with their shards, a few at a time, and their server."""
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
    """Returns the content of each hash; None for a key that is not a hash. Raises RedisUnavailable.
    Read in parts: while Redis reads a bucket of a hundred thousand blocks, it answers nobody else.
    """
    async with deadline(STEP_TIMEOUT_S), node.pipeline(transaction=False) as pipe:
        for key in keys:
            pipe.hscan(key, count=STEP_FIELDS)
        replies = await pipe.execute(raise_on_error=False)
    fields: list[dict[bytes, bytes] | None] = []
    for key, reply in zip(keys, replies, strict=True):
        if isinstance(reply, Exception):
            if not str(reply).startswith("WRONGTYPE"):
                raise RedisUnavailable(f"{readable(key)}: {reply}") from reply
            fields.append(None)
            continue
        cursor, entries = reply
        while cursor:
            async with deadline(STEP_TIMEOUT_S):
                cursor, more = await node.hscan(key, cursor, count=STEP_FIELDS)
            entries |= more
        fields.append(entries)
    return fields


async def scan(redis: RedisClient, pattern: str) -> AsyncIterator[tuple[Redis, list[bytes]]]:
    """Yields all keys that match, a few at a time, with their server."""
    async with deadline(STEP_TIMEOUT_S):
        masters = await redis.masters()
    for master in masters:
        cursor = -1
        while cursor != 0:
            async with deadline(STEP_TIMEOUT_S):
                page: Any = await master.scan(max(cursor, 0), match=pattern, count=1000)
            cursor, keys = page
            for at in range(0, len(keys), STEP_KEYS):
                yield master, keys[at : at + STEP_KEYS]
