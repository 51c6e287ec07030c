"""What a router replica measured lately, as it tells the others, and all of theirs together."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry

from app.core.outcomes import NEVER_CAME, Kind, kind_of
from app.policy.view import View

WINDOW_S = 10.0
LONG_WINDOW_S = 60.0
TARGET_S = 5.0
"""Until a first token: what clients are promised."""
MAX_ROWS = 200
"""Models, and workers, of which a replica tells how requests ended: those with most trouble."""
WRONG = "wrong"
"""Of these, requests that a router or an engine refused as the clients' own fault."""
_NOT_WRONG = ("401", "429", "499")
UNKNOWN_MODEL = "model_not_found"
MISSES = ("no_workers", "all_busy", "overloaded", "failed")
"""Outcomes of decisions that refuse a request which could have been served."""
_COUNTS = {
    "kvroute_degraded_decisions_total": "degraded",
    "kvroute_blind_decisions_total": "blind",
    "kvroute_isl_blocks_total": "isl_blocks",
    "kvroute_overlap_blocks_total": "overlap_blocks",
    "kvroute_saved_prefill_seconds_total": "saved_s",
    "kvroute_worker_suspensions_total": "suspensions",
    "kvroute_door_retries_total": "retries",
    "kvroute_door_migrations_total": "migrations",
    "kvroute_door_sources_total": "sources",
    "kvroute_door_cached_apart_tokens_total": "apart",
    "kvroute_door_cached_compared_tokens_total": "compared",
}
_BUCKETS = {
    "kvroute_decision_seconds_bucket": "decision",
    "kvroute_redis_round_trip_seconds_bucket": "redis",
    "kvroute_door_ttft_seconds_bucket": "ttft",
}
_BY_LABEL = {
    "kvroute_decisions_total": ("decisions", "outcome"),
    "kvroute_locality_total": ("locality", "reason"),
    "kvroute_reservations_total": ("reservations", "event"),
    "kvroute_door_tokens_total": ("tokens", "kind"),
    "kvroute_door_tokens_from_total": ("tokens_from", "source"),
    "kvroute_door_stage_seconds_sum": ("stage_s", "stage"),
    "kvroute_door_requests_total": ("outcome", "outcome"),
}
_ENDED, _WORKER_REQUESTS = "kvroute_door_requests_total", "kvroute_door_worker_requests_total"
_KEY_METRICS = {
    "kvroute_key_requests_total": "requests",
    "kvroute_key_limited_total": "limited",
    "kvroute_key_waited_seconds_total": "waited_s",
    "kvroute_key_tokens_total": "",
}
"""Tokens are counted by their kind."""
_MODEL_METRICS = {
    "kvroute_door_ttft_seconds_sum": "ttft_s",
    "kvroute_door_ttft_seconds_count": "ttft",
    "kvroute_door_retries_total": "retries",
    "kvroute_door_migrations_total": "migrations",
    "kvroute_door_sources_total": "sources",
}
_WORK_OF_WORKERS = {
    "kvroute_door_worker_output_tokens_total": "output",
    "kvroute_door_worker_sources_total": "sources",
}
_TOKENS, _OUTPUT = "kvroute_door_tokens_total", ("output", "output_by_router")
KV_FAILED, KV_LATE = "kv_failed", "kv_late"
"""Of workers: transfers of KV to them that failed; fetches of theirs after a lease had ended."""
_GAUGES = {
    "kvroute_waiting_requests": "waiting",
    "kvroute_index_fill": "index_fill",
    "kvroute_redis_may_evict": "may_evict",
    "kvroute_redis_memory_fill": "redis_fill",
    "kvroute_loop_late_seconds": "loop_late",
    "kvroute_process_cpu": "cpu",
}
_NAMES = (
    *(*_COUNTS, *_BUCKETS, *_BY_LABEL, *_KEY_METRICS, *_MODEL_METRICS, *_GAUGES, _WORKER_REQUESTS),
    *_WORK_OF_WORKERS,
)


@dataclass(slots=True)
class Reading:
    """Counters as they are. buckets: by histogram, observations up to each bound. models, workers:
    how requests ended, by kind, and what they waited for. keys: what their requests used."""

    counts: Counter[str] = field(default_factory=Counter)
    buckets: dict[str, Counter[float]] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)
    models: dict[str, Counter[str]] = field(default_factory=dict)
    workers: dict[str, Counter[str]] = field(default_factory=dict)
    keys: dict[str, Counter[str]] = field(default_factory=dict)


