"""What a router knows about the workers, and the view of them that decisions are made from.

Nothing here outlives a Redis answer except what is fixed for an incarnation (its WorkerInfo), what
follows the metrics stream, and the last view, which routing falls back on without Redis.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

import numpy as np
from numpy.typing import NDArray
from redis.asyncio import Redis

from app.core import worker_report
from app.core.errors import KvrouteError, RedisRecovering, RedisUnavailable
from app.core.keys import METRICS_INTERVAL_S, Keyspace, metrics_interval_s
from app.core.types import Incarnation
from app.core.worker_report import (
    DEFAULT_SPEED,
    NO_READINGS,
    ForwardPassMetrics,
    GpuReadings,
    Speed,
    WorkerInfo,
)
from app.policy.cost import Candidates
from app.state.connect import deadline
from app.state.overlap import Overlaps
from app.state.reservations import Load, Reservation, Snapshot

log = logging.getLogger(__name__)

STALE_AFTER_INTERVALS = 10
PAGE = 512
"""Entries of the metrics stream read at a time, in some 20 ms: two of each of 256 workers."""
MAX_AHEAD_S = 60.0
"""How far an entry of the metrics stream may be ahead of the Redis clock."""
RECOVERY_S = 5.0
"""How long recovery may take after Redis was unreachable. Agents renew a third of a lease after it
is back, usually 1 s."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a worker last published, and when, by the Redis clock."""

    metrics: ForwardPassMetrics
    speed: Speed
    gpu: GpuReadings
    at_ms: int

    def is_stale(self, now_ms: int, workers: int) -> bool:
        """workers: how many there are, which determines how often each publishes."""
        return now_ms - self.at_ms > STALE_AFTER_INTERVALS * 1000 * metrics_interval_s(workers)


class Known:
    """What is known about some incarnations apart from their load; many views share it."""

    def __init__(self, known: list[tuple[Incarnation, WorkerInfo, Measured]]) -> None:
        self.incarnations = [inc for inc, _, _ in known]
        self.infos = [info for _, info, _ in known]
        self.measured = [measured for _, _, measured in known]
        self.everybody = np.ones(len(known), dtype=np.bool_)
        self.position = {inc: i for i, inc in enumerate(self.incarnations)}
        columns = [
            measured_fields(measured.metrics, measured.speed, _kv_total_blocks(info, measured))
            for _, info, measured in known
        ]
        self.rows = tuple(_rows(columns, 14))


class View:
    """The live workers at one moment, in a fixed order; decisions add what they reserve."""

    def __init__(self, snapshot: Snapshot, known: Known) -> None:
        self.now_ms = snapshot.now_ms
        self.somebody_waits = snapshot.somebody_waits
        self.incarnations = known.incarnations
        self.infos = known.infos
        self.measured = known.measured
        self.everybody = known.everybody
        self.loads = [snapshot.loads[inc] for inc in self.incarnations]
        columns = [
            (0.0, 0.0, 0.0, *load_fields(load, self.now_ms, info.max_requests))
            for info, load in zip(self.infos, self.loads, strict=True)
        ]
        # Overlaps and load differ between decisions; the rest does not.
        self._changing, self._fixed = _rows(columns, 9), known.rows
        self._position = known.position

    @property
    def shortest_queue_s(self) -> float:
        """Predicted prefill still to do on the worker with the least; 0 without workers."""
        return min((load.queue_s(self.now_ms) for load in self.loads), default=0.0)

    def openings(self, max_queue_s: float) -> int:
        """How many requests workers with a queue of at most `max_queue_s` take at once.

        If that is finite, any request may be the last that its worker takes, so each worker counts
        as one opening.
        """
        free = [
            info.max_requests - load.requests
            for info, load in zip(self.infos, self.loads, strict=True)
            if load.requests < info.max_requests and load.queue_s(self.now_ms) <= max_queue_s
        ]
        return sum(free) if math.isinf(max_queue_s) else len(free)

    def all_hold(self, num_blocks: int) -> bool:
        """Whether no worker reports fewer KV blocks than this in total."""
        totals = map(_kv_total_blocks, self.infos, self.measured)
        return not any(0 < total < num_blocks for total in totals)

    def candidates(self, overlaps: Overlaps) -> Candidates:
        """The workers as a cost function sees them, for a prompt with these overlaps."""
        device, host, disk, *load = self._changing.copy()
        for inc, overlap in overlaps.items():
            position = self._position.get(inc)
            if position is not None:
                device[position] = overlap.device
                host[position] = overlap.host
                disk[position] = overlap.disk
        return Candidates(device, host, disk, *load, *self._fixed)

    def position(self, inc: Incarnation) -> int | None:
        """The index of an incarnation in this view; None: it is not routed to."""
        return self._position.get(inc)

    def add(self, position: int, reservation: Reservation) -> None:
        """Count a reservation made, or about to be made, on the worker at `position`."""
        load = self.loads[position]
        load.add(reservation, self.now_ms)
        fields = load_fields(load, self.now_ms, self.infos[position].max_requests)
        self._changing[3:, position] = fields


