"""Workers as Redis has them: leases, loads, metrics, reservations, and blocks that they hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from app.core.chains import parse_owners, shard_of
from app.core.errors import RedisUnavailable
from app.core.keys import Keyspace
from app.core.loads import Load
from app.core.overlaps import Resume
from app.core.registration import decode_info, decode_metrics
from app.core.types import Incarnation, SequenceHash, Tier, TierOverlap, parse_incarnation
from app.core.verdicts import NO_MARKS, SERVING, State, Verdict, parse_marks
from app.core.worker_report import (
    DEFAULT_SPEED,
    NO_READINGS,
    ForwardPassMetrics,
    GpuReadings,
    WorkerInfo,
)
from app.policy.view import View
from app.state import overlap
from app.state.client import RedisClient
from app.state.columns import parse_load
from app.state.connect import deadline
from app.state.reading import (
    STEP_TIMEOUT_S,
    Control,
    buckets,
    contents,
    number_of,
    read_control,
    readable,
)
from app.state.scripts import ScriptRunner
from app.state.streams import id_ms, pages_backwards


async def owners_of(
    redis: RedisClient, keyspace: Keyspace, block: SequenceHash
) -> list[tuple[str, list[tuple[Incarnation, Tier]]]]:
    """Returns the keys that contain `block`, with its owners there, dead ones included.

    The bucket depends on the first block of the group, which a hash does not reveal: all are asked.
    Raises RedisUnavailable.
    """
    name = f"{block:016x}"
    owners_by_block = []
    async for node, keys in buckets(redis, keyspace):
        async with deadline(STEP_TIMEOUT_S), node.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.hget(key, name)
            replies = await pipe.execute(raise_on_error=False)
        for key, owners in zip(keys, replies, strict=True):
            if isinstance(owners, bytes):
                owners_by_block.append((readable(key), list(parse_owners(owners))))
    return owners_by_block


class Holding(NamedTuple):
    """Leading blocks of a prompt that a worker holds, and the number that its engine reuses."""

    held: TierOverlap
    reused: int


async def prefix(
    redis: RedisClient, keyspace: Keyspace, chain: list[SequenceHash], num_tokens: int
) -> dict[str, Holding]:
    """Returns what each live worker holds of a prompt, by worker key.

    Raises RedisUnavailable, even if only the index cannot be read.
    """
    control = await read_control(redis, keyspace)
    shards = number_of(keyspace, control.meta, "shards")
    try:
        overlaps = await overlap.read_whole(
            ScriptRunner(redis, STEP_TIMEOUT_S), keyspace, chain, shards
        )
    except RedisUnavailable as error:
        shard = keyspace.of_shard(shard_of(chain[0], shards))
        raise RedisUnavailable(f"the index cannot be read in {shard.tag!r}: {error}") from error
    holdings = {}
    for name, number in control.current.items():
        inc = parse_incarnation(number) or Incarnation(0)
        held = overlaps.get(inc)
        if held and control.leases.get(number, 0) > control.now_ms:
            resume, info = overlaps.resumes.get(inc), control.workers.get(number)
            holdings[readable(name)] = Holding(held, _reused(held, resume, info, num_tokens))
    return holdings


def _reused(held: TierOverlap, resume: Resume | None, text: bytes | None, num_tokens: int) -> int:
    info = _readable(decode_info, text or b"", None)
    if info is None:
        return held.total  # `verify` tells
    most = (num_tokens - 1) // info.block_size
    return resume.reused(most) if resume else info.reuse_rule.reusable(held, most)


async def held_blocks(
    redis: RedisClient, keyspace: Keyspace
) -> tuple[Counter[tuple[Incarnation, Tier]], int]:
    """Returns the entries of each incarnation by tier, and the number of unique blocks.

    Reads the whole index. Raises RedisUnavailable.
    """
    held: Counter[tuple[Incarnation, Tier]] = Counter()
    unique = 0
    async for node, keys in buckets(redis, keyspace):
        for entries in await contents(node, list(keys)):
            unique += len(entries or ())
            for owners in (entries or {}).values():
                held.update(parse_owners(owners))
    return held, unique


STEP_ENTRIES = 512
"""Entries of the metrics stream that are read at once, in 2 ms of Redis's time."""
LATEST_MS = 1e15
NOTHING_MEASURED = (ForwardPassMetrics(), DEFAULT_SPEED, NO_READINGS)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One incarnation of a worker. lease_ms: what is left of its lease, if it has one.
    metrics_age_s: age of the newest entry in the metrics stream, from which gpu and hit_rate (0-1)
    are."""

    incarnation: Incarnation
    info: WorkerInfo | None
    current: bool
    lease_ms: int | None
    load: Load | None
    metrics_age_s: float | None
    gpu: GpuReadings
    blocks: dict[Tier, int]
    verdict: Verdict = SERVING
    hit_rate: float = 0.0

    @property
    def state(self) -> str:
        """State of the worker, or `staged` before the worker is switched to the incarnation."""
        is_staged = not self.current and self.verdict.state is not State.LAPSED
        return "staged" if is_staged else self.verdict.state

    @property
    def is_routed_to(self) -> bool:
        return self.state in (State.SERVING, State.TRIAL, State.AWAY)


async def everyone(redis: RedisClient, keyspace: Keyspace) -> list[WorkerStatus]:
    """Returns all incarnations; their blocks are not counted. Raises RedisUnavailable."""
    return await with_blocks(redis, keyspace, await read_control(redis, keyspace), Counter())


async def worker(redis: RedisClient, keyspace: Keyspace, name: str) -> list[WorkerStatus]:
    """Returns the incarnations of a worker key or worker id. Raises RedisUnavailable."""
    control = await read_control(redis, keyspace)
    held, _ = await held_blocks(redis, keyspace)
    return [
        one
        for one in await with_blocks(redis, keyspace, control, held)
        if one.info and name in (one.info.key.worker_id, str(one.info.key))
    ]


def live_in(view: View) -> list[WorkerStatus]:
    """Returns the live workers but for those whose agents are away; their blocks are not
    counted."""
    return [
        WorkerStatus(
            incarnation=inc,
            info=info,
            current=True,
            lease_ms=1,
            load=load,
            metrics_age_s=(max(0, view.now_ms - measured.at_ms) / 1000 if measured.at_ms else None),
            gpu=measured.gpu,
            blocks={},
            hit_rate=measured.metrics.gpu_prefix_cache_hit_rate,
        )
        for inc, info, load, measured in zip(
            view.incarnations, view.infos, view.loads, view.measured, strict=True
        )
        if inc not in view.away
    ]


async def requests_on(
    redis: RedisClient, keyspace: Keyspace, incarnation: Incarnation
) -> dict[str, str]:
    """Returns the record of each reservation on an incarnation, by request id. Raises
    RedisUnavailable."""
    async with deadline(STEP_TIMEOUT_S):
        reply: Any = await redis.hgetall(keyspace[f"requests:{incarnation}"])
    return {readable(name): readable(text) for name, text in reply.items()}


async def with_blocks(
    redis: RedisClient,
    keyspace: Keyspace,
    control: Control,
    held: Counter[tuple[Incarnation, Tier]],
) -> list[WorkerStatus]:
    newest = await _newest(redis, keyspace)
    known = control.verdicts
    marks = {inc: parse_marks(known.get(name, b"")) for name, inc in control.current.items()}
    counted = []
    for inc in sorted(control.writers.keys() | control.workers.keys(), key=_number):
        expiry = control.leases.get(inc)
        number = _number(inc)
        at_ms, entry = newest.get(inc, (None, {}))
        measured, _, gpu = _readable(decode_metrics, entry, NOTHING_MEASURED)
        # Anybody may have set it to infinity.
        finite_ms = None if expiry is None else int(min(max(expiry, 0.0), LATEST_MS))
        lease_ms = None if finite_ms is None else finite_ms - control.now_ms
        has_lease = lease_ms is not None and lease_ms > 0
        counted.append(
            WorkerStatus(
                incarnation=number,
                info=_readable(decode_info, control.workers.get(inc, b""), None),
                current=inc in marks,
                lease_ms=lease_ms,
                load=parse_load(control.load.get(inc, b"")),
                metrics_age_s=None if at_ms is None else max(0, control.now_ms - at_ms) / 1000,
                gpu=gpu,
                blocks={tier: held[number, tier] for tier in Tier},
                verdict=marks.get(inc, NO_MARKS).verdict(control.now_ms, has_lease=has_lease),
                hit_rate=measured.gpu_prefix_cache_hit_rate,
            )
        )
    return counted


async def _newest(
    redis: RedisClient, keyspace: Keyspace
) -> dict[bytes, tuple[int, dict[bytes, bytes]]]:
    """Returns each incarnation's last metrics and when they came, by the incarnation's text."""
    newest: dict[bytes, tuple[int, dict[bytes, bytes]]] = {}
    async for page in pages_backwards(redis, keyspace["metrics"], STEP_ENTRIES):
        for entry_id, entry in page:
            newest.setdefault(entry.get(b"incarnation", b""), (id_ms(entry_id), entry))
    return newest


def _number(inc: bytes) -> Incarnation:
    return parse_incarnation(inc) or Incarnation(0)


def _readable(decode: Callable[[Any], T], value: Any, default: T) -> T:
    try:
        return decode(value)
    except ValueError:
        return default
