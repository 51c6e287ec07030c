"""Dumps who holds what in a namespace as JSON lines, and reads such a dump.

The first line describes the namespace, and one line each its workers. Every other line is one
event: blocks that a worker stored, in one tier, of one bucket. The last line says that it is the
last, as a dump may be cut off between two others. Redis does not know a block's parent, so a dump
can be restored only into an index with as many shards and buckets.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple, TypeVar

import click
import orjson

from app.core import worker_report
from app.core.chains import parse_owners
from app.core.errors import ConfigError, shown
from app.core.keys import Keyspace
from app.core.types import Incarnation, SequenceHash, Tier
from app.core.worker_report import WorkerInfo, WrongField
from app.ops.terminal import COMMON, on_redis
from app.options import Command, naming_file
from app.state.client import RedisClient
from app.state.connect import deadline
from app.state.index import Change
from app.state.reading import (
    STEP_TIMEOUT_S,
    bucket_bits_of,
    check_version,
    contents,
    number_of,
    readable,
    scan,
)

T = TypeVar("T")
VERSION = 1
TIERS = {tier.name.lower(): tier for tier in Tier}
MAX_SHARDS = 1024
MAX_BUCKET_BITS = 24
MAX_WHOLE = 10**9
"""Scripts take larger numbers to be corrupted."""
_HASH = re.compile(r"[0-9a-f]{16}")
_HEX = re.compile(r"[0-9a-f]+")


@click.command(cls=Command)
@click.option("--out", type=click.File("wb", lazy=True), default="-", help="Default: stdout.")
@COMMON
@on_redis
async def dump(redis: RedisClient, keyspace: Keyspace, out: BinaryIO) -> None:
    """Write which worker holds which blocks, as JSON lines."""
    with naming_file(f"--out {out.name}"), out:
        async for line in dump_lines(redis, keyspace):
            out.write(line + b"\n")
        out.flush()


async def dump_lines(redis: RedisClient, keyspace: Keyspace) -> AsyncIterator[bytes]:
    """The lines of a dump, without line ends.

    What is in Redis under names that no reader of the index looks for is left out. Raises
    ConfigError for a namespace that is missing or whose layout cannot be read, RedisUnavailable.
    """
    async with deadline(STEP_TIMEOUT_S):
        meta: Any = await redis.hgetall(keyspace["meta"])
        workers: Any = await redis.hgetall(keyspace["workers"])
        if not meta:
            raise ConfigError(f"namespace {keyspace.namespace!r} does not exist")
        check_version(keyspace, meta, workers.values())
        shards = number_of(keyspace, meta, "shards")
        bits = [await _layout(redis, keyspace.of_shard(n)) for n in range(shards)]
    yield orjson.dumps(
        {
            "kvroute": VERSION,
            "namespace": keyspace.namespace,
            "block_size": number_of(keyspace, meta, "block_size"),
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


async def _layout(redis: RedisClient, shard: Keyspace) -> int:
    bits = await bucket_bits_of(redis, shard)
    if bits is None:
        raise ConfigError(f"{shard['shard']}: bucket_bits cannot be read")
    return bits


def _readable(workers: dict[bytes, bytes]) -> Iterator[tuple[Incarnation, Any]]:
    """The valid entries of the namespace's `workers`."""
    for number, text in workers.items():
        with suppress(ValueError):
            worker_report.decode_info(text)
            yield Incarnation(int(number)), orjson.loads(text)


def _bucket_of(keyspace: Keyspace, key: bytes, bits: list[int]) -> tuple[int, str] | None:
    """Shard and name of the bucket that a key is, if it is one."""
    shard, name = keyspace.parse(key) or (None, "")
    family, _, bucket = name.partition(":")
    if shard is None or shard >= len(bits) or family != "blocks":
        return None
    return (shard, bucket) if _is_bucket(bucket, bits[shard]) else None


class OwnedBlocks(NamedTuple):
    """What one line says an incarnation, by its number in the dump, had stored."""

    line: int
    incarnation: int
    shard: int
    changes: list[Change]


class Dump:
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

    def stored(self) -> Iterator[OwnedBlocks]:
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
        try:
            worker = worker_report.read_info(info.fields)
        except WrongField as error:
            raise info.wrong(error.name, error.value, error.wanted) from None
        if row.text("worker") != str(worker.key):
            raise row.wrong("worker", row.text("worker"), f"{str(worker.key)!r}, as in its info")
        if worker.block_size != self._block_size:
            raise info.wrong("block_size", worker.block_size, f"{self._block_size}, as on line 1")
        self.workers[inc] = worker

    def _stored(self, row: _Row) -> OwnedBlocks:
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
        return OwnedBlocks(row.number, inc, shard, changes)


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


def _is_bucket(name: str, bits: int) -> bool:
    """Whether one of 2^bits buckets has this name."""
    is_hex = len(name) == -(-bits // 4) and _HEX.fullmatch(name) is not None
    return is_hex and int(name, 16) % (1 << (-bits % 4)) == 0
