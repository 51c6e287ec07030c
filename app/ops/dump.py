"""Dumps the ownership of a namespace as JSON lines, restores it, and deletes a namespace.

The first line describes the namespace, and one line each its workers. Every other line is one
event: blocks that a worker stored, in one tier, of one bucket. The last line says that it is the
last, as a dump may be cut off between two others. Redis does not know a block's parent, so a dump
can be restored only into an index with as many shards and buckets.
"""

from __future__ import annotations

import re
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple, TypeVar

import orjson

from app.core.chains import parse_owners
from app.core.errors import ConfigError, shown
from app.core.keys import Keyspace
from app.core.rate_limit import RateLimit
from app.core.types import Incarnation, SequenceHash, Tier, WorkerInfo, WorkerKey
from app.state import index, leases
from app.state.client import Client
from app.state.connect import deadline
from app.state.index import Change
from app.state.reading import STEP_TIMEOUT_S, bucket_bits_of, contents, readable, scan, settled
from app.state.scripts import Call, ScriptRunner

T = TypeVar("T")
VERSION = 1
BATCH = 256
TIERS = {tier.name.lower(): tier for tier in Tier}
MAX_SHARDS = 1024
MAX_BUCKET_BITS = 24
MAX_WHOLE = 10**9
"""Scripts take larger numbers to be corrupted."""
_HASH = re.compile(r"[0-9a-f]{16}")
_HEX = re.compile(r"[0-9a-f]+")


async def dump(redis: Client, keyspace: Keyspace) -> AsyncIterator[bytes]:
    """Lines, without line ends. Raises ConfigError for a namespace that is missing or whose
    layout cannot be read, RedisUnavailable.

    What is in Redis under names that no reader of the index looks for is left out.
    """
    async with deadline(STEP_TIMEOUT_S):
        meta: Any = await redis.hgetall(keyspace["meta"])
        workers: Any = await redis.hgetall(keyspace["workers"])
        if not meta:
            raise ConfigError(f"namespace {keyspace.namespace!r} does not exist")
        shards = settled(keyspace, meta, "shards")
        bits = [await _layout(redis, keyspace.of_shard(n)) for n in range(shards)]
    yield orjson.dumps(
        {
            "kvroute": VERSION,
            "namespace": keyspace.namespace,
            "block_size": settled(keyspace, meta, "block_size"),
            "shards": shards,
            "bucket_bits": bits,
        }
    )
    infos = dict(_readable(workers))
    for inc, info in infos.items():
        yield orjson.dumps({"worker": info["worker"], "info": info, "incarnation": inc})
    async for node, keys in scan(redis, keyspace.pattern + ":blocks:*"):
        buckets = [(key, *found) for key in keys if (found := _bucket_of(keyspace, key, bits))]
        held = await contents(node, [key for key, *_ in buckets])
        for (_, shard, bucket), entries in zip(buckets, held, strict=True):
            if entries is None:
                continue
            stored: dict[tuple[Incarnation, Tier], list[str]] = defaultdict(list)
            for field, owners in entries.items():
                block = readable(field)
                for inc, tier in parse_owners(owners):
                    if inc in infos and _HASH.fullmatch(block):
                        stored[inc, tier].append(block)
            for (inc, tier), blocks in stored.items():
                yield orjson.dumps(
                    {
                        "stored": blocks,
                        "incarnation": inc,
                        "tier": tier.name.lower(),
                        "shard": shard,
                        "bucket": bucket,
                    }
                )
    yield orjson.dumps({"end": True})


async def _layout(redis: Client, shard: Keyspace) -> int:
    bits = await bucket_bits_of(redis, shard)
    if bits is None:
        raise ConfigError(f"{shard['shard']}: bucket_bits cannot be read")
    return bits


