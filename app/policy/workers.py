"""The live workers apart from their load, and the rows of Candidates that show both."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from app.core.keys import metrics_interval_s
from app.core.loads import LOAD_FIELDS, MEMORY_ROUNDS, ROUND, Load, Loads
from app.core.overlaps import EVERY_BLOCK
from app.core.trust import Trust
from app.core.types import Incarnation
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
from app.policy.pairing import roles_of

OVERLAP_ROWS = ("overlap_device", "overlap_host", "overlap_disk")
LOAD_ROWS = (
    "prefill_tokens",
    "prefill_s",
    "active_blocks",
    "active_requests",
    "decoding_requests",
    "max_requests",
    "routed_tokens",
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
_HEAD_US, _HEAD_SINCE_MS, _ROUTED_AT = map(
    LOAD_FIELDS.index, ("head_us", "head_since_ms", "routed_at")
)
_LINKS = slice(ROUTED + 1, OTHERS)
_PLACES = np.array(
    [
        LOAD_FIELDS.index(name)
        for name in (
            *("total", "total", "total", "prefill_tokens", "prefill_us", "blocks", "requests"),
            *(
                "decoding",
                "total",
                "routed_tokens",
                "sending_until_ms",
                "receiving_until_ms",
                "total",
            ),
        )
    ]
)
"""The load's field that each row is made from; `total` where a row is made from none."""
KV_TOTAL = list(METRICS_ROWS).index("kv_total_blocks")
SPEED_ROWS = tuple(f.name for f in fields(Speed))

_SPEED = slice(-len(SPEED_ROWS), None)
_TOKEN_S = SPEED_ROWS.index("prefill_s_per_token")
_of_metrics = attrgetter(*METRICS_ROWS.values())
_of_speed = attrgetter(*SPEED_ROWS)

ROWS = (*OVERLAP_ROWS, *LOAD_ROWS, *METRICS_ROWS, *SPEED_ROWS)
if tuple(f.name for f in fields(Candidates)) != ROWS:
    raise TypeError(f"the rows of a view are not the fields of Candidates: {ROWS}")


def load_rows(load: Load, now_ms: int, max_requests: int, rounds: int) -> tuple[float, ...]:
    """Returns the LOAD_ROWS of one worker that nobody else uses. rounds: see Snapshot."""
    return (
        load.prefill_tokens,
        load.queue_s(now_ms),
        load.blocks,
        load.requests,
        load.decoding,
        max_requests,
        load.routed_lately(rounds),
        load.sending_s(now_ms),
        load.receiving_s(now_ms),
        0.0,
    )


def rows_of(loads: Loads, now_ms: int, max_requests: Floats, rounds: int) -> Floats:
    """Returns OVERLAP_ROWS, which are 0, and LOAD_ROWS of all workers. rounds: see Snapshot."""
    load = loads.columns
    rows: Floats = load[_PLACES]
    rows[: len(OVERLAP_ROWS)] = rows[OTHERS] = 0.0
    drained_us = np.minimum((now_ms - load[_HEAD_SINCE_MS]) * 1000.0, load[_HEAD_US])
    rows[QUEUE] = (rows[QUEUE] - np.maximum(drained_us, 0.0)) / 1e6
    rows[MOST_REQUESTS] = max_requests
    past = np.maximum(rounds - load[_ROUTED_AT], 0.0)
    rows[ROUTED] *= np.exp(past / -(MEMORY_ROUNDS * ROUND))
    links = rows[_LINKS]
    links -= now_ms
    rows[_LINKS] = np.maximum(links, 0.0) / 1000.0
    return rows


def measured_rows(metrics: ForwardPassMetrics, speed: Speed) -> tuple[float, ...]:
    return (*_of_metrics(metrics), *_of_speed(speed))


def assume_speeds(rows: Floats) -> None:
    """Gives workers that were not measured yet the speed of the fastest one that was, in rows that
    end with SPEED_ROWS: by a default that is slower, they would be left alone, and never measured.
    """
    speeds = rows[_SPEED]
    unmeasured = speeds[_TOKEN_S] == DEFAULT_SPEED.prefill_s_per_token
    if unmeasured.any() and not unmeasured.all():
        fastest = np.where(unmeasured, np.inf, speeds[_TOKEN_S]).argmin()
        speeds[:, unmeasured] = speeds[:, [fastest]]


def others_rows(others: reported.Others) -> Floats:
    """Returns what to add to the rows of a view. Only reservations make a worker full: requests of
    others make it dear, and refuse nobody."""
    rows = np.zeros((len(OVERLAP_ROWS) + len(LOAD_ROWS), others.running.size))
    rows[PREFILL_TOKENS], rows[QUEUE] = others.prefill_tokens, others.prefill_s
    rows[BLOCKS], rows[DECODES] = others.blocks, others.running
    rows[[REQUESTS, MOST_REQUESTS, OTHERS]] = others.requests
    return rows


def matrix(columns: list[tuple[float, ...]], height: int) -> NDArray[np.float64]:
    """Returns one row for each of `height` values, also if there are no columns."""
    return np.array(columns, dtype=np.float64).reshape(len(columns), height).T.copy()


