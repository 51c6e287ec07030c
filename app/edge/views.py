"""Answers: what a router knows, as the JSON that endpoints send. See answers for their fields."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any

from app.core.report_items import Item
from app.core.types import Incarnation, WorkerKey
from app.core.worker_report import GPU, INFO, METRICS, NO_READINGS
from app.policy.decision import Candidate, Decision
from app.policy.view import View


def best_worker(decision: Decision) -> dict[str, Any]:
    """As answers.BestWorker."""
    return {
        **_worker(decision),
        "overlap_blocks": decision.overlap.total,
        "isl_blocks": decision.isl_blocks,
        "policy": decision.policy,
        "degraded": decision.degraded,
        "trust": decision.trust,
    }


def routed(decision: Decision) -> dict[str, Any]:
    """As answers.Routed."""
    answer = {
        "request_id": decision.request_id,
        **_worker(decision),
        "overlap_blocks": decision.overlap,
        "isl_tokens": decision.isl_tokens,
        "isl_blocks": decision.isl_blocks,
        "policy": decision.policy,
        "degraded": decision.degraded,
        "trust": decision.trust,
        "reserved": decision.reserved,
    }
    if decision.reserved:
        answer["reservation_id"] = decision.reservation_id
    if decision.source is not None:
        source = decision.source
        answer["source"] = {
            **_key(source.worker.key),
            "address": source.worker.address,
            "form": source.kind.value,
            "kv_transfer": source.worker.kv_transfer,
        }
    if decision.bound_blocks:
        answer["bound_blocks"] = decision.bound_blocks
    if decision.waited_ms:
        answer["waited_ms"] = decision.waited_ms
    if decision.candidates:
        answer["tied"] = decision.tied
        answer["locality"] = decision.locality
        answer["best_overlap"] = decision.best._asdict()
        answer["tries"] = decision.tries
        if decision.costs_by_kind:
            answer["forms"] = {k.value: cost for k, cost in decision.costs_by_kind.items()}
        answer["candidates"] = [_candidate(c) for c in decision.candidates]
    return answer


def _worker(decision: Decision) -> dict[str, Any]:
    return {**_key(decision.worker.key), "address": decision.worker.address}


def _key(key: WorkerKey) -> dict[str, Any]:
    return {"worker_id": key.worker_id, "dp_rank": key.dp_rank}


def _candidate(c: Candidate) -> dict[str, Any]:
    return {
        **_key(c.info.key),
        "eligible": c.eligible,
        "overlap_blocks": c.overlap,
        "active_requests": c.load.requests,
        "active_blocks": c.load.blocks,
        "decoding_requests": c.load.decoding,
        "others_requests": round(c.others_requests),
        "prefill_tokens": c.load.prefill_tokens,
        "queue_s": c.queue_s,
        "cost": c.cost if isfinite(c.cost) else None,
        "terms": {name: v if isfinite(v) else None for name, v in c.terms.items()},
    }


def workers(
    view: View, load_avg: float, load_std: float, values: Mapping[str, float]
) -> dict[str, Any]:
    """As answers.Workers. load_avg, load_std: see `load_statistics`. values: of worker ids."""
    live = [
        {
            **_key(info.key),
            "incarnation": inc,
            **_reported(INFO, info),
            **view.rung(inc, info)._asdict(),
            "active_requests": load.requests,
            "decoding_requests": load.decoding,
            "others_requests": round(others),
            "active_blocks": load.blocks,
            "prefill_tokens": load.prefill_tokens,
            "queue_s": load.queue_s(view.now_ms),
            **_verdict(view, inc),
            **_reported(METRICS, measured.metrics),
            "gpu": None if measured.gpu == NO_READINGS else _reported(GPU, measured.gpu),
            "stale": measured.is_stale(view.now_ms, len(view.infos)),
            "unique_value_s": values.get(info.key.worker_id),
        }
        for inc, info, load, measured, others in zip(
            *(view.incarnations, view.infos, view.loads, view.measured, view.others_requests),
            strict=True,
        )
    ]
    paused = [
        {**_key(info.key), "incarnation": inc, **_verdict(view, inc)}
        for inc, info in view.paused.items()
    ]
    return {"workers": live, "paused": paused, "load_avg": load_avg, "load_std": load_std}


def _verdict(view: View, inc: Incarnation) -> dict[str, object]:
    failed = view.marks[inc].failed
    return view.verdict(inc).told(view.now_ms) | {
        "failures": failed.count,
        "failed_share": round(failed.share_at(view.now_ms), 3),
    }


NO_WORKERS = {"workers": [], "paused": [], "load_avg": 0.0, "load_std": 0.0}
"""As answers.Workers, of a namespace that does not exist."""


def _reported(items: Iterable[Item], report: object) -> dict[str, Any]:
    return {item.answer: getattr(report, item.name) for item in items if item.answer}