def read(registry: CollectorRegistry) -> Reading:
    """What a replica has counted since its start, over all models."""
    reading = Reading()
    # typeshed does not know that it is a registry too.
    restricted: Any = registry.restricted_registry(_NAMES)
    for metric in restricted.collect():
        for name, labels, value, *_ in metric.samples:
            if name in _COUNTS:
                reading.counts[_COUNTS[name]] += value
            elif name in _BUCKETS and labels.get("step", "look_up") == "look_up":
                bounds = reading.buckets.setdefault(_BUCKETS[name], Counter())
                bounds[float(labels["le"])] += value
            elif name in _GAUGES:
                reading.gauges[_GAUGES[name]] = value
            elif name in _KEY_METRICS:
                of_key = reading.keys.setdefault(labels["key"], Counter())
                of_key[_KEY_METRICS[name] or labels["kind"]] += value
            elif name in _BY_LABEL:
                prefix, label = _BY_LABEL[name]
                reading.counts[f"{prefix}:{labels[label]}"] += value
            elif name == _WORKER_REQUESTS:
                counts = reading.workers.setdefault(labels["worker"], Counter())
                counts[_at_worker(labels["outcome"])] += value
            elif name in _WORK_OF_WORKERS:
                counts = reading.workers.setdefault(labels["worker"], Counter())
                counts[_WORK_OF_WORKERS[name]] += value
            if name == _ENDED:
                kind = kind_of(labels["outcome"])
                reading.counts[f"ended:{kind}"] += value
                of_model = reading.models.setdefault(labels["model"], Counter())
                of_model[kind.value] += value
                is_wrong = labels["code"].startswith("4") and labels["code"] not in _NOT_WRONG
                if is_wrong and labels["outcome"] != UNKNOWN_MODEL:
                    of_model[WRONG] += value
            elif name in _MODEL_METRICS:
                reading.models.setdefault(labels["model"], Counter())[_MODEL_METRICS[name]] += value
            elif name == _TOKENS and labels["kind"] in _OUTPUT:
                reading.models.setdefault(labels["model"], Counter())["output"] += value
    return reading


LATE, QUEUE, CHANGES, LOOP_LATE, CPU = "late:", "queue:", "changes:", "loop_late:", "cpu:"
"""What gauges begin with that are there for each worker, model or replica."""


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
    """What engines have counted of KV that travels, since they began."""
    for info, measured in zip(view.infos, view.measured, strict=True):
        said = measured.metrics
        for name, value in ((KV_FAILED, said.kv_transfers_failed), (KV_LATE, said.kv_fetched_late)):
            if value is not None:
                reading.workers.setdefault(str(info.key), Counter())[name] = value


def _at_worker(outcome: str) -> str:
    return outcome if outcome in ("failed", "full") else kind_of(outcome).value


