"""Figures of the last minute that a router replica tells the others, and those of all together."""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry

from app.core.outcomes import NEVER_CAME, Kind, kind_of
from app.policy.view import View

WINDOW_S = 10.0
LONG_WINDOW_S = 60.0
TARGET_S = 5.0
"""Seconds until a first token that clients are promised."""
MAX_ROWS = 200
"""Models, workers and keys of which a replica tells: those with most trouble."""
WRONG = "wrong"
"""Requests that a router or an engine refused as the clients' own fault."""
_NOT_WRONG = ("401", "429", "499")
UNKNOWN_MODEL = "model_not_found"
MISSES = ("no_workers", "all_busy", "overloaded", "failed")
"""Outcomes of decisions that refuse a request which could have been served."""
_ENDED = "kvroute_door_requests_total"
_COUNTED = (
    ("kvroute_degraded_decisions_total", "", "degraded"),
    ("kvroute_blind_decisions_total", "", "blind"),
    ("kvroute_isl_blocks_total", "", "isl_blocks"),
    ("kvroute_overlap_blocks_total", "", "overlap_blocks"),
    ("kvroute_saved_prefill_seconds_total", "", "saved_s"),
    ("kvroute_worker_suspensions_total", "", "suspensions"),
    ("kvroute_door_retries_total", "", "retries"),
    ("kvroute_door_retries_total", "model", "retries"),
    ("kvroute_door_migrations_total", "", "migrations"),
    ("kvroute_door_migrations_total", "model", "migrations"),
    ("kvroute_door_sources_total", "", "sources"),
    ("kvroute_door_sources_total", "model", "sources"),
    ("kvroute_door_cached_apart_tokens_total", "", "apart"),
    ("kvroute_door_cached_compared_tokens_total", "", "compared"),
    ("kvroute_decisions_total", "", "decisions:{outcome}"),
    ("kvroute_locality_total", "", "locality:{reason}"),
    ("kvroute_reservations_total", "", "reservations:{event}"),
    ("kvroute_door_tokens_total", "", "tokens:{kind}"),
    ("kvroute_door_tokens_from_total", "", "tokens_from:{source}"),
    ("kvroute_door_stage_seconds_sum", "", "stage_s:{stage}"),
    (_ENDED, "", "outcome:{outcome}"),
    (_ENDED, "", "ended:{ending}"),
    (_ENDED, "model", "{ending}"),
    ("kvroute_door_ttft_seconds_sum", "model", "ttft_s"),
    ("kvroute_door_ttft_seconds_count", "model", "ttft"),
    ("kvroute_door_worker_requests_total", "worker", "{at_worker}"),
    ("kvroute_door_worker_output_tokens_total", "worker", "output"),
    ("kvroute_door_worker_sources_total", "worker", "sources"),
    ("kvroute_key_requests_total", "key", "requests"),
    ("kvroute_key_limited_total", "key", "limited"),
    ("kvroute_key_waited_seconds_total", "key", "waited_s"),
    ("kvroute_key_tokens_total", "key", "{kind}"),
)
"""Metric, the label whose values have a row each ("": all together), and the name of the count."""
_COUNTS_OF: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
for _metric, _label, _count in _COUNTED:
    _COUNTS_OF[_metric].append((_label, _count))
_BUCKETS = {
    "kvroute_decision_seconds_bucket": "decision",
    "kvroute_redis_round_trip_seconds_bucket": "redis",
    "kvroute_door_ttft_seconds_bucket": "ttft",
}
_TOKENS, _OUTPUT = "kvroute_door_tokens_total", ("output", "output_by_router")
KV_FAILED, KV_LATE = "kv_failed", "kv_late"
"""Counts of workers: transfers of KV to them that failed, and fetches of theirs that came late."""
_GAUGES = {
    "kvroute_waiting_requests": "waiting",
    "kvroute_index_fill": "index_fill",
    "kvroute_redis_may_evict": "may_evict",
    "kvroute_redis_memory_fill": "redis_fill",
    "kvroute_loop_late_seconds": "loop_late",
    "kvroute_process_cpu": "cpu",
}
_NAMES = (*_COUNTS_OF, *_BUCKETS, *_GAUGES)
Rows = defaultdict[str, Counter[str]]


_rows: Callable[[], Rows] = partial(defaultdict, Counter)