def _rows(columns: list[tuple[float, ...]], height: int) -> NDArray[np.float64]:
    """One row for each of `height` fields, however many columns there are."""
    return np.array(columns, dtype=np.float64).reshape(len(columns), height).T.copy()


def _kv_total_blocks(info: WorkerInfo, measured: Measured) -> int:
    """As measured, or as registered until then."""
    return measured.metrics.kv_total_blocks or info.kv_total_blocks


def load_fields(load: Load, now_ms: int, max_requests: int) -> tuple[float, ...]:
    """What Candidates says of the load on one worker, in its order."""
    return (
        load.prefill_tokens,
        load.queue_s(now_ms),
        load.blocks,
        load.requests,
        load.decoding,
        max_requests,
    )


def measured_fields(m: ForwardPassMetrics, s: Speed, kv_total_blocks: int) -> tuple[float, ...]:
    """What Candidates says of one worker besides overlaps and load, in its order."""
    return (
        m.kv_active_blocks,
        kv_total_blocks,
        m.num_requests_waiting,
        m.gpu_cache_usage_perc,
        m.request_active_slots,
        m.request_total_slots,
        m.kv_idle_before_evict_s,
        s.prefill_s_per_token,
        s.prefill_s_per_token2,
        s.decode_s_per_kv_token,
        s.decode_s_per_seq,
        s.host_s_per_token,
        s.disk_s_per_token,
        s.mean_output_tokens,
    )


_UNMEASURED = Measured(ForwardPassMetrics(), DEFAULT_SPEED, NO_READINGS, at_ms=0)


