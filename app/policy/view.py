"""The live workers as decisions see them: one column of Candidates for each, filled by name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields
from functools import cached_property
from operator import attrgetter
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from app.core.failures import FailingByWorker
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
from app.core.resume import EVERY_BLOCK
from app.core.types import Incarnation, TierOverlap
from app.core.worker_report import (
    DEFAULT_SPEED,
    NO_READINGS,
    ForwardPassMetrics,
    GpuReadings,
    Speed,
    WorkerInfo,
)
from app.policy import reported
from app.policy.cost import Candidates, Floats
from app.policy.pair_failures import Pair
from app.policy.reported import Others
from app.policy.transfer import roles_of

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
    "others_requests",
)
PREFILL_TOKENS, QUEUE, BLOCKS, REQUESTS, DECODES, MOST_REQUESTS, ROUTED, *_, OTHERS = range(
    len(OVERLAP_ROWS), len(OVERLAP_ROWS) + len(LOAD_ROWS)
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
TOTAL, RESERVED, DECODING = map(LOAD_FIELDS.index, ("total", "requests", "decoding"))
KV_TOTAL = list(METRICS_ROWS).index("kv_total_blocks")
SPEED_ROWS = tuple(f.name for f in fields(Speed))

_of_metrics = attrgetter(*METRICS_ROWS.values())
_of_speed = attrgetter(*SPEED_ROWS)

ROWS = (*OVERLAP_ROWS, *LOAD_ROWS, *METRICS_ROWS, *SPEED_ROWS)
if tuple(f.name for f in fields(Candidates)) != ROWS:
    raise TypeError(f"the rows of a view are not the fields of Candidates: {ROWS}")


def load_rows(load: Load, now_ms: int, max_requests: int, rounds: int) -> tuple[float, ...]:
    """LOAD_ROWS of one worker that nobody else uses. rounds: as of a Snapshot."""
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
        0.0,
    )


def rows_of(loads: Loads, now_ms: int, max_requests: Floats, rounds: int) -> Floats:
    """The same of all workers, below OVERLAP_ROWS of zeros."""
    load = dict(zip(LOAD_FIELDS, loads.columns, strict=True))
    drained_us = np.minimum((now_ms - load["head_since_ms"]) * 1000.0, load["head_us"])
    queue_s = (load["prefill_us"] - np.maximum(drained_us, 0.0)) / 1e6
    fading = np.exp(np.maximum(rounds - load["routed_at"], 0.0) / -(MEMORY_ROUNDS * ROUND))
    none = np.zeros(queue_s.size)
    of_load = (
        load["prefill_tokens"],
        queue_s,
        load["blocks"],
        load["requests"],
        load["decoding"],
        max_requests,
        load["routed_us"] / 1e6 * fading,
        np.maximum(load["sending_until_ms"] - now_ms, 0.0) / 1000.0,
        np.maximum(load["receiving_until_ms"] - now_ms, 0.0) / 1000.0,
    )
    return np.array((none, none, none, *of_load, none))


def measured_rows(metrics: ForwardPassMetrics, speed: Speed) -> tuple[float, ...]:
    """METRICS_ROWS and SPEED_ROWS of one worker."""
    return (*_of_metrics(metrics), *_of_speed(speed))


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a worker last published, and when, by the Redis clock."""

    metrics: ForwardPassMetrics
    speed: Speed
    gpu: GpuReadings
    at_ms: int

    def is_stale(self, now_ms: int, workers: int) -> bool:
        """workers: how many there are, which determines how often each publishes."""
        return now_ms - self.at_ms > STALE_AFTER_INTERVALS * 1000 * metrics_interval_s(workers)


UNMEASURED = Measurement(ForwardPassMetrics(), DEFAULT_SPEED, NO_READINGS, at_ms=0)


class Contexts:
    """tokens: that each engine takes of a prompt and its answer together, (workers,); inf: it does
    not say. least: of those."""

    def __init__(self, infos: Sequence[WorkerInfo]) -> None:
        self.tokens = np.array([info.max_model_len or math.inf for info in infos], np.float64)
        self.least = float(self.tokens.min()) if infos else math.inf


