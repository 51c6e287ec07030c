"""What a router replica measured lately, as it tells the others, and all of theirs together."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry

WINDOW_S = 10.0
LONG_WINDOW_S = 60.0
MISSES = ("no_workers", "all_busy", "overloaded", "failed")
"""Outcomes of decisions that refuse a request which could have been served."""
_COUNTS = {
    "kvroute_degraded_decisions_total": "degraded",
    "kvroute_blind_decisions_total": "blind",
    "kvroute_isl_blocks_total": "isl_blocks",
    "kvroute_overlap_blocks_total": "overlap_blocks",
    "kvroute_saved_prefill_seconds_total": "saved_s",
    "kvroute_worker_suspensions_total": "suspensions",
}
_BUCKETS = {
    "kvroute_decision_seconds_bucket": "decision",
    "kvroute_redis_round_trip_seconds_bucket": "redis",
    "kvroute_door_ttft_seconds_bucket": "ttft",
}
_BY_LABEL = ("kvroute_decisions_total", "kvroute_locality_total", "kvroute_reservations_total")
_GAUGES = {
    "kvroute_waiting_requests": "waiting",
    "kvroute_index_fill": "index_fill",
    "kvroute_redis_may_evict": "may_evict",
}
_NAMES = (*_COUNTS, *_BUCKETS, *_BY_LABEL, *_GAUGES)


@dataclass(slots=True)
class Reading:
    """Counters as they are. buckets: by histogram, observations up to each bound."""

    counts: Counter[str] = field(default_factory=Counter)
    buckets: dict[str, Counter[float]] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)


def read(registry: CollectorRegistry) -> Reading:
    """What a replica has counted since its start, over all models."""
    found = Reading()
    # typeshed does not know that it is a registry too.
    restricted: Any = registry.restricted_registry(_NAMES)
    for metric in restricted.collect():
        for name, labels, value, *_ in metric.samples:
            if name in _COUNTS:
                found.counts[_COUNTS[name]] += value
            elif name in _BUCKETS and labels.get("step", "look_up") == "look_up":
                bounds = found.buckets.setdefault(_BUCKETS[name], Counter())
                bounds[float(labels["le"])] += value
            elif name in _GAUGES:
                found.gauges[_GAUGES[name]] = value
            elif name == "kvroute_locality_total":
                found.counts[f"locality:{labels['reason']}"] += value
            elif name == "kvroute_decisions_total":
                found.counts[f"decisions:{labels['outcome']}"] += value
            elif name == "kvroute_reservations_total":
                found.counts[f"reservations:{labels['event']}"] += value
    return found


class Window:
    """The readings of one replica over the last LONG_WINDOW_S."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, Reading]] = deque()

    def add(self, reading: Reading, now_s: float) -> None:
        """now_s: monotonic."""
        self._readings.append((now_s, reading))
        while now_s - self._readings[0][0] > LONG_WINDOW_S and len(self._readings) > 1:
            self._readings.popleft()

    def figures(self) -> dict[str, Any]:
        """What happened lately, in JSON's types: `counts` and `buckets` in the last `window_s`,
        `minute` in the last LONG_WINDOW_S; `gauges` as they are."""
        now_s, last = self._readings[-1]
        recent_s, recent = next(r for r in self._readings if now_s - r[0] <= WINDOW_S)
        return {
            "window_s": round(now_s - recent_s, 3),
            "counts": _grown(last.counts, recent.counts),
            "minute": _grown(last.counts, self._readings[0][1].counts),
            "buckets": {
                name: [
                    [bound, bounds[bound] - recent.buckets.get(name, Counter())[bound]]
                    for bound in sorted(bounds)
                    if math.isfinite(bound)
                ]
                + [[None, bounds[math.inf] - recent.buckets.get(name, Counter())[math.inf]]]
                for name, bounds in last.buckets.items()
            },
            "gauges": last.gauges,
        }


def _finite(value: Any) -> float:
    """Raises TypeError, ValueError."""
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value} is no number")
    return number


def _grown(now: Counter[str], before: Counter[str]) -> dict[str, float]:
    return {name: value - before[name] for name, value in now.items() if value > before[name]}


class Together:
    """The figures of several replicas as one. Those that make no sense count for nothing."""

    def __init__(self, said: Iterable[Mapping[str, Any]]) -> None:
        self.per_s: Counter[str] = Counter()
        self.minute: Counter[str] = Counter()
        self.gauges: dict[str, float] = {}
        self._buckets: dict[str, Counter[float]] = {}
        for figures in said:
            try:
                self._add(figures)
            except (LookupError, TypeError, ValueError, AttributeError, ZeroDivisionError):
                continue

    def _add(self, figures: Mapping[str, Any]) -> None:
        window_s = _finite(figures["window_s"])
        per_s = {n: _finite(v) / window_s for n, v in figures["counts"].items() if window_s}
        minute = {name: _finite(value) for name, value in figures["minute"].items()}
        gauges = {name: _finite(value) for name, value in figures["gauges"].items()}
        buckets = {
            name: {math.inf if bound is None else _finite(bound): _finite(n) for bound, n in rows}
            for name, rows in figures["buckets"].items()
        }
        self.per_s.update(per_s)
        self.minute.update(minute)
        for name, value in gauges.items():
            # Each replica has a line of its own; of the others, all measure the same.
            old = self.gauges.get(name, 0.0)
            self.gauges[name] = old + value if name == "waiting" else max(old, value)
        for name, bounds in buckets.items():
            self._buckets.setdefault(name, Counter()).update(bounds)

    def refused(self, counts: Mapping[str, float]) -> float:
        return sum(counts.get(f"decisions:{outcome}", 0.0) for outcome in MISSES)

    def cached_share(self, counts: Mapping[str, float]) -> float | None:
        """Share of the blocks of prompts that their workers held; None: there were no prompts."""
        asked = counts.get("isl_blocks", 0.0)
        return counts.get("overlap_blocks", 0.0) / asked if asked else None

    def quantile(self, name: str, q: float) -> float | None:
        """Of a histogram, as Prometheus estimates it; None: nothing was observed."""
        bounds = self._buckets.get(name, Counter())
        rank, below, lower = q * bounds[math.inf], 0.0, 0.0
        for bound in sorted(bounds):
            if rank and bounds[bound] >= rank:
                if not math.isfinite(bound):
                    return lower
                return lower + (bound - lower) * (rank - below) / (bounds[bound] - below)
            below, lower = bounds[bound], bound
        return None

    def localities(self) -> dict[str, int]:
        """Routed requests of the last minute by what became of the longest overlap."""
        prefix = "locality:"
        return {
            name.removeprefix(prefix): round(value)
            for name, value in self.minute.items()
            if name.startswith(prefix)
        }

    def series(self) -> dict[str, float | None]:
        """What the history keeps of it."""
        return {
            "requests_per_s": self.per_s["decisions:routed"],
            "refused_per_s": self.refused(self.per_s),
            "degraded_per_s": self.per_s["degraded"],
            "blind_per_s": self.per_s["blind"],
            "cached_share": self.cached_share(self.per_s),
            "saved_s_per_s": self.per_s["saved_s"],
            "ttft_p50_s": self.quantile("ttft", 0.5),
            "ttft_p99_s": self.quantile("ttft", 0.99),
            "decision_p50_s": self.quantile("decision", 0.5),
            "decision_p99_s": self.quantile("decision", 0.99),
            "waiting": self.gauges.get("waiting", 0.0),
        }
