"""Answers of a router: their fields, and how they are made of what it knows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Annotated, Any, NotRequired

from pydantic import BaseModel, Field, create_model
from typing_extensions import TypedDict

from app.core.key_rules import KeyRules
from app.core.roles import Role
from app.core.trust import Trust
from app.core.types import Incarnation, TierOverlap, WorkerKey
from app.core.verdicts import State
from app.core.worker_report import GPU, INFO, METRICS, NO_READINGS, Item, WorkerInfo
from app.policy.decision import Candidate, Decision
from app.policy.locality import Locality
from app.policy.view import View, load_statistics


def _told(description: str) -> Any:
    return Field(description=description)


Degraded = Annotated[
    bool,
    _told(
        "decided without Redis, by the last loads seen; without all of the overlap it knows; or "
        "for a worker whose agent is away"
    ),
]
TrustWord = Annotated[str, _told("; ".join(f"{word}: {word.text}" for word in Trust))]
Address = Annotated[str, _told("base URL of the worker")]
IslBlocks = Annotated[int, _told("blocks of the prompt, a partial one included")]


class WorkerName(TypedDict):
    worker_id: str
    dp_rank: int


class AddressedWorker(WorkerName):
    address: Address


class BestWorker(AddressedWorker):
    overlap_blocks: NotRequired[
        Annotated[int, _told("for operators: leading blocks of the prompt that the worker holds")]
    ]
    isl_blocks: IslBlocks
    policy: str
    degraded: Degraded
    trust: NotRequired[TrustWord]


class CandidateWorker(WorkerName):
    """A worker as the decision saw it."""

    eligible: Annotated[bool, _told("whether the request could go there")]
    overlap_blocks: TierOverlap
    active_requests: Annotated[int, _told("requests reserved on the worker")]
    active_blocks: Annotated[int, _told("KV blocks reserved on it")]
    decoding_requests: Annotated[int, _told("those of the requests past their first token")]
    others_requests: Annotated[
        int, _told("requests in its engine beyond those, as it reported; the cost counts them")
    ]
    prefill_tokens: Annotated[int, _told("prompt tokens reserved and still to be computed")]
    queue_s: Annotated[float, _told("predicted length of its queue of prefills")]
    cost: Annotated[float | None, _told("null if the policy rules the worker out")]
    terms: Annotated[dict[str, float | None], _told("what the cost is the sum of")]


class BestOverlap(TypedDict):
    """The longest overlap of any worker."""

    worker: Annotated[str, _told('`<worker_id>:<dp_rank>`; "" if none had any')]
    blocks: int


class Source(AddressedWorker):
    """The worker from which the one that decodes gets blocks of the prompt."""

    form: Annotated[
        str, _told("split: it computes the prompt; fetch: it hands on what it holds of it")
    ]
    kv_transfer: Annotated[str, _told("the protocol by which the blocks travel")]


class _Decided(AddressedWorker):
    request_id: str
    overlap_blocks: NotRequired[Annotated[TierOverlap, _told("for operators")]]
    isl_tokens: Annotated[int, _told("length of the prompt")]
    isl_blocks: IslBlocks
    policy: str
    degraded: Degraded
    trust: NotRequired[TrustWord]
    reserved: Annotated[bool, _told("whether the decision must be released")]


class Routed(_Decided, total=False):
    reservation_id: Annotated[
        str, _told("if reserved: by this id the reservation is confirmed and released")
    ]
    source: Annotated[Source, _told("absent: the worker computes itself what it lacks")]
    bound_blocks: Annotated[
        int,
        _told(
            "of the overlap, blocks that are not published yet, but that the worker has just used "
            "for an answer through this replica's front door; absent: none"
        ),
    ]
    waited_ms: Annotated[int, _told("how long the request waited for a worker, if it had to")]
    tied: Annotated[
        bool, _told("with explain: several workers shared the lowest cost, and one was drawn")
    ]
    tries: Annotated[
        int,
        _told(
            "with explain: more than 1 if the decision was repeated, usually because another "
            "replica had reserved first"
        ),
    ]
    locality: Annotated[
        str, _told("with explain: " + "; ".join(f"{reason}: {reason.text}" for reason in Locality))
    ]
    best_overlap: Annotated[BestOverlap, _told("with explain")]
    forms: Annotated[
        dict[str, float],
        _told("with explain: what the cheapest of each kind costs, where workers pass on KV"),
    ]
    candidates: Annotated[list[CandidateWorker], _told("with explain")]


class RequestState(TypedDict):
    request_id: str
    found: Annotated[bool, _told("false if the request holds no reservation, or none any more")]


def best_worker(decision: Decision) -> BestWorker:
    return {
        **_name(decision.worker.key),
        "address": decision.worker.address,
        "overlap_blocks": decision.overlap.total,
        "isl_blocks": decision.isl_blocks,
        "policy": decision.policy,
        "degraded": decision.degraded,
        "trust": decision.trust,
    }


def routed(decision: Decision) -> Routed:
    answer: Routed = {
        "request_id": decision.request_id,
        "worker_id": decision.worker.key.worker_id,
        "dp_rank": decision.worker.key.dp_rank,
        "address": decision.worker.address,
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
            **_name(source.worker.key),
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
        answer["best_overlap"] = {"worker": decision.best.worker, "blocks": decision.best.blocks}
        answer["tries"] = decision.tries
        if decision.costs_by_kind:
            answer["forms"] = {k.value: cost for k, cost in decision.costs_by_kind.items()}
        answer["candidates"] = [_candidate(c) for c in decision.candidates]
    return answer


def without_overlap(answer: BestWorker | Routed) -> None:
    """Takes out what a client's key is not told: how much of its prompt is cached by whoever."""
    for name in ("overlap_blocks", "bound_blocks", "trust"):
        answer.pop(name, None)  # type: ignore[misc]