class Workers:
    """What is known about the live workers apart from their load; many views share it."""

    def __init__(self, workers: Sequence[tuple[Incarnation, WorkerInfo, Measurement]]) -> None:
        self.incarnations = [inc for inc, _, _ in workers]
        self.infos = [info for _, info, _ in workers]
        self.measured = [measured for _, _, measured in workers]
        self.everybody = np.ones(len(workers), dtype=np.bool_)
        self.position = {inc: i for i, inc in enumerate(self.incarnations)}
        self._places: dict[frozenset[Incarnation], NDArray[np.intp]] = {}
        self.roles = roles_of(self.infos)
        self.contexts = Contexts(self.infos)
        self.are_publishing = any(info.publishing for info in self.infos)
        self.approximate = frozenset(inc for inc, info, _ in workers if info.approximate)
        self.reuse_less = {
            inc: rule for inc, info, _ in workers if (rule := info.reuse_rule) != EVERY_BLOCK
        }
        """Those whose engines do not reuse each block that they hold."""
        self.rows = np.empty((len(METRICS_ROWS) + len(SPEED_ROWS), len(workers)))
        self.reports = np.empty((len(reported.ROWS), len(workers)))
        """What each says of what is in its engine: see app.policy.reported."""
        self._show(range(len(workers)))
        self.reported = tuple(self.rows)
        """Its rows, one by one: to take a matrix apart takes time for each of them."""
        self.max_requests = np.array([info.max_requests for info in self.infos], dtype=np.float64)
        self.late_s = _beyond_least([m.metrics.late_s for m in self.measured])
        """For how long each keeps others waiting beyond the one that does least, (workers,); None:
        all alike. What befalls all says nothing of any."""

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
            positions = [self.position[inc] for inc in many if inc in self.position]
            places = self._places[many] = np.array(positions, np.intp)
        return places

    def with_measured(self, measured: Mapping[Incarnation, Measurement]) -> Workers:
        """The same workers, of which some have been measured anew."""
        workers = copy(self)
        workers.measured, workers.rows = self.measured.copy(), self.rows.copy()
        workers.reports = self.reports.copy()
        places = [self.position[inc] for inc in measured if inc in self.position]
        for place in places:
            workers.measured[place] = measured[self.incarnations[place]]
        workers._show(places)
        workers.reported = tuple(workers.rows)
        workers.late_s = _beyond_least([m.metrics.late_s for m in workers.measured])
        return workers

    def _show(self, places: Sequence[int]) -> None:
        """Write what was measured at some places into the rows."""
        some = [self.measured[place] for place in places]
        rows = _matrix([measured_rows(m.metrics, m.speed) for m in some], len(self.rows))
        # As registered, until the worker has reported it.
        registered = np.array([self.infos[place].kv_total_blocks for place in places], np.float64)
        np.copyto(rows[KV_TOTAL], registered, where=rows[KV_TOTAL] == 0)
        self.rows[:, places] = rows
        totals = rows[KV_TOTAL].tolist()
        said = [
            reported.row_of(m.metrics, total, m.speed, m.at_ms)
            for m, total in zip(some, totals, strict=True)
        ]
        self.reports[:, places] = _matrix(said, len(self.reports))
        self.may_have_others = bool(self.infos) and reported.may_exceed(
            self.reports, self.infos[0].block_size
        )
        """Whether any of their engines may have what no router reserved."""