async def restore(redis: Client, keyspace: Keyspace, file: BinaryIO, lease_ttl_ms: int) -> int:
    """Publish a dump, each worker under a new incarnation; returns how many entries.

    file: read twice, as all of it is checked before anything is written.
    The incarnations live for `lease_ttl_ms` after the end; a worker's agent takes over when it
    registers.
    Raises ConfigError for lines that are not a dump, or for a namespace that they do not fit or in
    which one of the workers is live.
    """
    start = file.tell()
    dumped = _Dump(file)
    for _ in dumped.stored():
        pass
    await _refuse_live(redis, keyspace, dumped.workers.values())
    runner = ScriptRunner(redis, STEP_TIMEOUT_S)
    nonce = secrets.token_hex(8)
    writers = {
        inc: await _register(runner, keyspace, dumped.bucket_bits, info, nonce, lease_ttl_ms)
        for inc, info in dumped.workers.items()
    }
    renewals = [
        leases.renew(
            keyspace,
            info,
            writers[inc],
            nonce,
            ttl_ms=lease_ttl_ms,
            shards=len(dumped.bucket_bits),
            staged=True,
        )
        for inc, info in dumped.workers.items()
    ]
    # Leases run on meanwhile: each is renewed three times in its length.
    renewals_due = RateLimit(3000 / lease_ttl_ms)
    seqs: dict[tuple[Incarnation, int], int] = defaultdict(int)
    restored = 0
    file.seek(start)
    for stored in _Dump(file).stored():
        if renewals_due.allows(time.monotonic()):
            await _all_hold(runner, renewals)
        inc, shard = writers[stored.incarnation], stored.shard
        for at in range(0, len(stored.changes), BATCH):
            batch = stored.changes[at : at + BATCH]
            seqs[inc, shard] += 1
            call = index.apply(keyspace.of_shard(shard), inc, nonce, seqs[inc, shard], batch)
            if not await runner.one(call):
                raise ConfigError(
                    f"line {stored.line}: incarnation {inc} was replaced during the restore"
                )
            restored += len(batch)
    await _all_hold(runner, renewals)
    activations = [
        leases.activate(keyspace, info.key, writers[inc], nonce)
        for inc, info in dumped.workers.items()
    ]
    await _all_hold(runner, activations)
    return restored


async def _all_hold(runner: ScriptRunner, calls: Sequence[Call[Any]]) -> None:
    if not all(await runner.run(calls)):
        raise ConfigError("another process registered a worker of the dump during the restore")


async def reset(redis: Client, keyspace: Keyspace) -> int:
    """Delete all keys of this namespace only; returns how many. Raises RedisUnavailable."""
    deleted = 0
    async for node, keys in scan(redis, keyspace.pattern + "*"):
        own = [key for key in keys if keyspace.parse(key)]
        # One command per key: in a Cluster they are in many slots.
        async with deadline(STEP_TIMEOUT_S), node.pipeline(transaction=False) as pipe:
            for key in own:
                pipe.unlink(key)
            deleted += sum(await pipe.execute())
    return deleted


async def count_keys(redis: Client, keyspace: Keyspace) -> int:
    """How many keys the namespace has. Raises RedisUnavailable."""
    return sum(
        [
            len([key for key in keys if keyspace.parse(key)])
            async for _, keys in scan(redis, keyspace.pattern + "*")
        ]
    )


async def _refuse_live(redis: Client, keyspace: Keyspace, workers: Iterable[WorkerInfo]) -> None:
    # Registering a worker again replaces its agent, which would end the process.
    ends_ms: dict[WorkerKey, float] = {}
    async with deadline(STEP_TIMEOUT_S):
        seconds, micros = await redis.node_of(keyspace["leases"]).client.time()
        now_ms = seconds * 1000 + micros // 1000
        live: Any = await redis.zrangebyscore(
            keyspace["leases"], f"({now_ms}", "+inf", withscores=True
        )
        infos: Any = await redis.hgetall(keyspace["workers"])
    for inc, end_ms in live:
        try:
            ends_ms[leases.decode_info(infos[inc]).key] = end_ms
        except (KeyError, TypeError, ValueError):
            # Nobody knows whose it is.
            continue
    for worker in workers:
        if worker.key in ends_ms:
            raise ConfigError(
                f"worker {worker.key} is live in namespace {keyspace.namespace!r}, with a lease "
                f"that ends in {(ends_ms[worker.key] - now_ms) / 1000:.1f} s: "
                "restore into another --namespace, or stop the worker first"
            )


