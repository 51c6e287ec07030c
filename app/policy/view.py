"""The live workers as decisions see them: one column of Candidates for each, filled by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields
from operator import attrgetter
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from app.core.keys import metrics_interval_s
from app.core.loads import (
    LOAD_FIELDS,
    MEMORY_ROUNDS,
    ROUND,
    Load,
    Loads,
    Reservation,
    Snapshot,
    fading,
)
from app.core.overlaps import Overlaps
from app.core.types import Incarnation, TierOverlap
from app.core.worker_report import (
    DEFAULT_SPEED,
    NO_READINGS,
    ForwardPassMetrics,
    GpuReadings,
    Speed,
    WorkerInfo,
)
from app.policy.cost import Candidates, Floats
from app.policy.sources import roles_of

STALE_AFTER_INTERVALS = 10
MAX_PLACES = 64
"""Sets of workers; of 2,000 each they are 1 MB."""

OVERLAP_ROWS = ("overlap_device", "overlap_host", "overlap_disk")
LOAD_ROWS = (
    "prefill_tokens",
    "prefill_s",
    "active_blocks",
    "active_requests",
    "decoding_requests",
    "max_requests",
    "routed_s",
    "sending_s",
    "receiving_s",
)
QUEUE, REQUESTS, ROUTED = (
    len(OVERLAP_ROWS) + LOAD_ROWS.index(row) for row in ("prefill_s", "active_requests", "routed_s")
)
METRICS_ROWS = {
    "kv_active_blocks": "kv_active_blocks",
    "kv_total_blocks": "kv_total_blocks",
    "num_requests_waiting": "num_requests_waiting",
    "gpu_cache_usage": "gpu_cache_usage_perc",
    "request_active_slots": "request_active_slots",
    "request_total_slots": "request_total_slots",
    "kv_idle_before_evict_s": "kv_idle_before_evict_s",
}
"""Rows of Candidates, and the fields of ForwardPassMetrics that they show."""
TOTAL = LOAD_FIELDS.index("total")
KV_TOTAL = list(METRICS_ROWS).index("kv_total_blocks")
SPEED_ROWS = tuple(f.name for f in fields(Speed))

_of_metrics = attrgetter(*METRICS_ROWS.values())
_of_speed = attrgetter(*SPEED_ROWS)

ROWS = (*OVERLAP_ROWS, *LOAD_ROWS, *METRICS_ROWS, *SPEED_ROWS)
if tuple(f.name for f in fields(Candidates)) != ROWS:
    raise TypeError(f"the rows of a view are not the fields of Candidates: {ROWS}")


def load_rows(load: Load, now_ms: int, max_requests: int, rounds: int) -> tuple[float, ...]:
    """LOAD_ROWS of one worker. rounds: as of a Snapshot."""
    return (
        load.prefill_tokens,
        load.queue_s(now_ms),
        load.blocks,
        load.requests,
        load.decoding,
        max_requests,
        load.routed_s(rounds),
        load.sending_s(now_ms),
        load.receiving_s(now_ms),
    )


def rows_of(loads: Loads, now_ms: int, max_requests: Floats, rounds: int) -> Floats:
    """The same of all workers, below OVERLAP_ROWS of zeros."""
    tokens, us, head_us, head_since_ms, blocks, requests, decoding, *_ = loads.columns
    _, routed_us, routed_at, *transfers_until_ms = loads.columns[7:]
    drained_us = np.minimum((now_ms - head_since_ms) * 1000.0, head_us)
    queue_s = (us - np.maximum(drained_us, 0.0)) / 1e6
    fading = np.exp(np.maximum(rounds - routed_at, 0.0) / -(MEMORY_ROUNDS * ROUND))
    none = np.zeros(tokens.size)
    routed_s = routed_us / 1e6 * fading
    transfers_s = [np.maximum(until_ms - now_ms, 0.0) / 1000.0 for until_ms in transfers_until_ms]
    of_load = tokens, queue_s, blocks, requests, decoding, max_requests, routed_s, *transfers_s
    return np.array((none, none, none, *of_load))


def measured_rows(metrics: ForwardPassMetrics, speed: Speed) -> tuple[float, ...]:
    """METRICS_ROWS and SPEED_ROWS of one worker."""
    return (*_of_metrics(metrics), *_of_speed(speed))


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


UNMEASURED = Measured(ForwardPassMetrics(), DEFAULT_SPEED, NO_READINGS, at_ms=0)


class Workers:
    """What is known about the live workers apart from their load; many views share it."""

    def __init__(self, workers: Sequence[tuple[Incarnation, WorkerInfo, Measured]]) -> None:
        self.incarnations = [inc for inc, _, _ in workers]
        self.infos = [info for _, info, _ in workers]
        self.measured = [measured for _, _, measured in workers]
        self.everybody = np.ones(len(workers), dtype=np.bool_)
        self.position = {inc: i for i, inc in enumerate(self.incarnations)}
        self._places: dict[frozenset[Incarnation], NDArray[np.intp]] = {}
        self.roles = roles_of(self.infos)
        self.are_publishing = any(info.publishing for info in self.infos)
        self.reuse_less = {
            inc: info for inc, info, _ in workers if info.reuse_blocks > 1 or info.recomputed_blocks
        }
        """Those whose engines do not reuse each block that they hold."""
        self.rows = np.empty((len(METRICS_ROWS) + len(SPEED_ROWS), len(workers)))
        self._show(range(len(workers)))
        self.reported = tuple(self.rows)
        """Its rows, one by one: to take a matrix apart takes time for each of them."""
        self.max_requests = np.array([info.max_requests for info in self.infos], dtype=np.float64)

    @property
    def kv_total_blocks(self) -> Floats:
        totals: Floats = self.rows[KV_TOTAL]
        return totals

    def places_of(self, many: frozenset[Incarnation]) -> NDArray[np.intp]:
        """Where those are that are routed to. Kept, as many prompts begin alike."""
        places = self._places.get(many)
        if places is None:
            if len(self._places) >= MAX_PLACES:
                self._places.clear()
            found = [self.position[inc] for inc in many if inc in self.position]
            places = self._places[many] = np.array(found, np.intp)
        return places

    def with_measured(self, measured: Mapping[Incarnation, Measured]) -> Workers:
        """The same workers, of which some have been measured anew."""
        workers = copy(self)
        workers.measured, workers.rows = self.measured.copy(), self.rows.copy()
        places = [self.position[inc] for inc in measured if inc in self.position]
        for place in places:
            workers.measured[place] = measured[self.incarnations[place]]
        workers._show(places)
        workers.reported = tuple(workers.rows)
        return workers

    def _show(self, places: Sequence[int]) -> None:
        """Write what was measured at some places into the rows."""
        some = [self.measured[place] for place in places]
        rows = _matrix([measured_rows(m.metrics, m.speed) for m in some], len(self.rows))
        # As registered, until the worker has reported it.
        registered = np.array([self.infos[place].kv_total_blocks for place in places], np.float64)
        np.copyto(rows[KV_TOTAL], registered, where=rows[KV_TOTAL] == 0)
        self.rows[:, places] = rows


class View:
    """The live workers at one moment, in a fixed order; decisions add what they reserve."""

    def __init__(
        self,
        snapshot: Snapshot,
        workers: Workers,
        paused: Mapping[Incarnation, WorkerInfo] = MappingProxyType({}),
    ) -> None:
        """paused: workers that are live, but get no requests because they failed some or drain."""
        self.now_ms = snapshot.now_ms
        self.rounds = snapshot.rounds
        self.failing = snapshot.failing
        self.paused = paused
        self.somebody_waits = snapshot.somebody_waits
        self.incarnations = workers.incarnations
        self.infos = workers.infos
        self.measured = workers.measured
        self.everybody = workers.everybody
        self.roles = workers.roles
        """None: each worker does all of a request, and KV travels between none."""
        self._loads = snapshot.loads
        self._workers = workers
        self._rows = rows_of(self._loads, self.now_ms, workers.max_requests, self.rounds)

    @property
    def loads(self) -> list[Load]:
        """Of each worker, in a copy."""
        return list(map(self._loads.at, range(len(self.incarnations))))

    def total(self, position: int) -> int:
        """Reservations ever made on the worker at `position`."""
        return int(self._loads.columns[TOTAL, position])

    @property
    def is_short(self) -> bool:
        """Whether some worker holds what the index does not show yet."""
        return self._workers.are_publishing

    @property
    def block_size(self) -> int | None:
        """Tokens per block, which all workers of a namespace share; None without workers."""
        return self.infos[0].block_size if self.infos else None

    @property
    def shortest_queue_s(self) -> float:
        """Predicted prefill still to do on the worker with the least; 0 without workers."""
        return float(self._rows[QUEUE].min()) if self.infos else 0.0

    def openings(self, max_queue_s: float) -> int:
        """How many requests workers with a queue of at most `max_queue_s` take at once.

        If that is finite, any request may be the last that its worker takes, so each worker counts
        as one opening.
        """
        free = self._workers.max_requests - self._rows[REQUESTS]
        free = free[(free > 0) & (self._rows[QUEUE] <= max_queue_s)]
        return int(free.sum()) if math.isinf(max_queue_s) else free.size

    def all_hold(self, num_blocks: int) -> bool:
        """Whether no worker reports fewer KV blocks than this in total."""
        totals = self._workers.kv_total_blocks
        return not ((totals > 0) & (totals < num_blocks)).any()

    def candidates(self, overlaps: Overlaps) -> Candidates:
        """The workers as a cost function sees them, for a prompt with these overlaps."""
        # A copy, as overlaps are this prompt's own and later decisions add to the loads.
        device, host, disk, *loads = self._rows.copy()
        for members, overlap in overlaps.shared:
            rows = self._workers.places_of(members)
            device[rows], host[rows], disk[rows] = overlap.device, overlap.host, overlap.disk
        for inc, overlap in overlaps.own.items():
            position = self.position(inc)
            if position is not None:
                device[position] = overlap.device
                host[position] = overlap.host
                disk[position] = overlap.disk
        return Candidates(device, host, disk, *loads, *self._workers.reported)

    def reusable(self, overlaps: Overlaps, isl_tokens: int) -> Overlaps:
        """What the engines would reuse of `overlaps`, those of a prompt of `isl_tokens`."""
        reused: dict[Incarnation, TierOverlap] = {}
        for inc, info in self._workers.reuse_less.items():
            if inc in overlaps:
                reused[inc] = _reused(overlaps[inc], info, isl_tokens)
        if not reused:
            return overlaps
        return Overlaps({inc: o for inc, o in (overlaps.flat() | reused).items() if o.total})

    def position(self, inc: Incarnation) -> int | None:
        """The index of an incarnation in this view; None: it is not routed to."""
        return self._workers.position.get(inc)

    def add(self, position: int, reservation: Reservation) -> None:
        """Count a reservation made, or about to be made, on the worker at `position`."""
        load = self._loads.at(position)
        share = ROUND // len(self.infos)
        self.rounds += share
        load.add(reservation, self.now_ms, self.rounds)
        self._loads.put(position, load)
        self._rows[ROUTED] *= fading(share)
        max_requests = self.infos[position].max_requests
        rows = load_rows(load, self.now_ms, max_requests, self.rounds)
        self._rows[len(OVERLAP_ROWS) :, position] = rows


def _reused(overlap: TierOverlap, info: WorkerInfo, isl_tokens: int) -> TierOverlap:
    # The last token is always computed, and with it the block of the engine that it is in.
    most = (isl_tokens - 1) // info.block_size
    whole = min(overlap.total, most) // info.reuse_blocks * info.reuse_blocks
    return overlap.first(max(whole - info.recomputed_blocks, 0))


def load_statistics(view: View) -> tuple[float, float]:
    """Mean and sample standard deviation of the used fraction of KV blocks.

    Over the workers that are not stale; 0 if there are too few.
    """
    used = [
        m.metrics.kv_active_blocks / m.metrics.kv_total_blocks
        for m in view.measured
        if m.metrics.kv_total_blocks and not m.is_stale(view.now_ms, len(view.infos))
    ]
    return (
        float(np.mean(used)) if used else 0.0,
        float(np.std(used, ddof=1)) if len(used) > 1 else 0.0,
    )


def _matrix(columns: list[tuple[float, ...]], height: int) -> NDArray[np.float64]:
    """One row for each of `height` values, however many columns there are."""
    return np.array(columns, dtype=np.float64).reshape(len(columns), height).T.copy()
