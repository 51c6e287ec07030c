"""Fields of the answers that app/edge/views.py makes, loaded only to document them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, Field, create_model

from app.core.report_items import Item
from app.core.roles import Role
from app.core.trust import Trust
from app.core.verdicts import State
from app.core.worker_report import GPU, INFO, METRICS
from app.edge.schemas import RequestId
from app.policy.locality import Locality

DEGRADED = (
    "decided without Redis, by the last loads seen; without all of the overlap it knows; or for a "
    "worker whose agent is away"
)
TRUST = "; ".join(f"{word}: {word.text}" for word in Trust)


class TierOverlapModel(BaseModel):
    """Leading blocks that the worker holds, by the tier they would be read from."""

    device: int
    host: int
    disk: int


class BestWorker(BaseModel):
    worker_id: str
    dp_rank: int
    address: str = Field(description="base URL of the worker")
    overlap_blocks: int = Field(description="leading blocks of the prompt that the worker holds")
    isl_blocks: int = Field(description="blocks of the prompt, a partial one included")
    policy: str
    degraded: bool = Field(description=DEGRADED)
    trust: str = Field(description=TRUST)


class CandidateModel(BaseModel):
    """A worker as the decision saw it."""

    worker_id: str
    dp_rank: int
    eligible: bool = Field(description="whether the request could go there")
    overlap_blocks: TierOverlapModel
    active_requests: int = Field(description="requests reserved on the worker")
    active_blocks: int = Field(description="KV blocks reserved on it")
    decoding_requests: int = Field(description="those of the requests past their first token")
    others_requests: int = Field(
        description="requests in its engine beyond those, as it reported; the cost counts them"
    )
    prefill_tokens: int = Field(description="prompt tokens reserved and still to be computed")
    queue_s: float = Field(description="predicted length of its queue of prefills")
    cost: float | None = Field(description="null if the policy rules the worker out")
    terms: dict[str, float | None] = Field(description="what the cost is the sum of")


class BestOverlap(BaseModel):
    """The longest overlap of any worker."""

    worker: str = Field(description='`<worker_id>:<dp_rank>`; "" if none had any')
    blocks: int


class SourceModel(BaseModel):
    """The worker from which the one that decodes gets blocks of the prompt."""

    worker_id: str
    dp_rank: int
    address: str = Field(description="base URL of the worker")
    form: str = Field(
        description="split: it computes the prompt; fetch: it hands on what it holds of it"
    )
    kv_transfer: str = Field(description="the protocol by which the blocks travel")


class Routed(BaseModel):
    request_id: str
    reservation_id: str | None = Field(
        default=None,
        description="if reserved: by this id the reservation is confirmed and released",
    )
    worker_id: str
    dp_rank: int
    address: str = Field(description="base URL of the worker")
    source: SourceModel | None = Field(
        default=None, description="absent: the worker computes itself what it lacks"
    )
    overlap_blocks: TierOverlapModel
    bound_blocks: int | None = Field(
        default=None,
        description="of the overlap, blocks that are not published yet, but that the worker has "
        "just used for an answer through this replica's front door; absent: none",
    )
    isl_tokens: int = Field(description="length of the prompt")
    isl_blocks: int = Field(description="blocks of the prompt, a partial one included")
    policy: str
    degraded: bool = Field(description=DEGRADED)
    trust: str = Field(description=TRUST)
    reserved: bool = Field(description="whether the decision must be released")
    waited_ms: int | None = Field(
        default=None, description="how long the request waited for a worker, if it had to"
    )
    tied: bool | None = Field(
        default=None,
        description="with explain: several workers shared the lowest cost, and one was drawn",
    )
    tries: int | None = Field(
        default=None,
        description="with explain: more than 1 if the decision was repeated, usually because "
        "another replica had reserved first",
    )
    locality: str | None = Field(
        default=None,
        description="with explain: " + "; ".join(f"{reason}: {reason.text}" for reason in Locality),
    )
    best_overlap: BestOverlap | None = Field(default=None, description="with explain")
    forms: dict[str, float] | None = Field(
        default=None,
        description="with explain: what the cheapest of each kind costs, where workers pass on KV",
    )
    candidates: list[CandidateModel] | None = Field(default=None, description="with explain")


class Generation(BaseModel):
    """As in the API of that path; the router looks at these members."""

    model: str = Field(description="one of `GET /v1/models`")
    stream: bool = Field(default=False, description="answer in events, as they come")
    session_id: RequestId | None = Field(
        default=None, description="with --session-affinity; default: the header x-session-id"
    )
    prompt_cache_key: str | None = Field(
        default=None, description="names a session where session_id does not"
    )
    cache_salt: str | None = Field(
        default=None, description="prompts with other salts share no cache with this one"
    )


class RequestState(BaseModel):
    request_id: str
    found: bool = Field(description="false if the request holds no reservation, or none any more")


def _reported(items: Iterable[Item]) -> dict[str, Any]:
    """What answers show of what workers report, as `create_model` takes it."""
    return {
        i.answer: _field(str if i.kind in (Role, Trust) else i.annotation, i.help)
        for i in items
        if i.answer
    }


def _field(annotation: Any, description: str) -> tuple[Any, Any]:
    return annotation, Field(description=description)


GpuModel = create_model("GpuReadings", **_reported(GPU))
VERDICT: dict[str, Any] = {
    "state": _field(str, f"what it is for requests: {', '.join(State)}"),
    "since_s": _field(float | None, "for so long; null: it is not known"),
    "until_s": _field(float | None, "for so much longer; null: nobody knows"),
    "cause": _field(
        str | None, "why, or of its last failure; null: there is none, or it failed none lately"
    ),
    "witnesses": _field(list[str], "callers that saw failures there: keys, or else addresses"),
    "failures": _field(int, "requests that it failed in a row; 7 at most"),
    "failed_share": _field(float, "of its tries lately, those that failed, 0-1"),
}
"""What is told of each worker: its record."""


WorkerModel = create_model(
    "WorkerModel",
    worker_id=(str, ...),
    dp_rank=(int, ...),
    incarnation=_field(int, "number of this life of the worker"),
    **_reported(INFO),
    active_requests=_field(int, "requests reserved on the worker"),
    decoding_requests=_field(int, "those of them past their first token"),
    others_requests=_field(int, "requests in its engine beyond those, as it reported"),
    active_blocks=_field(int, "KV blocks reserved"),
    prefill_tokens=_field(int, "prompt tokens reserved and still to be computed"),
    queue_s=_field(float, "predicted length of the queue of prefills"),
    **VERDICT,
    **_reported(METRICS),
    gpu=_field(GpuModel | None, "null if nothing was read"),
    stale=_field(
        bool, "the measurements are older than a second; longer with more than 256 workers"
    ),
    unique_value_s=_field(
        float | None,
        "seconds of recent prefills that would be done again without the worker's process; null if "
        "no planner says",
    ),
)


PausedWorker = create_model(
    "PausedWorker",
    __doc__="A worker that is there, and gets no requests.",
    worker_id=(str, ...),
    dp_rank=(int, ...),
    incarnation=(int, ...),
    **VERDICT,
)


Workers = create_model(
    "Workers",
    workers=(list[WorkerModel], ...),  # type: ignore[valid-type]
    paused=(list[PausedWorker], ...),  # type: ignore[valid-type]
    load_avg=_field(float, "mean used fraction of KV blocks, over the workers that are not stale"),
    load_std=_field(float, "its sample standard deviation"),
)


class Readiness(BaseModel):
    """Without Redis, or with one that may drop keys, a router may still be ready."""

    ready: bool
    missing: list[str] = Field(description="each entry is `<what>: <why>`")


class Health(BaseModel):
    status: str


class ErrorDetail(BaseModel):
    code: str
    message: str
    field: str | None = None


class ErrorBody(BaseModel):
    """The one shape of every error. `code` is stable."""

    error: ErrorDetail


class OpenAIErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(BaseModel):
    """Errors in OpenAI's form."""

    error: OpenAIErrorDetail


class AnthropicErrorDetail(BaseModel):
    type: str
    message: str


class AnthropicError(BaseModel):
    """Errors in Anthropic's form."""

    type: str
    error: AnthropicErrorDetail


class UsageRow(BaseModel):
    name: str
    requests: int
    failed: int = Field(description="engines failed them, or their answers broke off")
    refused: int = Field(description="by the router")
    prompt_tokens: int
    cached_tokens: int
    cached_share: float | None = Field(description="null: there were no tokens")
    output_tokens: int
    waited_ms: int = Field(description="for a worker that could take them")
    by_router: int = Field(
        description="requests whose tokens the router counted, as their engine did not tell"
    )


class UsageShown(BaseModel):
    by: str
    hours: int = Field(description="how many hours back, the present one included")
    rows: list[UsageRow] = Field(description="those with most tokens first")
    total: dict[str, Any]
