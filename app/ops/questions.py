"""What is in Redis, for people: read-only, in bounded steps, alongside a running cluster."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

from app.core import worker_report
from app.core.chains import BLOCKS_PER_BUCKET, bucket_name, parse_owners, shard_of
from app.core.errors import ConfigError, RedisUnavailable
from app.core.keys import METRICS_MAXLEN, NAMESPACE, Keyspace
from app.core.loads import Load
from app.core.types import (
    Incarnation,
    SequenceHash,
    Tier,
    TierOverlap,
    WorkerInfo,
    parse_incarnation,
)
from app.core.worker_report import NO_READINGS, GpuReadings
from app.state import leases, overlap
from app.state.client import Client
from app.state.connect import deadline
from app.state.reading import (
    STEP_TIMEOUT_S,
    Control,
    bucket_bits_of,
    buckets,
    contents,
    read_control,
    readable,
    scan,
    settled,
)
from app.state.reservations import parse_load
from app.state.scripts import ScriptRunner

STEP_ENTRIES = 512
"""Of the metrics stream, in 2 ms of Redis's time."""
LATEST_MS = 1e15
FULL_FACTOR = 4
"""Beyond this many times the blocks that it was laid out for, an index is called overfull."""


@dataclass(frozen=True, slots=True)
class Worker:
    """One incarnation. lease_ms: what is left of its lease; None: it has none. metrics_age_s: of
    its newest entry in the metrics stream. gpu: what that entry says about its GPU."""

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
    """unique_blocks: how many exist. laid_out_blocks: how many the buckets were laid out for, where
    that can be read. memory_bytes: used by the servers, including whatever else they hold."""

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


async def namespaces(redis: Client) -> list[str]:
    """Names of all namespaces, in order. Raises RedisUnavailable."""
    found = set()
    async for _, keys in scan(redis, "kvroute:1:{*}:meta"):
        found |= {readable(key)[len("kvroute:1:{") : -len("}:meta")] for key in keys}
    # A key that ends in a tenant's name may match as well.
    return sorted(filter(NAMESPACE.fullmatch, found))


async def summary(redis: Client, keyspace: Keyspace) -> Summary | None:
    """A namespace's state; None: there is none. Reads the whole index. Raises RedisUnavailable."""
    control = await read_control(redis, keyspace)
    if b"block_size" not in control.meta or b"shards" not in control.meta:
        return None
    shards = settled(keyspace, control.meta, "shards")
    held, unique = await _held(redis, keyspace)
    laid_out = memory = 0
    async with deadline(STEP_TIMEOUT_S):
        for shard in range(shards):
            bits = await bucket_bits_of(redis, keyspace.of_shard(shard))
            laid_out += BLOCKS_PER_BUCKET << bits if bits else 0
        for master in await redis.masters():
            memory += int((await master.info("memory"))["used_memory"])
    return Summary(
        namespace=keyspace.namespace,
        block_size=settled(keyspace, control.meta, "block_size"),
        shards=shards,
        workers=await _workers(redis, keyspace, control, held),
        unique_blocks=unique,
        laid_out_blocks=laid_out,
        memory_bytes=memory,
    )


async def owners_of(
    redis: Client, keyspace: Keyspace, block: SequenceHash
) -> list[tuple[str, list[tuple[Incarnation, Tier]]]]:
    """The keys that contain `block`, with its owners there, including dead ones.

    The bucket depends on the first block of the group, which a hash does not reveal: all are asked.
    Raises RedisUnavailable.
    """
    name = f"{block:016x}"
    found = []
    async for node, keys in buckets(redis, keyspace):
        async with deadline(STEP_TIMEOUT_S), node.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.hget(key, name)
            replies = await pipe.execute(raise_on_error=False)
        for key, owners in zip(keys, replies, strict=True):
            if isinstance(owners, bytes):
                found.append((readable(key), list(parse_owners(owners))))
    return found


async def fill(
    redis: Client, keyspace: Keyspace, shards: int, rng: random.Random, samples: int = 256
) -> float:
    """Blocks in the index per block it was laid out for, from at least `samples` of its buckets.

    Every shard gives as many; those whose layout cannot be read do not count. Raises
    RedisUnavailable.
    """
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


async def everyone(redis: Client, keyspace: Keyspace) -> list[Worker]:
    """All incarnations; their blocks are not counted. Raises RedisUnavailable."""
    return await _workers(redis, keyspace, await read_control(redis, keyspace), Counter())


async def block_size(redis: Client, keyspace: Keyspace) -> int:
    """Tokens per block. Raises ConfigError for a missing namespace, RedisUnavailable."""
    async with deadline(STEP_TIMEOUT_S):
        meta: Any = await redis.hgetall(keyspace["meta"])
    if b"block_size" not in meta:
        raise ConfigError(f"namespace {keyspace.namespace!r} does not exist")
    return settled(keyspace, meta, "block_size")


