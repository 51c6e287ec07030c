"""What is wrong now, in words: the doctor's checks, and conditions that are alerts too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from app.core.check import Check
from app.ops import checks
from app.ops.conditions import FAILING
from app.ops.names import Names
from app.ops.workers import WorkerStatus
from app.policy.record import DecisionSummary
from app.policy.view import View

LEVELS = {True: "ok", False: "bad", None: "unknown"}


def statuses(view: View) -> list[WorkerStatus]:
    """The live workers as the doctor looks at them, but for those whose agents are away. Their
    blocks are not counted."""
    return [
        WorkerStatus(
            incarnation=inc,
            info=info,
            current=True,
            lease_ms=1,
            load=load,
            metrics_age_s=(max(0, view.now_ms - measured.at_ms) / 1000 if measured.at_ms else None),
            gpu=measured.gpu,
            blocks={},
            hit_rate=measured.metrics.gpu_prefix_cache_hit_rate,
        )
        for inc, info, load, measured in zip(
            view.incarnations, view.infos, view.loads, view.measured, strict=True
        )
        if inc not in view.away
    ]


def of_workers(
    view: View, namespace: str, names: Names, records: Iterable[DecisionSummary]
) -> Iterator[Check]:
    """The doctor's checks of workers. records: the newest decision first."""
    live = statuses(view)
    yield Check(
        "workers",
        bool(view.infos),
        f"{len(view.infos)} take requests",
        "start a worker, or an agent, whose log says which engines it finds",
    )
    yield checks.agents(
        {str(info.key): away_s for info, away_s in zip(view.infos, view.away_s, strict=True)}
    )
    yield checks.engines([*view.infos, *view.paused.values()])
    yield from checks.below_exact(view.infos)
    yield from checks.findings(view.infos)
    if live:
        yield from checks.of_workers(live, namespace, names)
        # Who fails requests computes none of what was predicted for them.
        yield checks.predicted(records, [w for w in live if w.incarnation not in view.marks])


def shown(results: Iterable[Check], conditions: Iterable[Check]) -> list[dict[str, Any]]:
    """In JSON's types, what is wrong first."""
    rows = [_row(check, "bad" if check.about in FAILING else "warn") for check in conditions]
    rows += [_row(check, LEVELS[check.ok]) for check in results]
    order = ("bad", "warn", "unknown", "ok")
    return sorted(rows, key=lambda row: order.index(row["level"]))


def _row(check: Check, level: str) -> dict[str, Any]:
    return {
        "name": check.about,
        "ok": check.ok,
        "detail": check.found,
        "remedy": check.remedy if check.ok is False else "",
        "level": level,
    }