class View:
    """The live workers at one moment, in a fixed order; decisions add what they reserve."""

    def __init__(
        self,
        snapshot: Snapshot,
        workers: Workers,
        paused: Mapping[Incarnation, WorkerInfo] = MappingProxyType({}),
        lapsed: Mapping[Incarnation, WorkerInfo] = MappingProxyType({}),
    ) -> None:
        """paused: workers that are live, but get no requests because they failed some, are ill or
        drain. lapsed: those of which nothing is heard."""
        self.now_ms = snapshot.now_ms
        self.rounds = snapshot.rounds
        self.failing = FailingByWorker(snapshot.failing)
        self.lacking = snapshot.lacking
        self.paused, self.lapsed = paused, lapsed
        self.pairs_left_alone: frozenset[Pair] = frozenset()
        """Sources and targets between which KV does not arrive."""
        self.away = snapshot.away
        self.guessed = workers.approximate.union(self.away)
        """Of whom nobody tells what they cache: what is routed there counts."""
        self.somebody_waits = snapshot.somebody_waits
        self.incarnations = workers.incarnations
        self.infos = workers.infos
        self.measured = workers.measured
        self.everybody = workers.everybody
        self.contexts = workers.contexts
        self.roles = workers.roles
        """None: each worker does all of a request, and KV travels between none."""
        self.late_s = workers.late_s
        self._loads = snapshot.loads
        self._workers = workers
        self.failed_shares: Floats | None = None
        """Of each worker's tries lately, (workers,); None: of nobody's."""
        self._on_trial: NDArray[np.bool_] | None = None
        if self.failing:
            self._heed_failing()
        self._rows = rows_of(self._loads, self.now_ms, workers.max_requests, self.rounds)

        self._others: Floats | None = None
        """Rows of what no router reserved, to be added to `_rows`; None: there is nothing."""
        if workers.may_have_others:
            columns, block_size = self._loads.columns, workers.infos[0].block_size
            self._others = _others_rows(
                reported.others_of(workers.reports, columns, self.now_ms, block_size)
            )
            self._rows += self._others

    def _heed_failing(self) -> None:
        """Those on trial have their usual price, so that they get a request."""
        shares, on_trial = np.zeros(len(self.infos)), np.zeros(len(self.infos), np.bool_)
        for inc, failing in self.failing.items():
            position = self.position(inc)
            if position is None:
                continue
            on_trial[position] = failing.is_on_trial
            if not failing.is_on_trial:
                shares[position] = failing.share_at(self.now_ms)
        self.failed_shares = shares if shares.any() else None
        self._on_trial = on_trial if on_trial.any() else None

    @property
    def away_s(self) -> list[float | None]:
        """For how long each worker's agent has been away; None: it is not."""
        since = map(self.away.get, self.incarnations)
        return [None if ms is None else max(0, self.now_ms - ms) / 1000 for ms in since]

    @cached_property
    def away_ones(self) -> NDArray[np.bool_] | None:
        """Whose agents are away, (workers,); None: nobody's, or all of them: what befalls all says
        nothing of any."""
        if not self.away:
            return None
        ones = np.array([inc in self.away for inc in self.incarnations])
        return ones if ones.any() and not ones.all() else None

    @property
    def knows_failures(self) -> bool:
        """Whether any worker is known to have failed lately."""
        has_any = self.failed_shares is not None or self._on_trial is not None
        return has_any or bool(self.lacking)

    def tried(self) -> NDArray[np.bool_] | None:
        """Which workers on trial have the one request that they get until they answer it,
        (workers,); None: there is none."""
        if self._on_trial is None:
            return None
        columns = self._loads.columns
        tried: NDArray[np.bool_] = self._on_trial & (columns[RESERVED] > columns[DECODING])
        return tried

    def lack(self, subjects: Iterable[str]) -> NDArray[np.bool_] | None:
        """Which workers do not have a model or path, and are to be left alone for it, (workers,);
        None: there is none."""
        if not self.lacking:
            return None
        lacking = np.zeros(len(self.infos), np.bool_)
        for subject in subjects:
            for inc, failing in self.lacking.get(subject, {}).items():
                position = self.position(inc)
                if position is not None and failing.until_ms > self.now_ms:
                    lacking[position] = True
        return lacking

    @property
    def loads(self) -> list[Load]:
        """Of each worker, in a copy."""
        return list(map(self._loads.at, range(len(self.incarnations))))

    @property
    def others_requests(self) -> list[float]:
        """In each worker's engine, beyond those that routers reserved."""
        others: list[float] = self._rows[OTHERS].tolist()
        return others

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
        free = self._rows[MOST_REQUESTS] - self._rows[REQUESTS]
        free = free[(free > 0) & (self._rows[QUEUE] <= max_queue_s)]
        return int(free.sum()) if math.isinf(max_queue_s) else free.size

    def all_hold(self, num_blocks: int, context_tokens: int = 0) -> bool:
        """Whether no worker reports fewer KV blocks than this in total, or a shorter context."""
        totals = self._workers.kv_total_blocks
        is_too_small = bool(((totals > 0) & (totals < num_blocks)).any())
        return not is_too_small and context_tokens <= self.contexts.least

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
        # The last token is always computed, and with it the block that it is in.
        most = (isl_tokens - 1) // (self.block_size or 1)
        reused: dict[Incarnation, TierOverlap] = {}
        for inc, rule in self._workers.reuse_less.items():
            if inc in overlaps:
                held = overlaps[inc]
                reused[inc] = held.first(rule.reused(held.total, most))
        for inc, resume in overlaps.resumes.items():
            # Where more is predicted than held, what its engine will hold is not known so well.
            if inc in overlaps and overlaps[inc].total == resume.held:
                reused[inc] = overlaps[inc].first(resume.reused(most))
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
        if self._others is not None:
            self._rows[:, position] += self._others[:, position]


def _others_rows(others: Others) -> Floats:
    """What is added to the rows of a view. A worker is full of reservations alone: that others use
    it makes it dear, and refuses nobody."""
    rows = np.zeros((len(OVERLAP_ROWS) + len(LOAD_ROWS), others.running.size))
    rows[PREFILL_TOKENS], rows[QUEUE] = others.prefill_tokens, others.prefill_s
    rows[BLOCKS], rows[DECODES] = others.blocks, others.running
    rows[[REQUESTS, MOST_REQUESTS, OTHERS]] = others.requests
    return rows


def _beyond_least(late_s: list[float]) -> Floats | None:
    if not any(late_s):
        return None
    beyond: Floats = np.array(late_s) - min(late_s)
    return beyond if beyond.any() else None


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