@dataclass(slots=True)
class Reading:
    """Counters as they are. buckets: by histogram, observations up to each bound. models, workers:
    how requests ended, by kind, and what they waited for. keys: what their requests used."""

    counts: Counter[str] = field(default_factory=Counter)
    buckets: defaultdict[str, Counter[float]] = field(default_factory=lambda: defaultdict(Counter))
    gauges: dict[str, float] = field(default_factory=dict)
    models: Rows = field(default_factory=_rows)
    workers: Rows = field(default_factory=_rows)
    keys: Rows = field(default_factory=_rows)


def read(registry: CollectorRegistry) -> Reading:
    """Returns all that a replica has counted since its start."""
    reading = Reading()
    rows_of = {"model": reading.models, "worker": reading.workers, "key": reading.keys}
    # typeshed does not know that it is a registry too.
    restricted: Any = registry.restricted_registry(_NAMES)
    for metric in restricted.collect():
        for name, labels, value, *_ in metric.samples:
            outcome = labels.get("outcome", "")
            kind = kind_of(outcome).value
            at_worker = outcome if outcome in ("failed", "full") else kind
            for label, count in _COUNTS_OF.get(name, ()):
                counts = rows_of[label][labels[label]] if label else reading.counts
                counts[count.format(**labels, ending=kind, at_worker=at_worker)] += value
            if name in _BUCKETS and labels.get("step", "look_up") == "look_up":
                reading.buckets[_BUCKETS[name]][float(labels["le"])] += value
            elif name in _GAUGES:
                reading.gauges[_GAUGES[name]] = value
            elif name == _ENDED and outcome != UNKNOWN_MODEL:
                if labels["code"].startswith("4") and labels["code"] not in _NOT_WRONG:
                    reading.models[labels["model"]][WRONG] += value
            elif name == _TOKENS and labels["kind"] in _OUTPUT:
                reading.models[labels["model"]]["output"] += value
    return reading


LATE, QUEUE, CHANGES, LOOP_LATE, CPU = "late:", "queue:", "changes:", "loop_late:", "cpu:"
"""Prefixes of gauges that are there for each worker, model or replica."""


def gauge_each(reading: Reading, view: View | None, changes: Mapping[str, int], me: str) -> None:
    """Add the gauges of each worker and model. changes: of workers within the last hour. me: the
    replica, whose own gauges are named for it."""
    found = {f"{CHANGES}{name}": float(number) for name, number in changes.items()}
    if view is not None:
        for inc, info, load in zip(view.incarnations, view.infos, view.loads, strict=True):
            late_s = view.marks[inc].first_tokens_late_s(view.now_ms)
            found |= {f"{LATE}{info.key}": late_s} if late_s else {}
            for model in info.models:
                queue_s = load.queue_s(view.now_ms)
                found[f"{QUEUE}{model}"] = min(queue_s, found.get(f"{QUEUE}{model}", math.inf))
    some = sorted(found, key=lambda name: -found[name])[:MAX_ROWS]
    reading.gauges |= {name: round(found[name], 3) for name in some}
    for name in (LOOP_LATE, CPU):
        reading.gauges[f"{name}{me}"] = reading.gauges.pop(name[:-1], 0.0)


def count_transfers(reading: Reading, view: View) -> None:
    """Add the counts of KV that travels, which engines have made since they began."""
    for info, measured in zip(view.infos, view.measured, strict=True):
        said = measured.metrics
        for name, value in ((KV_FAILED, said.kv_transfers_failed), (KV_LATE, said.kv_fetched_late)):
            if value is not None:
                reading.workers[str(info.key)][name] = value


