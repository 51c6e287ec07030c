"""Workers as Redis has them: leases, loads, blocks, metrics and reservations."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from app.core import registration
from app.core.keys import Keyspace
from app.core.loads import Load
from app.core.types import Incarnation, Tier, parse_incarnation
from app.core.verdicts import NO_MARKS, SERVING, State, Verdict, parse_marks
from app.core.worker_report import (
    DEFAULT_SPEED,
    NO_READINGS,
    ForwardPassMetrics,
    GpuReadings,
    Speed,
    WorkerInfo,
)
from app.ops.holders import held_blocks
from app.policy.view import View
from app.state.client import RedisClient
from app.state.columns import parse_load
from app.state.connect import deadline
from app.state.reading import STEP_TIMEOUT_S, Control, read_control, readable
from app.state.streams import id_ms, pages_backwards

STEP_ENTRIES = 512
"""Entries of the metrics stream that are read at once, in 2 ms of Redis's time."""
LATEST_MS = 1e15


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
        info = control.workers.get(inc)
        number = _number(inc)
        at_ms, entry = newest.get(inc, (None, {}))
        measured, _, gpu = _readable_report(entry)
        lease_ms = None if expiry is None else _finite(expiry) - control.now_ms
        has_lease = lease_ms is not None and lease_ms > 0
        counted.append(
            WorkerStatus(
                incarnation=number,
                info=_readable_info(info),
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


def _finite(score: float) -> int:
    """Returns the time that a score says, which anybody may have set to infinity."""
    return int(min(max(score, 0.0), LATEST_MS))


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


def _readable_info(text: bytes | None) -> WorkerInfo | None:
    try:
        return registration.decode_info(text) if text else None
    except ValueError:
        return None


def _readable_report(
    entry: dict[bytes, bytes],
) -> tuple[ForwardPassMetrics, Speed, GpuReadings]:
    try:
        return registration.decode_metrics(entry)
    except ValueError:
        return ForwardPassMetrics(), DEFAULT_SPEED, NO_READINGS
