"""The parts of the console's first page: tiles, replicas, models, and what is wrong, in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from app.console.answers import FindingShown, Rows
from app.console.sampler import short
from app.core.check import Check
from app.core.outcomes import Kind
from app.core.verdicts import State
from app.ops.conditions import FAILING
from app.ops.figures import Together, share, trouble
from app.policy.view import View

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
    """Returns how requests of the last minute ended, the models with most trouble first."""
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
    """Returns the mean seconds of prefill in line at the workers of each model."""
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
