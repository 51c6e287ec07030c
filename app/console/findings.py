"""What is wrong now, in words: the doctor's checks, and the alerts that a router can see."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from app.console.figures import Together
from app.core.check import Check
from app.ops import checks
from app.ops.workers import WorkerStatus
from app.policy.record import DecisionRecord
from app.policy.view import View


@dataclass(frozen=True, slots=True)
class Alert:
    """One of deploy/alerts.yaml, by the figures of the last minute. found: what to say if it
    fires; "": it does not."""

    name: str
    found: Callable[[Together], str]
    remedy: str


def _count(name: str, text: str) -> Callable[[Together], str]:
    return lambda all_of: text.format(all_of.minute[name]) if all_of.minute[name] else ""


def _refused(all_of: Together) -> str:
    number = all_of.refused(all_of.minute)
    return f"{number:.0f} requests were refused in the last minute" if number else ""


def _slow(all_of: Together) -> str:
    p99_s = all_of.quantile("decision", 0.99) or 0.0
    return f"decisions take {p99_s * 1000:.0f} ms (p99)" if p99_s > 0.1 else ""


def _slow_first_tokens(all_of: Together) -> str:
    p95_s = all_of.quantile("ttft", 0.95) or 0.0
    return f"first tokens take {p95_s:.1f} s (p95)" if p95_s > 5 else ""


def _overfull(all_of: Together) -> str:
    fill = all_of.gauges.get("index_fill", 0.0)
    return f"the index holds {fill:.1f} times the blocks it was laid out for" if fill > 4 else ""


def _may_evict(all_of: Together) -> str:
    return "Redis may drop any key once it is full" if all_of.gauges.get("may_evict") else ""


ALERTS = (
    Alert(
        "KvrouteRequestsRefused",
        _refused,
        "add workers, or let requests wait: --wait-queue",
    ),
    Alert(
        "KvrouteDegraded",
        _count("degraded", "{:.0f} requests were routed by load alone in the last minute"),
        "is Redis up, fast, and taking writes? See its latency above",
    ),
    Alert(
        "KvrouteBlind",
        _count("blind", "{:.0f} look-ups of the last minute found no overlap: a shard is away"),
        "is a node of the Cluster down?",
    ),
    Alert("KvrouteSlowDecisions", _slow, "give routers and Redis a core of their own each"),
    Alert(
        "KvrouteWorkersFail",
        _count("suspensions", "{:.0f} times in the last minute a worker failed a request"),
        "the routers' logs say which worker, and why",
    ),
    Alert(
        "KvrouteReservationsExpire",
        _count("reservations:expired", "{:.0f} reservations of the last minute were never ended"),
        "do clients of /v1/route end their requests? Do answers outlast --reservation-ttl-s?",
    ),
    Alert("KvrouteIndexOverfull", _overfull, "start the workers anew with a larger --index-blocks"),
    Alert("KvrouteRedisMayEvict", _may_evict, "CONFIG SET maxmemory-policy noeviction"),
    Alert(
        "KvrouteSlowFirstTokens",
        _slow_first_tokens,
        "is a worker's queue long? Metrics kvroute_door_stage_seconds say what takes the time",
    ),
)


def statuses(view: View) -> list[WorkerStatus]:
    """The live workers as the doctor looks at them. Their blocks are not counted."""
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
            cache_usage=measured.metrics.gpu_cache_usage_perc,
            hit_rate=measured.metrics.gpu_prefix_cache_hit_rate,
            events_silent_s=measured.metrics.events_silent_s,
        )
        for inc, info, load, measured in zip(
            view.incarnations, view.infos, view.loads, view.measured, strict=True
        )
    ]


def of_workers(
    view: View, namespace: str, holders: Mapping[str, str], records: Iterable[DecisionRecord]
) -> Iterator[Check]:
    """The doctor's checks of workers. records: the newest decision first."""
    live = statuses(view)
    yield Check(
        "workers",
        bool(live),
        f"{len(live)} take requests",
        "start a worker, or an agent beside an engine",
    )
    if live:
        yield from checks.of_workers(live, namespace, holders)
        yield checks.predicted(records, live)


def firing(all_of: Together) -> Iterator[Check]:
    """The alerts that would fire, were their `for` over."""
    for alert in ALERTS:
        if found := alert.found(all_of):
            yield Check(alert.name, False, found, alert.remedy)


def shown(found: Iterable[Check], alerts: Iterable[Check]) -> list[dict[str, Any]]:
    """In JSON's types, what is wrong first."""
    levels = {True: "ok", False: "bad", None: "unknown"}
    rows = [_row(check, levels[check.ok]) for check in found]
    rows += [_row(check, "warn") for check in alerts]
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
