"""Tables of the console: workers, replicas, models, and what is wrong, in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from app.console.answers import FindingShown, Rows
from app.core.check import Check
from app.core.outcomes import Kind
from app.core.types import Incarnation
from app.core.verdicts import State
from app.core.worker_report import NO_READINGS, WorkerInfo
from app.ops.conditions import FAILING
from app.ops.figures import Together, share, trouble
from app.policy.view import View
from app.state.last_errors import Errors

FAILED = ("failed", Kind.ENGINE, Kind.CUT)
FEW = 10
FAILING_SHARE = 0.2
"""Share of a worker's requests of the last minute, unless they are fewer than FEW."""
BY_TROUBLE = (
    *(State.SERVING, State.DRAINING, State.AWAY, State.TRIAL, State.PAUSED, State.LAPSED),
    *(State.GONE, "stale", State.ILL, State.TAINTED, "failing"),
)
"""States, and other kinds of trouble, the worst last."""
RETRIED = ("failed", "full")
"""Requests that went on to another worker, before or within their answers."""
GONE_MS = 60_000
"""Time for which a worker that is gone is shown."""


@dataclass(slots=True)
class _Sighting:
    row: dict[str, Any]
    at_ms: int


class Roster:
    def __init__(self) -> None:
        self._seen: dict[str, _Sighting] = {}

    def see(self, view: View) -> list[dict[str, Any]]:
        """Returns all rows, in the order of the workers' keys."""
        for row in _rows(view):
            self._seen[row["worker"]] = _Sighting(row, view.now_ms)
        for key, seen in list(self._seen.items()):
            if view.now_ms - seen.at_ms > GONE_MS:
                del self._seen[key]
            elif seen.at_ms < view.now_ms:
                seen.row = seen.row | {"state": State.GONE}
        return [self._seen[key].row for key in sorted(self._seen)]


def _rows(view: View) -> Iterator[dict[str, Any]]:
    number = len(view.infos)
    for inc, info, load, measured in zip(
        *(view.incarnations, view.infos, view.loads, view.measured), strict=True
    ):
        metrics, gpu = measured.metrics, measured.gpu
        yield _about(view, inc, info) | {
            "is_stale": measured.is_stale(view.now_ms, number),
            "queue_s": round(load.queue_s(view.now_ms), 4),
            "requests": load.requests,
            "decoding": load.decoding,
            "waiting": metrics.num_requests_waiting,
            "kv_used": round(metrics.gpu_cache_usage_perc, 4),
            "gpu_util": gpu.utilisation if gpu != NO_READINGS else None,
            **view.rung(inc, info)._asdict(),
            "metrics_age_s": (
                round(max(0, view.now_ms - measured.at_ms) / 1000, 1) if measured.at_ms else None
            ),
            "device_blocks": metrics.device_blocks,
            "host_blocks": metrics.host_blocks,
            "disk_blocks": metrics.disk_blocks,
            "reported_hit": round(metrics.gpu_prefix_cache_hit_rate, 4),
        }
    for inc, info in view.paused.items():
        yield _about(view, inc, info)


def _about(view: View, inc: Incarnation, info: WorkerInfo) -> dict[str, Any]:
    return view.verdict(inc).told(view.now_ms) | {
        "worker": str(info.key),
        "incarnation": int(inc),
        "max_requests": info.max_requests,
        "total_blocks": info.kv_total_blocks,
        "model": info.models[0] if info.models else "",
        "address": info.address,
        "role": info.role.value,
        "engine": info.engine,
        "accelerator": info.accelerator,
    }


COLUMNS = (
    *("worker", "state", "since_s", "until_s", "cause", "witnesses"),
    *("queue_s", "requests", "max_requests", "decoding", "waiting", "kv_used"),
    *("device_blocks", "host_blocks", "disk_blocks", "total_blocks", "unique_value_s", "gpu_util"),
    *("trust", "trust_cause", "metrics_age_s", "predicted_hit", "reported_hit", "model"),
    *("address", "role"),
    *("ok", "failed", "retried", "left_before", "output", "sources"),
    *("trouble", "last_error", "last_error_ms"),
)


def with_endings(
    rows: list[dict[str, Any]], ended: Mapping[str, Mapping[str, float]], errors: Iterable[Errors]
) -> list[dict[str, Any]]:
    """Adds how requests ended. ended: requests of the last minute at each worker, by how they
    ended. errors: the latest first."""
    last: dict[str, Errors] = {}
    for one in errors:
        last.setdefault(one.error.worker, one)
    counted = [
        (row, _endings(ended.get(row["worker"], {}), last.get(row["worker"]))) for row in rows
    ]
    return [row | counts | {"trouble": _trouble(row, counts)} for row, counts in counted]