class CountWindow:
    def __init__(self) -> None:
        self._readings: deque[tuple[float, Reading]] = deque()

    def add(self, reading: Reading, now_s: float) -> None:
        self._readings.append((now_s, reading))
        while now_s - self._readings[0][0] > LONG_WINDOW_S and len(self._readings) > 1:
            self._readings.popleft()
        # Counts of an engine from before it was first seen are not of the last minute.
        first = self._readings[0][1].workers
        for name, counts in reading.workers.items():
            for kind in counts.keys() & {KV_FAILED, KV_LATE}:
                first[name].setdefault(kind, counts[kind])

    def figures(self) -> dict[str, Any]:
        """Returns the last figures in JSON's types: `counts`, `buckets` and `keys` of the last
        `window_s`, `minute`, `models` and `workers` of the last LONG_WINDOW_S; `gauges` as they
        are."""
        (now_s, last), oldest = self._readings[-1], self._readings[0][1]
        recent_s, recent = next(r for r in self._readings if now_s - r[0] <= WINDOW_S)
        return {
            "window_s": round(now_s - recent_s, 3),
            "counts": _grown(last.counts, recent.counts),
            "minute": _grown(last.counts, oldest.counts),
            "buckets": {
                name: [
                    [bound if math.isfinite(bound) else None, number - recent.buckets[name][bound]]
                    for bound, number in sorted(bounds.items())
                ]
                for name, bounds in last.buckets.items()
            },
            "gauges": last.gauges,
            "models": _grown_rows(last.models, oldest.models),
            "workers": _grown_rows(last.workers, oldest.workers),
            "keys": self._keys(last, recent, oldest),
        }

    def _keys(self, last: Reading, recent: Reading, oldest: Reading) -> dict[str, dict[str, float]]:
        """Returns what keys of the last minute used in the last seconds; `new`: the requests of one
        that had asked for nothing a minute ago."""
        used = {
            name: _grown(last.keys[name], recent.keys[name])
            for name in _grown_rows(last.keys, oldest.keys)
        }
        if self._readings[-1][0] - self._readings[0][0] >= LONG_WINDOW_S - WINDOW_S:
            for name in used:
                if not oldest.keys[name]:
                    used[name]["new"] = used[name].get("requests", 0.0)
        return used


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value} is no number")
    return number


def _grown_rows(now: Rows, before: Rows) -> dict[str, dict[str, float]]:
    grown = {name: _grown(counts, before[name]) for name, counts in now.items()}
    some = [name for name, counts in grown.items() if counts]
    most = sorted(some, key=lambda name: (-trouble(grown[name]), name))[:MAX_ROWS]
    return {name: grown[name] for name in most}


def trouble(counts: Mapping[str, float]) -> float:
    """Returns how many requests of a model, or at a worker, failed or were left waiting."""
    return sum(
        counts.get(kind, 0.0) for kind in ("failed", Kind.ENGINE, Kind.CUT, Kind.LEFT_BEFORE)
    )


def _grown(now: Counter[str], before: Counter[str]) -> dict[str, float]:
    return {name: value - before[name] for name, value in now.items() if value > before[name]}


def share(part: float, whole: float) -> float | None:
    """Returns part / whole, or None of nothing."""
    return part / whole if whole else None


