"""Search for contradictions in a live namespace."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import orjson

from app.core.errors import RedisUnavailable, cut
from app.core.keys import KEY_TYPES, MODELS, SHARD_KEY_TYPES, Keyspace
from app.core.limits import MAX_MODELS
from app.core.registration import decode_info
from app.core.settings.kinds import LONGEST_S
from app.core.verdicts import is_readable
from app.ops.names import names_of
from app.ops.terminal import counted
from app.ops.verify_index import Wrong, bad_entries, look_at_shard
from app.state import models
from app.state.client import RedisClient
from app.state.columns import parse_load
from app.state.connect import deadline
from app.state.reading import (
    STEP_TIMEOUT_S,
    Control,
    ReservationRecords,
    buckets,
    read_control,
    read_reservations,
    readable,
    scan,
)

REQUEST = re.compile(rb"(\d{1,12}) (\d{1,12}) (\d{1,12}) ([pdh]) \S+( s)?")
NUMBER = re.compile(rb"[1-9]\d{0,9}")
MAX_SHARDS = 1024
LONGEST_PLANNER_LEASE_S = 3600
LOOKS = 4
LOOK_INTERVAL_S = 0.5
EXAMPLES = 5


@dataclass(slots=True)
class Finding:
    what: str
    count: int = 0
    examples: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Extent:
    """Number of buckets of the index that were looked through, and of those that exist."""

    buckets: int = 0
    existing_buckets: int = 0

    def __str__(self) -> str:
        all_of = counted(self.existing_buckets, "bucket")
        if self.buckets == self.existing_buckets:
            return all_of
        return f"{self.buckets:,} of {all_of}; the rest were not checked (--max-buckets)"


async def verify(
    redis: RedisClient, keyspace: Keyspace, max_buckets: int
) -> tuple[list[Finding], Extent]:
    """Returns the contradictions in a live namespace, and how much of the index was searched.

    State changes while it is read: a contradiction counts only if it is there at each of LOOKS
    looks. Whether blocks are closed under prefix cannot be checked: Redis does not know a block's
    parent. Raises RedisUnavailable.
    """
    findings: dict[str, Finding] = {}
    wrong, unusable = await _look(redis, keyspace)
    suspects = dict.fromkeys(wrong)
    for _ in range(LOOKS - 1):
        if not suspects:
            break
        await asyncio.sleep(LOOK_INTERVAL_S)
        wrong, unusable = await _look(redis, keyspace)
        again = set(wrong)
        suspects = {suspect: None for suspect in suspects if suspect in again}
    for what, where in suspects:
        _note(findings, what, where)
    usable = _Usable(keyspace.namespace, unusable=unusable)
    extent = await _verify_index(redis, usable, max_buckets, findings)
    return list(findings.values()), extent


def _note(findings: dict[str, Finding], what: str, where: str) -> None:
    finding = findings.setdefault(what, Finding(what))
    finding.count += 1
    if len(finding.examples) < EXAMPLES:
        finding.examples.append(where)


@dataclass(frozen=True, slots=True)
class _Usable(Keyspace):
    """A namespace in which keys of a wrong type count as missing, as commands would fail there."""

    unusable: frozenset[str] = frozenset()

    def __getitem__(self, name: str) -> str:
        key = Keyspace.__getitem__(self, name)
        return Keyspace.__getitem__(self, "missing") if key in self.unusable else key

    def of_shard(self, shard: int) -> Keyspace:
        return _Usable(self.namespace, shard, self.unusable)


async def _look(redis: RedisClient, keyspace: Keyspace) -> tuple[list[Wrong], frozenset[str]]:
    """Returns what looks wrong now, except in the buckets of the index; and the keys that are not
    of their type."""
    wrong, incarnations, shards, unusable = await _look_at_names(redis, keyspace)
    wrong += await _look_at_models(redis)
    keyspace = _Usable(keyspace.namespace, unusable=unusable)
    wrong += await _look_at_planner(redis, keyspace)
    control = await read_control(redis, keyspace)
    reserved = await read_reservations(redis, keyspace, control.writers)
    for inc in incarnations - control.writers.keys():
        wrong.append(("requests of an incarnation that has ended", readable(inc)))
    num_shards = number_in(control.meta, b"shards") or MAX_SHARDS
    for shard in shards:
        if shard >= num_shards:
            wrong.append(("a shard past the last one", str(shard)))
        else:
            wrong += await look_at_shard(redis, keyspace.of_shard(shard))
    infos = []
    for text in control.workers.values():
        with suppress(ValueError):
            infos.append(decode_info(text))
    # If their list is of another type, that is said above.
    with suppress(RedisUnavailable):
        names = await names_of(redis, keyspace.namespace, infos)
        for name in names.taken(keyspace.namespace, infos):
            wrong.append(("a model's name that another namespace has", name))
    wrong += [*_unreadable(control, reserved), *_contradictions(control, reserved)]
    return wrong, unusable


async def _look_at_names(
    redis: RedisClient, keyspace: Keyspace
) -> tuple[list[Wrong], set[bytes], set[int], frozenset[str]]:
    """Returns wrong keys, the incarnations and shards that have keys, and the keys that are not of
    their type."""
    wrong: list[Wrong] = []
    incarnations, shards, unusable = set[bytes](), set[int](), set[str]()
    async for node, keys in scan(redis, keyspace.pattern):
        parsed = {key: at for key in keys if (at := keyspace.parse(key))}
        shards |= {shard for shard, _ in parsed.values() if shard is not None}
        names = {
            key: (shard, name)
            for key, (shard, name) in parsed.items()
            if shard is None or not name.startswith("blocks:")
        }
        async with deadline(STEP_TIMEOUT_S), node.pipeline(transaction=False) as pipe:
            for key in names:
                pipe.type(key)
            kinds = await pipe.execute()
        for (key, (shard, name)), kind in zip(names.items(), kinds, strict=True):
            family, colon, member = name.partition(":")
            types = KEY_TYPES if shard is None else SHARD_KEY_TYPES
            expected = types.get(family + colon)
            if expected is None:
                wrong.append(("a key that is none of kvroute's", readable(key)))
            elif kind not in (b"none", expected.encode()):
                wrong.append((f"a key that is not a {expected}", readable(key)))
                unusable.add(readable(key))
            elif family in ("requests", "prefills"):
                incarnations.add(member.encode())
    return wrong, incarnations, shards, frozenset(unusable)


async def _look_at_models(redis: RedisClient) -> list[Wrong]:
    """Returns what is wrong with the list of models, which all namespaces share."""
    async with deadline(STEP_TIMEOUT_S):
        seconds, _ = await redis.time()
        kind: Any = await redis.type(MODELS)
        if kind not in (b"none", b"hash"):
            return [("a key that is not a hash", MODELS)]
        reply: Any = await redis.hscan(MODELS, 0, count=MAX_MODELS)
    wrong = []
    for member, entry in reply[1].items():
        words = readable(entry).split(" ")
        spoke_s = [int(word) if word.isdecimal() else None for word in words[1::2]]
        if len(words) % 2 or None in spoke_s or len(models.claims_in(entry)) < len(spoke_s):
            wrong.append(("an entry in the list of models that cannot be read", readable(member)))
        elif max(at_s or 0 for at_s in spoke_s) > seconds + 1:
            wrong.append(("a model announced later than now", readable(member)))
    return wrong


def _is_whole(value: str) -> bool:
    return re.fullmatch(r"\d{1,15}", value) is not None


def _is_object(value: str) -> bool:
    with suppress(ValueError):
        return isinstance(orjson.loads(value), dict)
    return False


_PLANNER_FIELDS = {
    **dict.fromkeys(("token", "until_ms", "desired", "size"), _is_whole),
    **dict.fromkeys(("state", "values"), _is_object),
}


async def _look_at_planner(redis: RedisClient, keyspace: Keyspace) -> list[Wrong]:
    async with deadline(STEP_TIMEOUT_S):
        seconds, _ = await redis.time()
        fields: Any = await redis.hgetall(keyspace["planner"])
    text = {readable(name): readable(value) for name, value in fields.items()}
    wrong = [
        ("a field of the planner that cannot be read", f"{name} {cut(value)}")
        for name, value in text.items()
        if name in _PLANNER_FIELDS and not _PLANNER_FIELDS[name](value)
    ]
    until = text.get("until_ms", "")
    if _is_whole(until) and int(until) > 1000 * (seconds + LONGEST_PLANNER_LEASE_S):
        wrong.append(("a planner's lease that ends later than any asks for", until))
    return wrong


def _unreadable(c: Control, reserved: ReservationRecords) -> Iterator[Wrong]:
    """Yields the values that no part of kvroute would write."""
    block_size = number_in(c.meta, b"block_size")
    for name in (b"version", b"block_size", b"shards", b"incarnations"):
        if c.meta and number_in(c.meta, name) is None:
            yield "a number of the namespace that cannot be read", readable(name)
    for inc, text in c.workers.items():
        try:
            info, ttl_ms = decode_info(text), int(orjson.loads(text)["lease_ttl_ms"])
        except (ValueError, KeyError, TypeError):
            yield "a worker's entry that cannot be read", readable(inc)
            continue
        if info.block_size != block_size:
            yield "a worker with another block size than the namespace", readable(inc)
        if c.leases.get(inc, 0) > c.now_ms + ttl_ms:
            yield "a lease that ends later than its worker asks for", readable(inc)
    for name, text in c.verdicts.items():
        if not is_readable(text):
            yield "a worker's record that cannot be read", readable(name)
    for request, expires_ms in reserved.expiry.items():
        if expires_ms > c.now_ms + 1000 * LONGEST_S:
            yield "a reservation that lasts longer than any router asks for", readable(request)


def _contradictions(c: Control, reserved: ReservationRecords) -> Iterator[Wrong]:
    for inc in c.leases.keys() ^ c.writers.keys():
        yield "an incarnation with a lease but no writer, or the reverse", readable(inc)
    for inc in c.writers.keys() - c.workers.keys():
        yield "an incarnation of an unknown worker", readable(inc)
    for inc in c.load.keys() - c.writers.keys():
        yield "the load of an incarnation that has ended", readable(inc)
    for name, inc in c.current.items():
        if inc not in c.writers:
            yield "a worker whose current incarnation has ended", readable(name)
    for inc, (load, requests, prefills) in reserved.on.items():
        if load is not None and _counted(requests.values()) != _loaded(load):
            yield "a load that is not the sum of its requests", readable(inc)
        prefilling = {r for r, text in requests.items() if text.split()[3:4] == [b"p"]}
        if prefilling != set(prefills):
            yield "a prefill queue that does not match the requests prefilling", readable(inc)
        for request in requests:
            if reserved.reservations.get(request) != inc:
                yield "a request without its reservation", readable(request)
    for request in reserved.reservations.keys() ^ reserved.expiry.keys():
        yield "a reservation without expiry, or the reverse", readable(request)
    for request, inc in reserved.reservations.items():
        if inc not in reserved.on or request not in reserved.on[inc].requests:
            yield "a reservation without its request", readable(request)


def number_in(fields: Mapping[bytes, bytes], name: bytes) -> int | None:
    """Returns a positive number, or None if there is none that can be read."""
    text = fields.get(name, b"")
    return int(text) if NUMBER.fullmatch(text) else None


def _counted(records: Collection[bytes]) -> tuple[int, ...]:
    """Returns the sums of prefill_tokens, prefill_us, blocks, requests and decoding; () if a record
    cannot be read."""
    tokens = us = blocks = decoding = held = 0
    for record in map(REQUEST.fullmatch, records):
        if record is None:
            return ()
        blocks += int(record[3])
        if record[4] == b"p":
            tokens, us = tokens + int(record[1]), us + int(record[2])
        elif record[4] == b"d":
            decoding += 1
        else:
            held += 1
    return tokens, us, blocks, len(records) - held, decoding


def _loaded(text: bytes) -> tuple[int, ...] | None:
    load = parse_load(text)
    if load is None:
        return None
    return load.prefill_tokens, load.prefill_us, load.blocks, load.requests, load.decoding


async def _verify_index(
    redis: RedisClient, keyspace: Keyspace, max_buckets: int, findings: dict[str, Finding]
) -> Extent:
    extent = Extent()
    async for node, shard_of in buckets(redis, keyspace):
        keys = dict(islice(shard_of.items(), max_buckets - extent.buckets))
        extent.buckets += len(keys)
        extent.existing_buckets += len(shard_of)
        suspects = set(await bad_entries(redis, keyspace, node, keys))
        for _ in range(LOOKS - 1):
            if not suspects:
                break
            await asyncio.sleep(LOOK_INTERVAL_S)
            again = {key: keys[key] for key, _, _ in suspects}
            suspects &= set(await bad_entries(redis, keyspace, node, again))
        for key, what, where in sorted(suspects):
            _note(findings, what, f"{readable(key)} {where}".rstrip())
    return extent
