"""What is in Redis, for people: read only, in bounded steps, beside a running cluster."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from redis.asyncio import Redis

from app.core import index, leases, matching, metrics
from app.core.errors import ConfigError, RedisUnavailable
from app.core.index import BLOCKS_PER_BUCKET
from app.core.keys import METRICS_MAXLEN, Keyspace
from app.core.matching import parse_owners
from app.core.metrics import NO_READINGS, GpuReadings
from app.core.redis import deadline
from app.core.reservations import Load
from app.core.scripts import ScriptRunner
from app.core.topology import Client
from app.core.types import Incarnation, SequenceHash, Tier, TierOverlap, WorkerInfo

STEP_KEYS = 200
STEP_FIELDS = 1000
STEP_TIMEOUT_S = 5.0
FULL_FACTOR = 4
"""Past so many times the blocks that it was laid out for, an index is called overfull."""
OWNERS = re.compile(rb"(?:[1-9]\d{0,9}[dhk])+")
REQUEST = re.compile(rb"(\d{1,12}) (\d{1,12}) (\d{1,12}) ([pd]) \S+")
SETTLED = re.compile(rb"[1-9]\d{0,5}")
BUCKET_BITS = re.compile(rb"0*([1-9]|1\d|2[0-4])")
"""What lua/lib/bucket.lua reads as such: anybody may have written there."""
LOOKS = 4
LOOK_INTERVAL_S = 0.5
EXAMPLES = 5


@dataclass(frozen=True, slots=True)
class Worker:
    """One incarnation. lease_ms: left of its lease; None: it has none. metrics_age_s: of its newest
    entry in the metrics stream, and gpu: what that says of its GPU."""

    incarnation: Incarnation
    info: WorkerInfo | None
    current: bool
    lease_ms: int | None
    load: Load | None
    metrics_age_s: float | None
    gpu: GpuReadings
    blocks: dict[Tier, int]


@dataclass(frozen=True, slots=True)
class Summary:
    """unique_blocks: that exist. laid_out_blocks: what the buckets were settled for, where
    that can be read. memory_bytes: used by the servers, whatever else they hold included."""

    namespace: str
    block_size: int
    shards: int
    workers: list[Worker]
    unique_blocks: int
    laid_out_blocks: int
    memory_bytes: int

    @property
    def overfull(self) -> bool:
        return 0 < FULL_FACTOR * self.laid_out_blocks < self.unique_blocks


@dataclass(frozen=True, slots=True)
class Flow:
    """Requests of one tenant and priority that wait for a worker.

    oldest_s: how long the first one has waited.
    """

    tenant: str
    priority: str
    requests: int
    oldest_s: float


@dataclass(slots=True)
class Finding:
    """What is wrong, how often, and some of the places."""

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
            return f"{self.buckets:,} buckets"
        return (
            f"{self.buckets:,} of {self.existing_buckets:,} buckets; "
            "the others were not looked at (--max-buckets)"
        )


@dataclass(frozen=True, slots=True)
class _Control:
    """The keys of a namespace that are not the index, all of one moment."""

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


async def namespaces(redis: Client) -> list[str]:
    """Names of all namespaces, in order. Raises RedisUnavailable."""
    found = set()
    async for _, keys in scan(redis, "kvroute:1:{*}:meta"):
        found |= {key.decode()[len("kvroute:1:{") : -len("}:meta")] for key in keys}
    return sorted(found)


async def summary(redis: Client, keyspace: Keyspace) -> Summary | None:
    """None: there is no such namespace. Reads the whole index. Raises RedisUnavailable."""
    control = await _control(redis, keyspace)
    if b"block_size" not in control.meta or b"shards" not in control.meta:
        return None
    shards = _settled(keyspace, control.meta, "shards")
    held, unique = await _held(redis, keyspace)
    laid_out = memory = 0
    async with deadline(STEP_TIMEOUT_S):
        for shard in range(shards):
            bits = await _bucket_bits(redis, keyspace.of_shard(shard))
            laid_out += BLOCKS_PER_BUCKET << bits if bits else 0
        for master in await redis.masters():
            memory += int((await master.info("memory"))["used_memory"])
    return Summary(
        namespace=keyspace.namespace,
        block_size=_settled(keyspace, control.meta, "block_size"),
        shards=shards,
        workers=await _workers(redis, keyspace, control, held),
        unique_blocks=unique,
        laid_out_blocks=laid_out,
        memory_bytes=memory,
    )


async def owners_of(
    redis: Client, keyspace: Keyspace, block: SequenceHash
) -> list[tuple[str, list[tuple[Incarnation, Tier]]]]:
    """The keys in which `block` stands, with its owners there; dead ones included.

    The bucket follows from the first block of the group, which a hash does not tell: all are asked.
    Raises RedisUnavailable.
    """
    name = f"{block:016x}"
    found = []
    async for node, keys in _buckets(redis, keyspace):
        async with deadline(STEP_TIMEOUT_S), node.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.hget(key, name)
            replies = await pipe.execute(raise_on_error=False)
        for key, owners in zip(keys, replies, strict=True):
            if isinstance(owners, bytes):
                found.append((key.decode(), list(parse_owners(owners))))
    return found


async def fill(
    redis: Client, keyspace: Keyspace, shards: int, rng: random.Random, samples: int = 256
) -> float:
    """Blocks in the index by those it was laid out for, from a sample of every shard's buckets.

    Shards of which it cannot be read for how many do not count. Raises RedisUnavailable.
    """
    blocks = laid_out = 0
    for shard in map(keyspace.of_shard, range(shards)):
        async with deadline(STEP_TIMEOUT_S):
            bits = await _bucket_bits(redis, shard)
            if bits is None:
                continue
            async with redis.node_of(shard["shard"]).client.pipeline(transaction=False) as pipe:
                for _ in range(samples):
                    number = rng.randrange(1 << bits)
                    pipe.hlen(shard[f"blocks:{index.bucket_name(number, bits)}"])
                lengths = await pipe.execute(raise_on_error=False)
        blocks += sum(n for n in lengths if isinstance(n, int))
        laid_out += samples * BLOCKS_PER_BUCKET
    return blocks / laid_out if laid_out else 0.0


async def _bucket_bits(redis: Client, shard: Keyspace) -> int | None:
    """None: there are none, or none that make sense."""
    found: Any = await redis.hget(shard["shard"], "bucket_bits")
    bits = BUCKET_BITS.fullmatch(found or b"")
    return int(bits[1]) if bits else None


async def everyone(redis: Client, keyspace: Keyspace) -> list[Worker]:
    """All incarnations; their blocks are not counted. Raises RedisUnavailable."""
    return await _workers(redis, keyspace, await _control(redis, keyspace), Counter())


async def block_size(redis: Client, keyspace: Keyspace) -> int:
    """Tokens. Raises ConfigError for a missing namespace, RedisUnavailable."""
    async with deadline(STEP_TIMEOUT_S):
        meta: Any = await redis.hgetall(keyspace["meta"])
    if b"block_size" not in meta:
        raise ConfigError(f"namespace {keyspace.namespace!r}: there is none")
    return _settled(keyspace, meta, "block_size")


def _settled(keyspace: Keyspace, meta: dict[bytes, bytes], field: str) -> int:
    """Of a namespace. Raises ConfigError, as anybody may have written there."""
    text = meta.get(field.encode(), b"")
    if not SETTLED.fullmatch(text):
        raise ConfigError(f"{keyspace['meta']}: {field} is {text.decode(errors='replace')!r}")
    return int(text)


async def worker(redis: Client, keyspace: Keyspace, name: str) -> list[Worker]:
    """The incarnations of a worker key or worker id. Raises RedisUnavailable."""
    control = await _control(redis, keyspace)
    held, _ = await _held(redis, keyspace)
    return [
        one
        for one in await _workers(redis, keyspace, control, held)
        if one.info and name in (one.info.key.worker_id, str(one.info.key))
    ]


async def requests_on(
    redis: Client, keyspace: Keyspace, incarnation: Incarnation
) -> dict[str, str]:
    """Request id → its record, of all that is reserved on it. Raises RedisUnavailable."""
    async with deadline(STEP_TIMEOUT_S):
        found: Any = await redis.hgetall(keyspace[f"requests:{incarnation}"])
    return {name.decode(): text.decode() for name, text in found.items()}


async def waiting(redis: Client, keyspace: Keyspace) -> list[Flow]:
    """Flows in the order in which the first of each has its turn. Raises RedisUnavailable."""
    node = redis.node_of(keyspace["flows"]).client
    async with deadline(STEP_TIMEOUT_S):
        seconds, micros = await node.time()
        flows: Any = await node.zrange(keyspace["flows"], 0, -1)
        names = [flow.decode(errors="replace") for flow in flows]
        async with node.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.zrange(keyspace[f"waiting:{name}"], 0, -1, withscores=True)
                pipe.zrange(keyspace[f"picky:{name}"], 0, -1, withscores=True)
            queues = await pipe.execute()
    now_ms = seconds * 1000 + micros // 1000
    found = []
    for name, easy, picky in zip(names, queues[::2], queues[1::2], strict=True):
        if tickets := easy + picky:
            priority, _, tenant = name.partition(":")
            oldest_s = max(0.0, (now_ms - min(since_ms for _, since_ms in tickets)) / 1000)
            found.append(Flow(tenant, priority, len(tickets), oldest_s))
    return found


async def prefix(
    redis: Client, keyspace: Keyspace, chain: list[SequenceHash]
) -> dict[str, TierOverlap]:
    """Worker key → leading blocks of `chain` that it holds, of live workers.

    Raises RedisUnavailable, also where only the index cannot be read.
    """
    control = await _control(redis, keyspace)
    shards = _settled(keyspace, control.meta, "shards")
    (overlaps,), _ = await matching.match(
        ScriptRunner(redis, STEP_TIMEOUT_S), keyspace, [chain], shards
    )
    if overlaps is None:
        shard = keyspace.of_shard(index.shard_of(chain[0], shards))
        raise RedisUnavailable(f"the index cannot be read in {shard.tag!r}")
    found = {}
    for name, inc in control.current.items():
        overlap = overlaps.get(Incarnation(_number(inc)))
        if overlap and control.leases.get(inc, 0) > control.now_ms:
            found[name.decode()] = overlap
    return found


async def verify(
    redis: Client, keyspace: Keyspace, max_buckets: int
) -> tuple[list[Finding], Extent]:
    """What contradicts itself in a live namespace, and in how much of the index was looked for it.

    State moves while it is read: what looks wrong is looked at LOOKS times, and counts only if it
    was wrong each time. That blocks are closed under prefix cannot be told: Redis does not know a
    block's parent. Raises RedisUnavailable.
    """
    findings: dict[str, Finding] = {}
    suspects = dict.fromkeys(_contradictions(await _control(redis, keyspace)))
    for _ in range(LOOKS - 1):
        if not suspects:
            break
        await asyncio.sleep(LOOK_INTERVAL_S)
        again = set(_contradictions(await _control(redis, keyspace)))
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


def _contradictions(c: _Control) -> Iterator[tuple[str, str]]:
    """(what, where) for everything in the control keys that does not agree."""
    for inc in c.leases.keys() ^ c.writers.keys():
        yield "an incarnation with only one of a lease and a writer", _text(inc)
    for inc in c.writers.keys() - c.workers.keys():
        yield "an incarnation of nobody knows whom", _text(inc)
    for inc in c.load.keys() - c.writers.keys():
        yield "the load of an incarnation that is over", _text(inc)
    for name, inc in c.current.items():
        if inc not in c.writers:
            yield "a worker that is routed to an incarnation that is over", _text(name)
    for inc in c.load.keys() & c.writers.keys():
        if _counted(c, inc) != _loaded(c.load[inc]):
            yield "a load that is not the sum of its requests", _text(inc)
    for inc, requests in c.requests.items():
        prefilling = {r for r, text in requests.items() if text.split()[3:4] == [b"p"]}
        if prefilling != set(c.prefills.get(inc, ())):
            yield "a queue that is not of the requests that prefill", _text(inc)
        for request in requests:
            if c.reservations.get(request) != inc:
                yield "a request without its reservation", _text(request)
    for request in c.reservations.keys() ^ c.expiry:
        yield "a reservation without expiry, or the reverse", _text(request)
    for request, inc in c.reservations.items():
        if request not in c.requests.get(inc, ()):
            yield "a reservation without its request", _text(request)


def _counted(c: _Control, inc: bytes) -> tuple[int, ...]:
    """prefill_tokens, prefill_us, blocks, requests, decoding by the requests; () if one cannot be
    read."""
    tokens = us = blocks = decoding = 0
    records = c.requests.get(inc, {}).values()
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
    try:
        load = Load(*map(int, text.split()))
    except (TypeError, ValueError):
        return None
    return load.prefill_tokens, load.prefill_us, load.blocks, load.requests, load.decoding


async def _verify_index(
    redis: Client, keyspace: Keyspace, max_buckets: int, findings: dict[str, Finding]
) -> Extent:
    extent = Extent()
    async for node, found in _buckets(redis, keyspace):
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
            _note(findings, what, f"{_text(key)} {where}".rstrip())
    return extent


async def _bad_entries(
    redis: Client, keyspace: Keyspace, node: Redis, keys: dict[bytes, int]
) -> list[tuple[bytes, str, str]]:
    """(key, what, where) of entries that nobody would write, or whose owner is over.

    Those of `dead`, or of incarnations a sweep is still to be told of, are no fault.
    keys: each with its shard.
    """
    buckets = await contents(node, list(keys))
    known: dict[int, set[Incarnation]] = {}
    async with deadline(STEP_TIMEOUT_S):
        for shard in set(keys.values()):
            names = keyspace.of_shard(shard)
            writing = await redis.hkeys(names["applied"])
            dying = await redis.smembers(names["dead"])
            known[shard] = {Incarnation(int(i)) for i in (*writing, *dying) if i.isdigit()}
    found = []
    for (key, shard), entries in zip(keys.items(), buckets, strict=True):
        if entries is None:
            found.append((key, "a bucket that is no hash", ""))
            continue
        for block, owners in entries.items():
            where = f"{_text(block)} {_text(owners)}"
            readable = OWNERS.fullmatch(owners)
            incs = [inc for inc, _ in parse_owners(owners)] if readable else []
            if not readable or incs != sorted(set(incs)):
                found.append((key, "owners that cannot be read", where))
            elif set(incs) - known[shard]:
                found.append((key, "an owner that nobody knows, and no sweep takes out", where))
    return found


async def _control(redis: Client, keyspace: Keyspace) -> _Control:
    """In one transaction, once it is known of which incarnations."""
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
                pipe.hgetall(keyspace[f"requests:{_text(inc)}"])
                pipe.lrange(keyspace[f"prefills:{_text(inc)}"], 0, -1)
            (seconds, micros), *replies = await pipe.execute()
    hashes, (lease_list, expiry), families = replies[:6], replies[6:8], replies[8:]
    meta, workers, current, writers, load, reservations = hashes
    return _Control(
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


async def _workers(
    redis: Client, keyspace: Keyspace, control: _Control, held: Counter[tuple[Incarnation, Tier]]
) -> list[Worker]:
    async with deadline(STEP_TIMEOUT_S):
        entries: Any = await redis.xrevrange(keyspace["metrics"], count=METRICS_MAXLEN)
    newest: dict[bytes, tuple[int, dict[bytes, bytes]]] = {}
    for entry_id, entry in entries:
        newest.setdefault(entry.get(b"incarnation", b""), (int(entry_id.split(b"-")[0]), entry))
    found = []
    for inc in sorted(control.writers.keys() | control.workers.keys(), key=_number):
        expiry = control.leases.get(inc)
        info = control.workers.get(inc)
        text = control.load.get(inc)
        number = Incarnation(_number(inc))
        at_ms, measured = newest.get(inc, (None, {}))
        found.append(
            Worker(
                incarnation=number,
                info=_readable_info(info),
                current=inc in control.current.values(),
                lease_ms=None if expiry is None else int(expiry) - control.now_ms,
                load=Load(*map(int, text.split())) if text and _loaded(text) else None,
                metrics_age_s=None if at_ms is None else (control.now_ms - at_ms) / 1000,
                gpu=_readable_gpu(measured),
                blocks={tier: held[number, tier] for tier in Tier},
            )
        )
    return found


def _text(raw: bytes) -> str:
    """Of what should be text, and may be anything."""
    return raw.decode(errors="replace")


def _number(inc: bytes) -> int:
    return int(inc) if inc.isdigit() else 0


def _readable_info(text: bytes | None) -> WorkerInfo | None:
    try:
        return leases.decode_info(text) if text else None
    except (ValueError, KeyError, TypeError):
        return None


def _readable_gpu(entry: dict[bytes, bytes]) -> GpuReadings:
    try:
        return metrics.decode({name.decode(): text.decode() for name, text in entry.items()})[2]
    except ValueError:
        return NO_READINGS


async def _held(redis: Client, keyspace: Keyspace) -> tuple[Counter[tuple[Incarnation, Tier]], int]:
    """Entries of each incarnation by tier, and the number of unique blocks."""
    held: Counter[tuple[Incarnation, Tier]] = Counter()
    unique = 0
    async for node, keys in _buckets(redis, keyspace):
        for entries in await contents(node, list(keys)):
            unique += len(entries or ())
            for owners in (entries or {}).values():
                held.update(parse_owners(owners))
    return held, unique


async def _buckets(
    redis: Client, keyspace: Keyspace
) -> AsyncIterator[tuple[Redis, dict[bytes, int]]]:
    """All buckets with their shards, some at a time, and the server they lie on."""
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
    """What is in each of some hashes; None for what is none. Raises RedisUnavailable.

    In parts: while Redis reads a bucket of a hundred thousand blocks it answers nobody else.
    """
    async with deadline(STEP_TIMEOUT_S), node.pipeline(transaction=False) as pipe:
        for key in keys:
            pipe.hscan(key, count=STEP_FIELDS)
        replies = await pipe.execute(raise_on_error=False)
    found: list[dict[bytes, bytes] | None] = []
    for key, reply in zip(keys, replies, strict=True):
        if isinstance(reply, Exception):
            if not str(reply).startswith("WRONGTYPE"):
                raise RedisUnavailable(f"{key.decode(errors='replace')}: {reply}") from reply
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
    """All keys that match, some at a time, each with the server it lies on."""
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