async def _register(
    runner: ScriptRunner,
    keyspace: Keyspace,
    bucket_bits: list[int],
    worker: WorkerInfo,
    nonce: str,
    lease_ttl_ms: int,
) -> Incarnation:
    shards = len(bucket_bits)
    opened = [False]
    while not all(opened):
        made = await runner.one(
            leases.register(keyspace, worker, nonce, ttl_ms=lease_ttl_ms, shards=shards)
        )
        if made.shards != shards:
            raise ConfigError(
                f"namespace {keyspace.namespace!r} has {made.shards} shards, "
                f"but the dump has {shards}"
            )
        opened = await runner.run(
            [
                index.open_shard(keyspace.of_shard(shard), made.incarnation, nonce, bits)
                for shard, bits in enumerate(bucket_bits)
            ]
        )
    for shard, bits in enumerate(bucket_bits):
        async with deadline(STEP_TIMEOUT_S):
            found = await bucket_bits_of(runner.redis, keyspace.of_shard(shard))
        if found != bits:
            raise ConfigError(
                f"shard {shard} of {keyspace.namespace!r} has {found} bucket bits, "
                f"but the dump has {bits}"
            )
    return made.incarnation


class _Stored(NamedTuple):
    """What one line says an incarnation, by its number in the dump, had stored."""

    line: int
    incarnation: int
    shard: int
    changes: list[Change]


class _Dump:
    """A dump, read line by line. ConfigError names the line, field and value at fault.

    workers: by incarnation, as far as `stored` has read.
    """

    def __init__(self, lines: Iterable[bytes]) -> None:
        self._rows = _rows(lines)
        head = next(self._rows, _Row(1, {}))
        if head.fields.get("kvroute") != VERSION:
            raise ConfigError(
                f"line 1 is {shown(head.fields)}: not the first line of a dump of version {VERSION}"
            )
        self._block_size = head.whole("block_size", 1, MAX_WHOLE)
        shards = head.whole("shards", 1, MAX_SHARDS)
        self.bucket_bits = head.array("bucket_bits")
        if len(self.bucket_bits) != shards or not all(
            type(bits) is int and 1 <= bits <= MAX_BUCKET_BITS for bits in self.bucket_bits
        ):
            wanted = f"a number from 1 to {MAX_BUCKET_BITS} for each of {shards} shards"
            raise head.wrong("bucket_bits", self.bucket_bits, wanted)
        self.workers: dict[int, WorkerInfo] = {}

    def stored(self) -> Iterator[_Stored]:
        """What is stored, in the order of the lines. Can be called only once."""
        for row in self._rows:
            if "end" in row.fields:
                break
            if "info" in row.fields:
                self._add_worker(row)
            else:
                yield self._stored(row)
        else:
            raise ConfigError("the dump was cut off: its last line is missing")
        for row in self._rows:
            raise ConfigError(f"line {row.number} comes after the end of the dump")

    def _add_worker(self, row: _Row) -> None:
        inc = row.whole("incarnation", 1, MAX_WHOLE)
        if inc in self.workers:
            raise row.wrong("incarnation", inc, "one that is new to the dump")
        info = row.inner("info")
        text = info.text("worker")
        try:
            key = WorkerKey.parse(text)
        except ValueError:
            raise info.wrong("worker", text, "<worker_id>:<dp_rank>") from None
        if row.text("worker") != text:
            raise row.wrong("worker", row.text("worker"), f"{text!r}, as in its info")
        block_size = info.whole("block_size", 1, MAX_WHOLE)
        if block_size != self._block_size:
            raise info.wrong("block_size", block_size, f"{self._block_size}, as on line 1")
        self.workers[inc] = WorkerInfo(
            key=key,
            address=info.text("address"),
            block_size=block_size,
            kv_total_blocks=info.whole("kv_total_blocks", 0, MAX_WHOLE),
            max_requests=info.whole("max_requests", 0, MAX_WHOLE),
            accelerator=info.text("accelerator"),
        )

    def _stored(self, row: _Row) -> _Stored:
        inc = row.whole("incarnation", 1, MAX_WHOLE)
        if inc not in self.workers:
            raise row.wrong("incarnation", inc, "that of a worker on an earlier line")
        shard = row.whole("shard", 0, len(self.bucket_bits) - 1)
        bucket = row.text("bucket")
        if not _is_bucket(bucket, self.bucket_bits[shard]):
            wanted = f"the name of a bucket for {self.bucket_bits[shard]} bucket bits"
            raise row.wrong("bucket", bucket, wanted)
        tier = TIERS.get(row.text("tier"))
        if tier is None:
            raise row.wrong("tier", row.text("tier"), f"one of {', '.join(TIERS)}")
        # The bucket's name is how the hashes of its groups' first blocks begin.
        leader = SequenceHash(int(bucket.ljust(16, "0"), 16))
        changes = []
        for block in row.array("stored"):
            if type(block) is not str or not _HASH.fullmatch(block):
                raise row.wrong("an entry of stored", block, "16 hex digits")
            changes.append(Change(SequenceHash(int(block, 16)), tier, leader))
        return _Stored(row.number, inc, shard, changes)