def _name(key: WorkerKey) -> WorkerName:
    return {"worker_id": key.worker_id, "dp_rank": key.dp_rank}


def _candidate(c: Candidate) -> CandidateWorker:
    return {
        **_name(c.info.key),
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


def _fields_of(items: Iterable[Item]) -> dict[str, Any]:
    """Returns the fields of reported items, as `create_model` takes them."""
    return {
        i.answer: (str if i.kind in (Role, Trust) else i.annotation, _told(i.help))
        for i in items
        if i.answer
    }


def _values_of(items: Iterable[Item], report: object) -> dict[str, Any]:
    return {item.answer: getattr(report, item.name) for item in items if item.answer}


VERDICT: dict[str, Any] = {
    "state": (str, _told(f"what it is for requests: {', '.join(State)}")),
    "since_s": (float | None, _told("for so long; null: it is not known")),
    "until_s": (float | None, _told("for so much longer; null: nobody knows")),
    "cause": (
        str | None,
        _told("why, or of its last failure; null: there is none, or it failed none lately"),
    ),
    "witnesses": (list[str], _told("callers that saw failures there: keys, or else addresses")),
    "failures": (int, _told("requests that it failed in a row; 7 at most")),
    "failed_share": (float, _told("of its tries lately, those that failed, 0-1")),
}
"""Fields of a worker's verdict, of which each worker has one."""
PausedWorker = create_model(
    "PausedWorker",
    __doc__="A worker that is there, and gets no requests.",
    worker_id=(str, ...),
    dp_rank=(int, ...),
    incarnation=(int, _told("number of this life of the worker")),
    **VERDICT,
)
GpuReadings = create_model("GpuReadings", **_fields_of(GPU))
LiveWorker = create_model(
    "LiveWorker",
    worker_id=(str, ...),
    dp_rank=(int, ...),
    incarnation=(int, _told("number of this life of the worker")),
    **_fields_of(INFO),
    active_requests=(int, _told("requests reserved on the worker")),
    decoding_requests=(int, _told("those of them past their first token")),
    others_requests=(int, _told("requests in its engine beyond those, as it reported")),
    active_blocks=(int, _told("KV blocks reserved")),
    prefill_tokens=(int, _told("prompt tokens reserved and still to be computed")),
    queue_s=(float, _told("predicted length of the queue of prefills")),
    **VERDICT,
    **_fields_of(METRICS),
    gpu=(GpuReadings | None, _told("null if nothing was read")),
    stale=(
        bool,
        _told("the measurements are older than a second; longer with more than 256 workers"),
    ),
    unique_value_s=(
        float | None,
        _told(
            "seconds of recent prefills that would be done again without the worker's process; "
            "null if no planner says"
        ),
    ),
)


class Workers(BaseModel):
    workers: list[LiveWorker]  # type: ignore[valid-type]
    paused: list[PausedWorker]  # type: ignore[valid-type]
    load_avg: float = _told("mean used fraction of KV blocks, over the workers that are not stale")
    load_std: float = _told("its sample standard deviation")


def workers(view: View, values: Mapping[str, float], rules: KeyRules | None = None) -> Workers:
    """Returns the workers of the models that a key may ask for; clients' keys are not told who else
    met failures. values: by worker ids, see LiveWorker.unique_value_s. rules: None: any key."""

    def is_shown(info: WorkerInfo) -> bool:
        return rules is None or not rules.models or any(map(rules.may_ask, info.models))

    def verdict(inc: Incarnation) -> dict[str, object]:
        told = _verdict(view, inc)
        return told | {"witnesses": []} if rules is not None and rules.is_client else told

    live = [
        {
            **_name(info.key),
            "incarnation": inc,
            **_values_of(INFO, info),
            **view.rung(inc, info)._asdict(),
            "active_requests": load.requests,
            "decoding_requests": load.decoding,
            "others_requests": round(others),
            "active_blocks": load.blocks,
            "prefill_tokens": load.prefill_tokens,
            "queue_s": load.queue_s(view.now_ms),
            **verdict(inc),
            **_values_of(METRICS, measured.metrics),
            "gpu": None if measured.gpu == NO_READINGS else _values_of(GPU, measured.gpu),
            "stale": measured.is_stale(view.now_ms, len(view.infos)),
            "unique_value_s": values.get(info.key.worker_id),
        }
        for inc, info, load, measured, others in zip(
            *(view.incarnations, view.infos, view.loads, view.measured, view.others_requests),
            strict=True,
        )
        if is_shown(info)
    ]
    paused = [
        {**_name(info.key), "incarnation": inc, **verdict(inc)}
        for inc, info in view.paused.items()
        if is_shown(info)
    ]
    load_avg, load_std = load_statistics(view)
    return Workers.model_validate(
        {"workers": live, "paused": paused, "load_avg": load_avg, "load_std": load_std}
    )


def _verdict(view: View, inc: Incarnation) -> dict[str, object]:
    failed = view.marks[inc].failed
    return view.verdict(inc).told(view.now_ms) | {
        "failures": failed.count,
        "failed_share": round(failed.share_at(view.now_ms), 3),
    }