class Together:
    """Figures of several replicas as one. Those that make no sense count for nothing."""

    def __init__(self, said: Iterable[Mapping[str, Any]]) -> None:
        self.per_s: Counter[str] = Counter()
        self.recent: Counter[str] = Counter()
        self.minute: Counter[str] = Counter()
        self.gauges: dict[str, float] = {}
        self.models, self.workers, self.keys = _rows(), _rows(), _rows()
        self._buckets: defaultdict[str, Counter[float]] = defaultdict(Counter)
        for figures in said:
            try:
                self._add(figures)
            except (LookupError, TypeError, ValueError, AttributeError, ZeroDivisionError):
                continue

    def _add(self, figures: Mapping[str, Any]) -> None:
        window_s = _finite(figures["window_s"])
        recent = {name: _finite(value) for name, value in figures["counts"].items()}
        minute = {name: _finite(value) for name, value in figures["minute"].items()}
        gauges = {name: _finite(value) for name, value in figures["gauges"].items()}
        buckets = {
            name: {math.inf if bound is None else _finite(bound): _finite(n) for bound, n in rows}
            for name, rows in figures["buckets"].items()
        }
        told = {"models": self.models, "workers": self.workers, "keys": self.keys}
        rows = [
            (of_all, str(name), {str(kind): _finite(n) for kind, n in counts.items()})
            for which, of_all in told.items()
            for name, counts in figures.get(which, {}).items()
        ]
        if window_s:
            self.per_s.update({name: value / window_s for name, value in recent.items()})
        self.recent.update(recent)
        self.minute.update(minute)
        for name, value in gauges.items():
            # Each replica has a line of its own; of the others, all measure the same.
            old = self.gauges.get(name, 0.0)
            self.gauges[name] = old + value if name == "waiting" else max(old, value)
        for of_all, name, counts in rows:
            of_all[name].update(counts)
        for name, bounds in buckets.items():
            self._buckets[name].update(bounds)

    def refused(self, counts: Mapping[str, float]) -> float:
        return sum(counts.get(f"decisions:{outcome}", 0.0) for outcome in MISSES)

    def predicted_share(self, counts: Mapping[str, float]) -> float | None:
        """Returns the share of prompts' blocks that workers were predicted to hold, if any."""
        return share(counts.get("overlap_blocks", 0.0), counts.get("isl_blocks", 0.0))

    def cached_share(self, counts: Mapping[str, float]) -> float | None:
        """Returns the share of answered prompts' tokens that engines had cached, if any tells."""
        return share(counts.get("tokens:cached", 0.0), counts.get("tokens:told", 0.0))

    def saved_s(self, counts: Mapping[str, float]) -> float | None:
        """Returns the seconds of prefill that cached tokens saved: as predicted, times the share of
        the predicted tokens that engines reported; None if no engine tells."""
        reported = share(counts.get("tokens:cached", 0.0), counts.get("tokens:predicted", 0.0))
        if not counts.get("tokens:told"):
            return None
        return counts.get("saved_s", 0.0) * (reported or 0.0)

    def in_time_share(self) -> float | None:
        """Returns the share of first tokens that came within TARGET_S, of all that came or were
        waited for in vain; None of no requests."""
        bounds = self._buckets["ttft"]
        never = sum(self.recent[f"ended:{kind}"] for kind in NEVER_CAME)
        return share(bounds[TARGET_S], bounds[math.inf] + never)

    def sum_of(self, prefix: str) -> float:
        return sum(number for name, number in self.minute.items() if name.startswith(prefix))

    def share_of(self, prefix: str, name: str) -> float:
        return share(self.minute[prefix + name], self.sum_of(prefix)) or 0.0

    def failed_share(self, counts: Mapping[str, float], *, by_model: bool = False) -> float | None:
        """Returns the share of requests that engines failed. by_model: counts are of one model."""
        prefix = "" if by_model else "ended:"
        ended = {kind: counts.get(f"{prefix}{kind}", 0.0) for kind in Kind}
        return share(ended[Kind.ENGINE] + ended[Kind.CUT], sum(ended.values()))

    def quantile(self, name: str, q: float) -> float | None:
        """Returns a quantile as Prometheus estimates it, or None if nothing was observed."""
        bounds = self._buckets[name]
        rank, below, lower = q * bounds[math.inf], 0.0, 0.0
        for bound in sorted(bounds):
            if rank and bounds[bound] >= rank:
                if not math.isfinite(bound):
                    return lower
                return lower + (bound - lower) * (rank - below) / (bounds[bound] - below)
            below, lower = bounds[bound], bound
        return None

    def localities(self) -> dict[str, int]:
        prefix = "locality:"
        return {
            name.removeprefix(prefix): round(value)
            for name, value in self.minute.items()
            if name.startswith(prefix)
        }

    def series(self) -> dict[str, float | None]:
        return {
            "requests_per_s": self.per_s["decisions:routed"],
            "refused_per_s": max(self.refused(self.per_s), self.per_s["ended:refused"]),
            "degraded_per_s": self.per_s["degraded"],
            "blind_per_s": self.per_s["blind"],
            "ok_per_s": self.per_s["ended:ok"],
            "failed_per_s": self.per_s["ended:engine"],
            "cut_per_s": self.per_s["ended:cut"],
            "left_before_per_s": self.per_s["ended:left_before"],
            "left_after_per_s": self.per_s["ended:left_after"],
            "unfit_per_s": self.per_s["ended:unfit"],
            "failed_share": self.failed_share(self.per_s),
            "in_time_share": self.in_time_share(),
            "output_tokens_per_s": sum(self.per_s[f"tokens:{kind}"] for kind in _OUTPUT),
            "retries_per_s": self.per_s["retries"],
            "migrations_per_s": self.per_s["migrations"],
            "sources_per_s": self.per_s["sources"],
            "cached_share": self.cached_share(self.per_s),
            "predicted_share": self.predicted_share(self.per_s),
            "saved_s_per_s": self.saved_s(self.per_s),
            "ttft_p50_s": self.quantile("ttft", 0.5),
            "ttft_p99_s": self.quantile("ttft", 0.99),
            "decision_p50_s": self.quantile("decision", 0.5),
            "decision_p99_s": self.quantile("decision", 0.99),
            "waiting": self.gauges.get("waiting", 0.0),
        }