class Window:
    """The readings of one replica over the last LONG_WINDOW_S."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, Reading]] = deque()

    def add(self, reading: Reading, now_s: float) -> None:
        """now_s: monotonic."""
        self._readings.append((now_s, reading))
        while now_s - self._readings[0][0] > LONG_WINDOW_S and len(self._readings) > 1:
            self._readings.popleft()
        # What an engine had counted before it was first seen is nothing of the last minute.
        first = self._readings[0][1].workers
        for name, counts in reading.workers.items():
            for kind in counts.keys() & {KV_FAILED, KV_LATE}:
                first.setdefault(name, Counter()).setdefault(kind, counts[kind])

    def figures(self) -> dict[str, Any]:
        """What happened lately, in JSON's types: `counts` and `buckets` in the last `window_s`,
        `minute`, `models`, `workers` and `keys` in the last LONG_WINDOW_S; `gauges` as they are."""
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
            "models": _rows(last.models, self._readings[0][1].models),
            "workers": _rows(last.workers, self._readings[0][1].workers),
            "keys": _rows(last.keys, self._readings[0][1].keys),
        }


def _finite(value: Any) -> float:
    """Raises TypeError, ValueError."""
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value} is no number")
    return number


def _rows(
    now: Mapping[str, Counter[str]], before: Mapping[str, Counter[str]]
) -> dict[str, dict[str, float]]:
    grown = {name: _grown(counts, before.get(name, Counter())) for name, counts in now.items()}
    some = [name for name, counts in grown.items() if counts]
    most = sorted(some, key=lambda name: (-trouble(grown[name]), name))[:MAX_ROWS]
    return {name: grown[name] for name in most}


def trouble(counts: Mapping[str, float]) -> float:
    """How many requests of a model, or at a worker, came to no good end that is not their own
    doing."""
    return sum(
        counts.get(kind, 0.0) for kind in ("failed", Kind.ENGINE, Kind.CUT, Kind.LEFT_BEFORE)
    )


def _grown(now: Counter[str], before: Counter[str]) -> dict[str, float]:
    return {name: value - before[name] for name, value in now.items() if value > before[name]}


def share(part: float, whole: float) -> float | None:
    """None: of nothing."""
    return part / whole if whole else None


class Together:
    """The figures of several replicas as one. Those that make no sense count for nothing."""

    def __init__(self, said: Iterable[Mapping[str, Any]]) -> None:
        self.per_s: Counter[str] = Counter()
        self.recent: Counter[str] = Counter()
        """Counts of the last WINDOW_S."""
        self.minute: Counter[str] = Counter()
        self.gauges: dict[str, float] = {}
        self.models: dict[str, Counter[str]] = {}
        self.workers: dict[str, Counter[str]] = {}
        self.keys: dict[str, Counter[str]] = {}
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
        told = {"models": self.models, "workers": self.workers, "keys": self.keys}
        rows = [
            (of_all, str(name), {str(kind): _finite(n) for kind, n in counts.items()})
            for which, of_all in told.items()
            for name, counts in figures.get(which, {}).items()
        ]
        self.per_s.update(per_s)
        self.recent.update({name: _finite(value) for name, value in figures["counts"].items()})
        self.minute.update(minute)
        for name, value in gauges.items():
            # Each replica has a line of its own; of the others, all measure the same.
            old = self.gauges.get(name, 0.0)
            self.gauges[name] = old + value if name == "waiting" else max(old, value)
        for of_all, name, counts in rows:
            of_all.setdefault(name, Counter()).update(counts)
        for name, bounds in buckets.items():
            self._buckets.setdefault(name, Counter()).update(bounds)

    def refused(self, counts: Mapping[str, float]) -> float:
        return sum(counts.get(f"decisions:{outcome}", 0.0) for outcome in MISSES)

    def predicted_share(self, counts: Mapping[str, float]) -> float | None:
        """Share of the blocks of prompts that their workers held, as decisions had it; None: there
        were no prompts."""
        return share(counts.get("overlap_blocks", 0.0), counts.get("isl_blocks", 0.0))

    def cached_share(self, counts: Mapping[str, float]) -> float | None:
        """Share of prompt tokens that engines said they had cached, of requests that were answered;
        None: none said."""
        return share(counts.get("tokens:cached", 0.0), counts.get("tokens:told", 0.0))

    def saved_s(self, counts: Mapping[str, float]) -> float | None:
        """Seconds of prefill that cached tokens saved: as predicted, times what engines reported of
        the predicted tokens; None: none reported."""
        reported = share(counts.get("tokens:cached", 0.0), counts.get("tokens:predicted", 0.0))
        if not counts.get("tokens:told"):
            return None
        return counts.get("saved_s", 0.0) * (reported or 0.0)

    def in_time_share(self) -> float | None:
        """Share of the requests whose first token came within TARGET_S, of all that got one or
        waited for one in vain; None: there were none."""
        bounds = self._buckets.get("ttft", Counter())
        never = sum(self.recent[f"ended:{kind}"] for kind in NEVER_CAME)
        return share(bounds[TARGET_S], bounds[math.inf] + never)

    def sum_of(self, prefix: str) -> float:
        """Of the counts of the last minute whose names begin so."""
        return sum(number for name, number in self.minute.items() if name.startswith(prefix))

    def share_of(self, prefix: str, name: str) -> float:
        return share(self.minute[prefix + name], self.sum_of(prefix)) or 0.0

    def failed_share(self, counts: Mapping[str, float], *, by_model: bool = False) -> float | None:
        """Share of the requests that engines failed, of all. by_model: counts are of one."""
        prefix = "" if by_model else "ended:"
        ended = {kind: counts.get(f"{prefix}{kind}", 0.0) for kind in Kind}
        return share(ended[Kind.ENGINE] + ended[Kind.CUT], sum(ended.values()))

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