STALE_AFTER_INTERVALS = 10
MAX_PLACES = 64
"""Sets of workers whose places are kept; of 2,000 workers each they are 1 MB."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Figures that a worker last published, and when, by the Redis clock."""

    metrics: ForwardPassMetrics
    speed: Speed
    gpu: GpuReadings
    at_ms: int

    def is_stale(self, now_ms: int, workers: int) -> bool:
        """Whether the worker should have published again long since. workers: how many there are,
        which determines how often each publishes."""
        return now_ms - self.at_ms > STALE_AFTER_INTERVALS * 1000 * metrics_interval_s(workers)


UNMEASURED = Measurement(ForwardPassMetrics(), DEFAULT_SPEED, NO_READINGS, at_ms=0)


class Contexts:
    """Tokens that each engine takes of a prompt and its answer together, (workers,); inf: it does
    not say. least: the smallest."""

    def __init__(self, infos: Sequence[WorkerInfo]) -> None:
        self.tokens = np.array([info.max_model_len or math.inf for info in infos], np.float64)
        self.least = float(self.tokens.min()) if infos else math.inf


class Workers:
    """Registrations and measurements of the workers, which many views share."""

    def __init__(self, workers: Sequence[tuple[Incarnation, WorkerInfo, Measurement]]) -> None:
        self.incarnations = [inc for inc, _, _ in workers]
        self.infos = [info for _, info, _ in workers]
        self.measured = [measured for _, _, measured in workers]
        self.everybody = np.ones(len(workers), dtype=np.bool_)
        self.position = {inc: i for i, inc in enumerate(self.incarnations)}
        self._places: dict[frozenset[Incarnation], NDArray[np.intp]] = {}
        self.roles = roles_of(self.infos)
        self.contexts = Contexts(self.infos)
        self.trusts: Mapping[Incarnation, Trust] = {
            inc: info.trust for inc, info, _ in workers if info.trust is not Trust.EXACT
        }
        """Trust in the workers that are not exact."""
        self.reuse_less = {
            inc: rule for inc, info, _ in workers if (rule := info.reuse_rule) != EVERY_BLOCK
        }
        """Workers whose engines do not reuse each block that they hold."""
        self.rows = np.empty((len(METRICS_ROWS) + len(SPEED_ROWS), len(workers)))
        self.reports = np.empty((len(reported.ROWS), len(workers)))
        self._show(range(len(workers)))
        self.reported = tuple(self.rows)
        """Rows one by one: to take a matrix apart takes time for each of them."""
        self.max_requests = np.array([info.max_requests for info in self.infos], dtype=np.float64)
        self.late_s = beyond_least(np.array([m.metrics.late_s for m in self.measured]))
        """Seconds for which each engine keeps others waiting beyond the least late one, (workers,);
        None: all are alike, which tells none apart."""

    @property
    def kv_total_blocks(self) -> Floats:
        totals: Floats = self.rows[KV_TOTAL]
        return totals

    def places_of(self, many: frozenset[Incarnation]) -> NDArray[np.intp]:
        """Returns the places of those that are routed to. Kept, as many prompts begin alike."""
        places = self._places.get(many)
        if places is None:
            if len(self._places) >= MAX_PLACES:
                self._places.clear()
            positions = [self.position[inc] for inc in many if inc in self.position]
            places = self._places[many] = np.array(positions, np.intp)
        return places

    def with_measured(self, measured: Mapping[Incarnation, Measurement]) -> Workers:
        """Returns the same workers, some measured anew."""
        workers = copy(self)
        workers.measured, workers.rows = self.measured.copy(), self.rows.copy()
        workers.reports = self.reports.copy()
        places = [self.position[inc] for inc in measured if inc in self.position]
        for place in places:
            workers.measured[place] = measured[self.incarnations[place]]
        workers._show(places)
        workers.reported = tuple(workers.rows)
        workers.late_s = beyond_least(np.array([m.metrics.late_s for m in workers.measured]))
        return workers

    def _show(self, places: Sequence[int]) -> None:
        some = [self.measured[place] for place in places]
        rows = matrix([measured_rows(m.metrics, m.speed) for m in some], len(self.rows))
        # As registered, until the worker has reported it.
        registered = np.array([self.infos[place].kv_total_blocks for place in places], np.float64)
        np.copyto(rows[KV_TOTAL], registered, where=rows[KV_TOTAL] == 0)
        self.rows[:, places] = rows
        assume_speeds(self.rows)
        totals = rows[KV_TOTAL].tolist()
        said = [
            reported.row_of(m.metrics, total, m.speed, m.at_ms)
            for m, total in zip(some, totals, strict=True)
        ]
        self.reports[:, places] = matrix(said, len(self.reports))
        self.may_have_others = bool(self.infos) and reported.may_exceed(
            self.reports, self.infos[0].block_size
        )
        """Whether any of their engines may have what no router reserved."""


def beyond_least(late_s: Floats) -> Floats | None:
    """Returns how much later each worker is than the least late one; None: all are alike."""
    if not late_s.any():
        return None
    beyond: Floats = late_s - late_s.min()
    return beyond if beyond.any() else None
