"""Looks for contradictions in a live namespace."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import islice

from redis.asyncio import Redis

from app.core.chains import parse_owners
from app.core.keys import Keyspace
from app.core.types import Incarnation, parse_incarnation
from app.ops.terminal import counted
from app.state.client import Client
from app.state.connect import deadline
from app.state.reading import (
    STEP_TIMEOUT_S,
    Control,
    Promised,
    buckets,
    contents,
    read_control,
    read_promised,
    readable,
)
from app.state.reservations import parse_load

OWNERS = re.compile(rb"(?:[1-9]\d{0,9}[dhk])+")
REQUEST = re.compile(rb"(\d{1,12}) (\d{1,12}) (\d{1,12}) ([pd]) \S+")
LOOKS = 4
LOOK_INTERVAL_S = 0.5
EXAMPLES = 5


@dataclass(slots=True)
class Finding:
    """What is wrong, how often, and examples of where."""

    what: str
    count: int = 0
    examples: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Extent:
    """How many buckets of the index were looked through, and how many there are."""

    buckets: int = 0
    existing_buckets: int = 0

    def __str__(self) -> str:
        if self.buckets == self.existing_buckets:
            return counted(self.buckets, "bucket")
        return (
            f"{self.buckets:,} of {counted(self.existing_buckets, 'bucket')}; "
            "the rest were not checked (--max-buckets)"
        )


async def verify(
    redis: Client, keyspace: Keyspace, max_buckets: int
) -> tuple[list[Finding], Extent]:
    """The contradictions in a live namespace, and how much of the index was searched for them.

    State changes while it is read: what looks wrong is looked at LOOKS times, and counts only if it
    was wrong each time. Whether blocks are closed under prefix cannot be checked: Redis does not
    know a block's parent. Raises RedisUnavailable.
    """
    findings: dict[str, Finding] = {}
    suspects = dict.fromkeys(await _look(redis, keyspace))
    for _ in range(LOOKS - 1):
        if not suspects:
            break
        await asyncio.sleep(LOOK_INTERVAL_S)
        again = set(await _look(redis, keyspace))
        suspects = {suspect: None for suspect in suspects if suspect in again}
    for what, where in suspects:
        _note(findings, what, where)
    extent = await _verify_index(redis, keyspace, max_buckets, findings)
    return list(findings.values()), extent


def _note(findings: dict[str, Finding], what: str, where: str) -> None:
    finding = findings.setdefault(what, Finding(what))
    finding.count += 1
    if len(finding.examples) < EXAMPLES:
        finding.examples.append(where)


async def _look(redis: Client, keyspace: Keyspace) -> Iterator[tuple[str, str]]:
    control = await read_control(redis, keyspace)
    return _contradictions(control, await read_promised(redis, keyspace, control.writers))


def _contradictions(c: Control, promised: Promised) -> Iterator[tuple[str, str]]:
    """(what, where) for every contradiction outside the index."""
    for inc in c.leases.keys() ^ c.writers.keys():
        yield "an incarnation with a lease but no writer, or the reverse", readable(inc)
    for inc in c.writers.keys() - c.workers.keys():
        yield "an incarnation of an unknown worker", readable(inc)
    for inc in c.load.keys() - c.writers.keys():
        yield "the load of an incarnation that has ended", readable(inc)
    for name, inc in c.current.items():
        if inc not in c.writers:
            yield "a worker whose current incarnation has ended", readable(name)
    for inc, (load, requests, prefills) in promised.on.items():
        if load is not None and _counted(requests.values()) != _loaded(load):
            yield "a load that is not the sum of its requests", readable(inc)
        prefilling = {r for r, text in requests.items() if text.split()[3:4] == [b"p"]}
        if prefilling != set(prefills):
            yield "a prefill queue that does not match the requests prefilling", readable(inc)
        for request in requests:
            if promised.reservations.get(request) != inc:
                yield "a request without its reservation", readable(request)
    for request in promised.reservations.keys() ^ promised.expiry:
        yield "a reservation without expiry, or the reverse", readable(request)
    for request, inc in promised.reservations.items():
        if inc not in promised.on or request not in promised.on[inc].requests:
            yield "a reservation without its request", readable(request)


def _counted(records: Collection[bytes]) -> tuple[int, ...]:
    """prefill_tokens, prefill_us, blocks, requests, decoding, summed over the requests; () if one
    cannot be read."""
    tokens = us = blocks = decoding = 0
    for record in map(REQUEST.fullmatch, records):
        if record is None:
            return ()
        blocks += int(record[3])
        if record[4] == b"p":
            tokens, us = tokens + int(record[1]), us + int(record[2])
        else:
            decoding += 1
    return tokens, us, blocks, len(records), decoding


def _loaded(text: bytes) -> tuple[int, ...] | None:
    load = parse_load(text)
    if load is None:
        return None
    return load.prefill_tokens, load.prefill_us, load.blocks, load.requests, load.decoding


async def _verify_index(
    redis: Client, keyspace: Keyspace, max_buckets: int, findings: dict[str, Finding]
) -> Extent:
    extent = Extent()
    async for node, found in buckets(redis, keyspace):
        keys = dict(islice(found.items(), max_buckets - extent.buckets))
        extent.buckets += len(keys)
        extent.existing_buckets += len(found)
        suspects = set(await _bad_entries(redis, keyspace, node, keys))
        for _ in range(LOOKS - 1):
            if not suspects:
                break
            await asyncio.sleep(LOOK_INTERVAL_S)
            again = {key: keys[key] for key, _, _ in suspects}
            suspects &= set(await _bad_entries(redis, keyspace, node, again))
        for key, what, where in sorted(suspects):
            _note(findings, what, f"{readable(key)} {where}".rstrip())
    return extent


async def _bad_entries(
    redis: Client, keyspace: Keyspace, node: Redis, keys: dict[bytes, int]
) -> list[tuple[bytes, str, str]]:
    """(key, what, where) of entries that nobody would write, or whose owner has ended.

    Entries of incarnations in `dead`, or that a sweep has yet to be told of, are not at fault.
    keys: each with its shard.
    """
    held = await contents(node, list(keys))
    known: dict[int, set[Incarnation]] = {}
    async with deadline(STEP_TIMEOUT_S):
        for shard in set(keys.values()):
            names = keyspace.of_shard(shard)
            writing = await redis.hkeys(names["applied"])
            dying = await redis.smembers(names["dead"])
            known[shard] = set(filter(None, map(parse_incarnation, (*writing, *dying))))
    found = []
    for (key, shard), entries in zip(keys.items(), held, strict=True):
        if entries is None:
            found.append((key, "a bucket that is not a hash", ""))
            continue
        for block, owners in entries.items():
            where = f"{readable(block)} {readable(owners)}"
            is_one = OWNERS.fullmatch(owners)
            incs = [inc for inc, _ in parse_owners(owners)] if is_one else []
            if not is_one or incs != sorted(set(incs)):
                found.append((key, "owners that cannot be read", where))
            elif set(incs) - known[shard]:
                found.append((key, "an unknown owner that no sweep removes", where))
    return found