def _trouble(row: Mapping[str, Any], counts: Mapping[str, Any]) -> int:
    """Returns a number that grows with the trouble of a worker: by its state, then by requests."""
    failed, tried = counts["failed"], counts["failed"] + counts["ok"]
    amiss = [row["state"]]
    if row["state"] == State.SERVING:
        amiss += ["stale"] * row.get("is_stale", False)
        amiss += ["failing"] * (tried >= FEW and failed > FAILING_SHARE * tried)
    worst = max(map(BY_TROUBLE.index, amiss))
    return int(worst * 1_000_000 + failed + counts["left_before"])


def _endings(counts: Mapping[str, float], last: Errors | None) -> dict[str, Any]:
    failed = sum(counts.get(kind, 0.0) for kind in FAILED)
    return {
        "ok": round(counts.get(Kind.OK, 0.0)),
        "failed": round(failed),
        "retried": round(sum(counts.get(kind, 0.0) for kind in RETRIED)),
        "left_before": round(counts.get(Kind.LEFT_BEFORE, 0.0)),
        "output": round(counts.get("output", 0.0)),
        "sources": round(counts.get("sources", 0.0)),
        "last_error": (last.error.words or last.error.cause) if last else None,
        "last_error_ms": last.last_ms if last else None,
    }


MAX_MODELS = 200
REPLICA_COLUMNS = (
    *("replica", "address", "age_s", "uptime_s", "version", "decisions_per_s", "decision_p99_s"),
    *("redis_p99_s", "waiting", "degraded_per_s", "this"),
)
MODEL_WORK = ("output", "retries", "migrations", "sources")
MODEL_COLUMNS = (
    *("model", *(kind.value for kind in Kind), *MODEL_WORK),
    *("failed_share", "ttft_mean_s", "queue_s"),
)
LEVELS = {True: "ok", False: "bad", None: "unknown"}
ORDER = ("bad", "warn", "unknown", "ok")


def tiles(together: Together, view: View | None) -> dict[str, float | None]:
    paused = [view.verdict(inc).state for inc in view.paused] if view else []
    draining = paused.count(State.DRAINING)
    queues = [load.queue_s(view.now_ms) for load in view.loads] if view else []
    values = together.series() | {
        "cached_share": together.cached_share(together.minute),
        "predicted_share": together.predicted_share(together.minute),
        "workers": float(len(queues)),
        "draining": float(draining),
        "paused": float(len(paused) - draining),
        "queue_s": sum(queues) / len(queues) if queues else None,
    }
    return {name: short(value) for name, value in values.items()}


def replicas_table(there: Mapping[str, tuple[int, Mapping[str, Any]]], own: str) -> Rows:
    """Returns a row for each replica. there: age in ms and figures of each, by name."""
    rows = []
    for name, (age_ms, figures) in there.items():
        alone = Together([figures])
        rows.append(
            [
                name,
                figures.get("address"),
                round(max(0, age_ms) / 1000),
                figures.get("uptime_s"),
                figures.get("version"),
                short(alone.per_s["decisions:routed"]),
                short(alone.quantile("decision", 0.99)),
                short(alone.quantile("redis", 0.99)),
                alone.gauges.get("waiting"),
                short(alone.per_s["degraded"]),
                name == own,
            ]
        )
    return {"columns": REPLICA_COLUMNS, "rows": rows}


def models_table(together: Together, view: View | None) -> Rows:
    models = sorted(together.models.items(), key=lambda item: (-trouble(item[1]), item[0]))
    queues = _queues_by_model(view) if view else {}
    rows = [
        [
            *(name, *(round(counts[kind]) for kind in (*Kind, *MODEL_WORK))),
            short(together.failed_share(counts, by_model=True)),
            short(share(counts["ttft_s"], counts["ttft"])),
            short(queues.get(name)),
        ]
        for name, counts in models[:MAX_MODELS]
    ]
    return {"columns": MODEL_COLUMNS, "rows": rows}


def _queues_by_model(view: View) -> dict[str, float]:
    queues: dict[str, list[float]] = {}
    for info, load in zip(view.infos, view.loads, strict=True):
        for model in info.models:
            queues.setdefault(model, []).append(load.queue_s(view.now_ms))
    return {model: sum(of_model) / len(of_model) for model, of_model in queues.items()}


def findings(results: Iterable[Check], conditions: Iterable[Check]) -> list[FindingShown]:
    """Returns the doctor's results and the conditions that hold, what is wrong first."""
    rows = [_shown(check, "bad" if check.about in FAILING else "warn") for check in conditions]
    rows += [_shown(check, LEVELS[check.ok]) for check in results]
    return sorted(rows, key=lambda row: ORDER.index(row["level"]))


def _shown(check: Check, level: str) -> FindingShown:
    return {
        "name": check.about,
        "ok": check.ok,
        "detail": check.found,
        "remedy": check.remedy if check.ok is False else "",
        "level": level,
    }


def short(value: float | None) -> float | None:
    """Returns the value with four digits: answers are read by eye."""
    return None if value is None else float(f"{value:.4g}")
