"""The live workers apart from their load."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from app.core.keys import metrics_interval_s
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
from app.policy.cost import Floats
from app.policy.rows import KV_TOTAL, METRICS_ROWS, SPEED_ROWS, matrix, measured_rows
from app.policy.transfer import roles_of

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
