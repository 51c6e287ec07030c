"""The ownership of a namespace as JSON lines, and back; and a namespace deleted.

The first line says what the namespace is; each of the others is one event: blocks that a worker
stored, in one tier, of one bucket. Redis does not know a block's parent, so a dump goes back only
into an index with as many shards and buckets.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator
from itertools import islice
from typing import Any

import orjson

from app.core import index, leases
from app.core.errors import ConfigError
from app.core.index import Change
from app.core.keys import Keyspace
from app.core.matching import parse_owners
from app.core.redis import deadline
from app.core.scripts import ScriptRunner
from app.core.topology import Client
from app.core.types import Incarnation, SequenceHash, Tier, WorkerKey
from app.inspection import STEP_TIMEOUT_S, scan

VERSION = 1
BATCH = 256
TIERS = {tier.name.lower(): tier for tier in Tier}


async def dump(redis: Client, keyspace: Keyspace) -> AsyncIterator[bytes]:
    """Lines, without their ends. Raises ConfigError for a missing namespace, RedisUnavailable."""
    async with deadline(STEP_TIMEOUT_S):
        meta: Any = await redis.hgetall(keyspace["meta"])
        workers: Any = await redis.hgetall(keyspace["workers"])
        if not meta:
            raise ConfigError(f"namespace {keyspace.namespace!r}: there is none")
        shards = int(meta[b"shards"])
        bits = [
            int(await redis.hget(keyspace.of_shard(n)["shard"], "bucket_bits") or 0)
            for n in range(shards)
        ]
    yield orjson.dumps(
        {
            "kvroute": VERSION,
            "namespace": keyspace.namespace,
            "block_size": int(meta[b"block_size"]),
            "shards": shards,
            "bucket_bits": bits,
        }
    )
    infos = {Incarnation(int(inc)): orjson.loads(text) for inc, text in workers.items()}
    for inc, info in infos.items():
        yield orjson.dumps({"worker": info["worker"], "info": info, "incarnation": inc})
    async for node, keys in scan(redis, keyspace.pattern + ":blocks:*"):
        async with deadline(STEP_TIMEOUT_S), node.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.hgetall(key)
            contents = await pipe.execute()
        for key, entries in zip(keys, contents, strict=True):
            shard, name = keyspace.parse(key) or (None, "")
            stored: dict[tuple[Incarnation, Tier], list[str]] = defaultdict(list)
            for block, owners in entries.items():
                for inc, tier in parse_owners(owners):
                    if inc in infos:
                        stored[inc, tier].append(block.decode())
            for (inc, tier), blocks in stored.items():
                yield orjson.dumps(
                    {
                        "stored": blocks,
                        "incarnation": inc,
                        "tier": tier.name.lower(),
                        "shard": shard,
                        "bucket": name.partition(":")[2],
                    }
                )


async def restore(
    redis: Client, keyspace: Keyspace, lines: Iterable[bytes], lease_ttl_ms: int
) -> int:
    """How many entries were published, each worker's as a new incarnation of it.

    The incarnations live for `lease_ttl_ms`; an agent of the worker takes over when it registers.
    Raises ConfigError for lines that are no dump, or a namespace that they do not fit.
    """
    rows = _rows(lines)
    head = next(rows, {})
    if head.get("kvroute") != VERSION:
        raise ConfigError(f"line 1 is {head!r}: not the first line of a dump of version {VERSION}")
    runner = ScriptRunner(redis, STEP_TIMEOUT_S)
    nonce = secrets.token_hex(8)
    writers: dict[int, Incarnation] = {}
    keys: dict[Incarnation, WorkerKey] = {}
    seqs: dict[tuple[Incarnation, int], int] = defaultdict(int)
    restored = 0
    for number, row in enumerate(rows, 2):
        try:
            if "info" in row:
                made = await _register(runner, keyspace, head, row["info"], nonce, lease_ttl_ms)
                writers[row["incarnation"]] = made
                keys[made] = WorkerKey.parse(row["worker"])
                continue
            changes = _changes(row)
            inc, shard = writers[row["incarnation"]], int(row["shard"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"line {number}: {error!r}") from None
        for batch in _batched(changes):
            seqs[inc, shard] += 1
            call = index.apply(keyspace.of_shard(shard), inc, nonce, seqs[inc, shard], batch)
            if not await runner.one(call):
                raise ConfigError(f"line {number}: incarnation {inc} was replaced meanwhile")
            restored += len(batch)
    for inc, key in keys.items():
        await runner.one(leases.activate(keyspace, key, inc, nonce))
    return restored


async def reset(redis: Client, keyspace: Keyspace) -> int:
    """Delete all keys of the namespace, and of no other; how many. Raises RedisUnavailable."""
    deleted = 0
    async for node, keys in scan(redis, keyspace.pattern + "*"):
        own = [key for key in keys if keyspace.parse(key)]
        # One command a key: those of a Cluster lie in many slots.
        async with deadline(STEP_TIMEOUT_S), node.pipeline(transaction=False) as pipe:
            for key in own:
                pipe.unlink(key)
            deleted += sum(await pipe.execute())
    return deleted


async def count_keys(redis: Client, keyspace: Keyspace) -> int:
    """Raises RedisUnavailable."""
    return sum(
        [
            len([key for key in keys if keyspace.parse(key)])
            async for _, keys in scan(redis, keyspace.pattern + "*")
        ]
    )


async def _register(
    runner: ScriptRunner,
    keyspace: Keyspace,
    head: dict[str, Any],
    info: dict[str, Any],
    nonce: str,
    lease_ttl_ms: int,
) -> Incarnation:
    worker = leases.decode_info(orjson.dumps(info))
    shards = int(head["shards"])
    made = await runner.one(
        leases.register(keyspace, worker, nonce, ttl_ms=lease_ttl_ms, shards=shards)
    )
    if made.shards != shards:
        raise ConfigError(
            f"namespace {keyspace.namespace!r} has {made.shards} shards, the dump {shards}"
        )
    for shard, bits in enumerate(head["bucket_bits"]):
        names = keyspace.of_shard(shard)
        assert await runner.one(index.open_shard(names, made.incarnation, nonce, bits))
        async with deadline(STEP_TIMEOUT_S):
            found = int(await runner.redis.hget(names["shard"], "bucket_bits") or 0)
        if found != bits:
            raise ConfigError(
                f"shard {shard} of {keyspace.namespace!r} has {found} bucket bits, the dump {bits}"
            )
    return made.incarnation


def _changes(row: dict[str, Any]) -> list[Change]:
    # The bucket's name is how the hashes of its groups' first blocks begin.
    leader = SequenceHash(int(row["bucket"].ljust(16, "0"), 16))
    tier = TIERS[row["tier"]]
    return [Change(SequenceHash(int(block, 16)), tier, leader) for block in row["stored"]]


def _rows(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, 1):
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise ConfigError(f"line {number} is no JSON: {error}") from None
        if not isinstance(row, dict):
            raise ConfigError(f"line {number} is no object: {line[:80]!r}")
        yield row


def _batched(changes: list[Change]) -> Iterator[list[Change]]:
    iterator = iter(changes)
    while batch := list(islice(iterator, BATCH)):
        yield batch