@dataclass(frozen=True, slots=True)
class _Row:
    """The object in a line, or one within it, whose fields errors prefix with `within`."""

    number: int
    fields: dict[str, Any]
    within: str = ""

    def whole(self, name: str, least: int, most: int) -> int:
        value = self.fields.get(name)
        if type(value) is not int or not least <= value <= most:
            raise self.wrong(name, value, f"a whole number from {least} to {most}")
        return value

    def text(self, name: str) -> str:
        return self._of(str, name, "text")

    def array(self, name: str) -> list[Any]:
        return self._of(list, name, "a list")

    def inner(self, name: str) -> _Row:
        return _Row(self.number, self._of(dict, name, "an object"), f"{name}.")

    def _of(self, kind: type[T], name: str, wanted: str) -> T:
        value = self.fields.get(name)
        if not isinstance(value, kind):
            raise self.wrong(name, value, wanted)
        return value

    def wrong(self, name: str, value: Any, wanted: str) -> ConfigError:
        return ConfigError(
            f"line {self.number}: {self.within}{name} is {shown(value)}, not {wanted}"
        )


def _rows(lines: Iterable[bytes]) -> Iterator[_Row]:
    for number, line in enumerate(lines, 1):
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise ConfigError(f"line {number} is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise ConfigError(f"line {number} is not an object: {shown(line)}")
        yield _Row(number, row)


def _readable(workers: dict[bytes, bytes]) -> Iterator[tuple[Incarnation, Any]]:
    """The valid entries of the namespace's `workers`."""
    for number, text in workers.items():
        with suppress(KeyError, TypeError, ValueError):
            leases.decode_info(text)
            yield Incarnation(int(number)), orjson.loads(text)


def _bucket_of(keyspace: Keyspace, key: bytes, bits: list[int]) -> tuple[int, str] | None:
    """Shard and name of the bucket that a key is, if it is one."""
    shard, name = keyspace.parse(key) or (None, "")
    family, _, bucket = name.partition(":")
    if shard is None or shard >= len(bits) or family != "blocks":
        return None
    return (shard, bucket) if _is_bucket(bucket, bits[shard]) else None


def _is_bucket(name: str, bits: int) -> bool:
    """Whether one of 2^bits buckets has this name."""
    is_hex = len(name) == -(-bits // 4) and _HEX.fullmatch(name) is not None
    return is_hex and int(name, 16) % (1 << (-bits % 4)) == 0