class Fleet:
    """Learns which incarnations there are, and follows what they measure."""

    def __init__(self, redis: Redis, keyspace: Keyspace, timeout_s: float) -> None:
        self.last_view: View | None = None
        self._redis = redis
        self._keyspace = keyspace
        self._timeout_s = timeout_s
        self._infos: dict[Incarnation, WorkerInfo] = {}
        self._texts: dict[Incarnation, bytes | str] = {}
        """What each of them was read from."""
        self._measured: dict[Incarnation, Measured] = {}
        self._newest_ms: int | None = None
        """The time of the last entry read from the metrics stream."""
        self._known: Known | None = None
        """That of the last view, until anything new is learnt."""
        self._workers_ms: int | None = None
        """`Snapshot.workers_ms` as of what is known about the incarnations."""
        self.shards: int | None = None
        """How many the namespace's index has; None: not seen yet."""
        self._redis_ahead_ms: float | None = None
        """The Redis clock minus our monotonic one."""
        self._missed: frozenset[Incarnation] = frozenset()
        """The incarnations that were live when Redis became unreachable."""
        self._recovers_until = 0.0
        self._failure = ""
        """How Redis failed last."""

    @property
    def block_size(self) -> int | None:
        """Tokens per block, which all workers of a namespace share; None before the first."""
        view = self.last_view
        return view.infos[0].block_size if view and view.infos else None

    @property
    def recovers(self) -> bool:
        """Whether Redis was unreachable so recently that a live worker's lease may have run out."""
        return time.monotonic() < self._recovers_until

    @property
    def redis_now_ms(self) -> int | None:
        """The Redis clock, by what it was when Redis last answered; None before it ever did."""
        ahead_ms = self._redis_ahead_ms
        return None if ahead_ms is None else round(time.monotonic() * 1000 + ahead_ms)

    @property
    def metrics_age_s(self) -> float:
        """Age of the newest entry of the metrics stream that was read; 0 before any `view`."""
        now_ms = self.redis_now_ms
        if now_ms is None or self._newest_ms is None:
            return 0.0
        return max(0.0, (now_ms - self._newest_ms) / 1000)

    def note(self, error: KvrouteError) -> None:
        """Record that a query to Redis failed with `error`."""
        if not isinstance(error, RedisUnavailable) or isinstance(error, RedisRecovering):
            return
        self._recovers_until = time.monotonic() + RECOVERY_S
        self._failure = str(error)
        if self.last_view is not None:
            self._missed = frozenset(self.last_view.incarnations)

    async def view(self, snapshot: Snapshot) -> View:
        """`snapshot` with what is known about its incarnations. Asks Redis only about new ones.

        Raises RedisUnavailable, and RedisRecovering while the last view is the better one.
        """
        if self.recovers and self._missed & snapshot.lapsed:
            raise RedisRecovering(
                f"leases lapsed while Redis failed: {len(snapshot.lapsed)} ({self._failure})"
            )
        self._missed = frozenset()
        self._redis_ahead_ms = snapshot.now_ms - time.monotonic() * 1000
        if snapshot.workers_ms not in (None, self._workers_ms):
            await self._learn(list(snapshot.loads))
            self.forget_except(snapshot.loads)
            self._workers_ms = snapshot.workers_ms
        self.shards = snapshot.shards or self.shards
        await self._learn([inc for inc in snapshot.loads if inc not in self._infos])
        live = [inc for inc in snapshot.loads if inc in self._infos]
        if self._known is None or self._known.incarnations != live:
            self._known = Known([(inc, self._infos[inc], self.measured(inc)) for inc in live])
        self.last_view = View(snapshot, self._known)
        return self.last_view

    async def _learn(self, incarnations: list[Incarnation]) -> None:
        if not incarnations:
            return
        async with deadline(self._timeout_s):
            texts = await self._redis.hmget(
                self._keyspace["workers"], [str(inc) for inc in incarnations]
            )
        for inc, text in zip(incarnations, texts, strict=True):
            if text is None or text == self._texts.get(inc):
                continue
            try:
                info = worker_report.decode_info(text)
            except ValueError as error:
                log.warning("ignoring the worker of incarnation %d: %s", inc, error)
                continue
            if self._infos.get(inc, info) != info:
                # The number is another worker's now, because Redis lost data.
                self._measured.pop(inc, None)
            self._infos[inc], self._texts[inc] = info, text
            self._known = None

    def name_of(self, incarnation: Incarnation) -> str:
        """The worker it is of, for a log."""
        info = self._infos.get(incarnation)
        return f"worker {info.key}" if info else f"incarnation {incarnation}"

    def forget_except(self, live: Iterable[Incarnation]) -> None:
        """Drop what is known about incarnations that are not among `live`."""
        keep = set(live)
        self._infos = {inc: info for inc, info in self._infos.items() if inc in keep}
        self._texts = {inc: text for inc, text in self._texts.items() if inc in keep}
        self._measured = {inc: m for inc, m in self._measured.items() if inc in keep}

    def load_statistics(self, now_ms: int) -> tuple[float, float]:
        """Mean and sample standard deviation of the used fraction of KV blocks.

        Over the workers of the last view that are not stale; 0 if there are too few.
        """
        view = self.last_view
        live = view.incarnations if view else []
        loads = [
            m.metrics.kv_active_blocks / m.metrics.kv_total_blocks
            for m in map(self.measured, live)
            if m.metrics.kv_total_blocks and not m.is_stale(now_ms, len(live))
        ]
        return (mean(loads) if loads else 0.0, stdev(loads) if len(loads) > 1 else 0.0)

    def measured(self, incarnation: Incarnation) -> Measured:
        return self._measured.get(incarnation, _UNMEASURED)

    async def follow(self) -> None:
        """Keep the latest entry of each incarnation in the metrics stream, until cancelled."""
        position: bytes | None = None
        while True:
            try:
                position = await self._poll(position)
            except RedisUnavailable as error:
                # A restarted server may count its ids from an earlier clock: start over.
                position = None
                log.debug("metrics not read: %s", error)
            await asyncio.sleep(METRICS_INTERVAL_S)

    async def _poll(self, position: bytes | None) -> bytes | None:
        """Take the entries after `position`, or the newest of each worker; returns the new one."""
        if position is None:
            position = await self._take_newest()
        else:
            position = await self._take_after(position)
        if position is None:
            return None
        self._newest_ms = _id_ms(position)
        now_ms = self.redis_now_ms
        if now_ms is not None and self._newest_ms - now_ms > MAX_AHEAD_S * 1000:
            # Somebody wrote it by hand: later entries may be dated from now, and so come before it.
            return None
        return position

    async def _take_after(self, position: bytes) -> bytes:
        is_more = True
        while is_more:
            async with deadline(self._timeout_s):
                reply: Any = await self._redis.xread(
                    {self._keyspace["metrics"]: position}, count=PAGE
                )
            page = reply[0][1] if reply else []
            for position, fields in page:
                self._take(_id_ms(position), fields)
            is_more = len(page) == PAGE
        return position

    async def _take_newest(self) -> bytes | None:
        """Take the newest entry of each worker; returns the position of the newest of all.

        Goes back until a page shows no other worker. The whole stream would take Redis and us
        longer than a decision may wait.
        """
        newest, before = None, "+"
        seen: set[bytes | None] = set()
        while True:
            page: Any
            async with deadline(self._timeout_s):
                page = await self._redis.xrevrange(
                    self._keyspace["metrics"], max=before, count=PAGE
                )
            others = 0
            for entry_id, fields in page:
                newest = newest or entry_id
                before = f"({entry_id.decode()}"
                incarnation = fields.get(b"incarnation")
                if incarnation not in seen and self._take(_id_ms(entry_id), fields):
                    seen.add(incarnation)
                    others += 1
            if not others:
                return newest

    def _take(self, at_ms: int, fields: dict[bytes, bytes]) -> bool:
        """Keep what an entry says; False: it makes no sense."""
        try:
            incarnation = Incarnation(int(fields[b"incarnation"]))
            self._measured[incarnation] = Measured(*worker_report.decode(fields), at_ms)
        except (KeyError, ValueError) as error:
            worker = fields.get(b"worker", b"").decode(errors="replace")
            log.warning("ignoring a metrics entry of %s: %s", worker, error)
            return False
        self._known = None
        return True


def _id_ms(entry_id: bytes) -> int:
    return int(entry_id.split(b"-")[0])