async def worker(redis: Client, keyspace: Keyspace, name: str) -> list[Worker]:
    """The incarnations of a worker key or worker id. Raises RedisUnavailable."""
    control = await read_control(redis, keyspace)
    held, _ = await _held(redis, keyspace)
    return [
        one
        for one in await _workers(redis, keyspace, control, held)
        if one.info and name in (one.info.key.worker_id, str(one.info.key))
    ]


async def requests_on(
    redis: Client, keyspace: Keyspace, incarnation: Incarnation
) -> dict[str, str]:
    """Request id → record, of all that is reserved on the incarnation. Raises RedisUnavailable."""
    async with deadline(STEP_TIMEOUT_S):
        found: Any = await redis.hgetall(keyspace[f"requests:{incarnation}"])
    return {readable(name): readable(text) for name, text in found.items()}


async def waiting(redis: Client, keyspace: Keyspace) -> list[Flow]:
    """Flows in the order in which their first requests get a turn. Raises RedisUnavailable."""
    node = redis.node_of(keyspace["flows"]).client
    async with deadline(STEP_TIMEOUT_S):
        seconds, micros = await node.time()
        flows: Any = await node.zrange(keyspace["flows"], 0, -1)
        names = [readable(flow) for flow in flows]
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
    """Worker key → leading blocks of `chain` that it holds, for live workers.

    Raises RedisUnavailable, even if only the index cannot be read.
    """
    control = await read_control(redis, keyspace)
    shards = settled(keyspace, control.meta, "shards")
    (overlaps,), _ = await overlap.match(
        ScriptRunner(redis, STEP_TIMEOUT_S), keyspace, [chain], shards
    )
    if overlaps is None:
        shard = keyspace.of_shard(shard_of(chain[0], shards))
        raise RedisUnavailable(f"the index cannot be read in {shard.tag!r}")
    found = {}
    for name, inc in control.current.items():
        held = overlaps.get(_number(inc))
        if held and control.leases.get(inc, 0) > control.now_ms:
            found[readable(name)] = held
    return found


async def _workers(
    redis: Client, keyspace: Keyspace, control: Control, held: Counter[tuple[Incarnation, Tier]]
) -> list[Worker]:
    newest = await _newest(redis, keyspace)
    serving = set(control.current.values())
    found = []
    for inc in sorted(control.writers.keys() | control.workers.keys(), key=_number):
        expiry = control.leases.get(inc)
        info = control.workers.get(inc)
        number = _number(inc)
        at_ms, measured = newest.get(inc, (None, {}))
        found.append(
            Worker(
                incarnation=number,
                info=_readable_info(info),
                current=inc in serving,
                lease_ms=None if expiry is None else _finite(expiry) - control.now_ms,
                load=parse_load(control.load.get(inc, b"")),
                metrics_age_s=None if at_ms is None else max(0, control.now_ms - at_ms) / 1000,
                gpu=_readable_gpu(measured),
                blocks={tier: held[number, tier] for tier in Tier},
            )
        )
    return found


def _finite(score: float) -> int:
    """The time that a score says, which anybody may have set to infinity."""
    return int(min(max(score, 0.0), LATEST_MS))


async def _newest(redis: Client, keyspace: Keyspace) -> dict[bytes, tuple[int, dict[bytes, bytes]]]:
    """When each incarnation last published metrics, by its text, and what."""
    newest: dict[bytes, tuple[int, dict[bytes, bytes]]] = {}
    before = "+"
    for _ in range(0, METRICS_MAXLEN, STEP_ENTRIES):
        async with deadline(STEP_TIMEOUT_S):
            page: Any = await redis.xrevrange(keyspace["metrics"], max=before, count=STEP_ENTRIES)
        for entry_id, entry in page:
            at_ms = int(entry_id.split(b"-")[0])
            newest.setdefault(entry.get(b"incarnation", b""), (at_ms, entry))
            before = f"({entry_id.decode()}"
    return newest


def _number(inc: bytes) -> Incarnation:
    return parse_incarnation(inc) or Incarnation(0)


def _readable_info(text: bytes | None) -> WorkerInfo | None:
    try:
        return leases.decode_info(text) if text else None
    except (ValueError, KeyError, TypeError):
        return None


def _readable_gpu(entry: dict[bytes, bytes]) -> GpuReadings:
    try:
        return worker_report.decode(entry)[2]
    except ValueError:
        return NO_READINGS


async def _held(redis: Client, keyspace: Keyspace) -> tuple[Counter[tuple[Incarnation, Tier]], int]:
    """Entries of each incarnation by tier, and the number of unique blocks."""
    held: Counter[tuple[Incarnation, Tier]] = Counter()
    unique = 0
    async for node, keys in buckets(redis, keyspace):
        for entries in await contents(node, list(keys)):
            unique += len(entries or ())
            for owners in (entries or {}).values():
                held.update(parse_owners(owners))
    return held, unique
