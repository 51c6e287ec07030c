"""Bodies of requests and responses below /console/api/."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from app.core.settings.kinds import MOST
from app.edge.schemas import Array, HashValue, PolicyName, RequestId, Token
from app.policy.locality import Locality

MAX_LAST = 2000
DAY_S = 86_400
WORKER = r"[\x21-\x7e]{1,200}"
STREAM_ID = r"\d{1,15}(-\d{1,15})?"
AFTER = "only what came after this one: `last` of an earlier answer"


class _Asked(BaseModel):
    model_config = ConfigDict(extra="forbid")


class DecisionsAsked(_Asked):
    after: str | None = Field(default=None, pattern=f"^{STREAM_ID}$", description=AFTER)
    limit: int = Field(default=100, ge=1, le=200)
    reason: str | None = Field(
        default=None, pattern=f"^({'|'.join(Locality)})$", description="only those of this locality"
    )
    worker: str | None = Field(default=None, pattern=f"^{WORKER}$", description="its id or key")
    model: str | None = Field(default=None, max_length=1000)
    tenant: str | None = Field(default=None, max_length=1000)
    request_id: RequestId | None = Field(
        default=None, description="the newest one about this request, of all that are kept"
    )


class EventsAsked(_Asked):
    after: str | None = Field(default=None, pattern=f"^{STREAM_ID}$", description=AFTER)
    limit: int = Field(default=200, ge=1, le=1000)


class HistoryAsked(_Asked):
    window_s: int = Field(default=3600, ge=60, le=DAY_S, description="how far back")


class PrefixAsked(_Asked):
    """One of text, messages, token_ids, local_hashes with num_tokens, and hashes."""

    model_config = ConfigDict(extra="forbid", strict=True)
    text: str | None = Field(default=None, description="tokenized as a completion's prompt")
    messages: list[dict[str, Any]] | None = Field(
        default=None, description="of a chat, rendered and tokenized as a chat completion's"
    )
    tools: list[dict[str, Any]] | None = Field(default=None, description="with messages")
    model: str | None = Field(
        default=None, description="with text and messages: whose tokenizer to use"
    )
    token_ids: Array[Token] | None = Field(default=None, description="the prompt")
    local_hashes: Array[HashValue] | None = Field(
        default=None, description="one per full block, in prompt order"
    )
    num_tokens: int | None = Field(
        default=None, ge=1, le=MOST, description="with local_hashes: length of the prompt"
    )
    hashes: Array[HashValue] | None = Field(
        default=None, description="sequence hashes of the full blocks, as the index has them"
    )
    lora_name: str | None = None
    cache_namespace: str | None = None
    policy: PolicyName | None = Field(default=None, description="default: the router's --policy")


class WhatIfAsked(_Asked):
    """policy or workers."""

    model_config = ConfigDict(extra="forbid", strict=True)
    policy: PolicyName | None = Field(default=None, description="to score the decisions with")
    prefill_weight: float | None = Field(
        default=None, ge=0, le=1000, description="with the policy blocks, instead of 1"
    )
    workers: int | None = Field(
        default=None, ge=1, le=1024, description="replay the last minutes in a fleet of that size"
    )
    last: int = Field(default=1000, ge=1, le=MAX_LAST, description="decisions to score")


class DrainAsked(_Asked):
    model_config = ConfigDict(extra="forbid", strict=True)
    worker: str = Field(pattern=f"^{WORKER}$", description="its id, for all ranks, or its key")
    undo: bool = Field(default=False, description="route requests to it again")


class TableOf(BaseModel):
    """Rows as lists, so that a thousand of them stay small."""

    columns: list[str]
    rows: list[list[Any]] = Field(description="in the order of `columns`; null: not known")


class Finding(BaseModel):
    name: str
    ok: bool | None
    detail: str
    remedy: str = Field(description='what to do; "" if nothing is wrong')
    level: str = Field(description="bad, warn (an alert's condition), unknown or ok")


class RedisState(BaseModel):
    version: str
    used_bytes: int | None
    max_bytes: int | None = Field(description="0: no limit")
    rtt_s: float = Field(description="one round trip from the replica that answers")


class Overview(BaseModel):
    namespace: str
    version: str
    window_s: float = Field(description="rates and percentiles are of so many last seconds")
    tiles: dict[str, float | None] = Field(
        description="of all replicas together; `cached_share`, what engines reported of requests "
        "that were answered, and `predicted_share` are of the last minute"
    )
    replicas: TableOf
    redis: RedisState
    models: TableOf = Field(description="how requests of the last minute ended, by model")
    errors: TableOf = Field(description="what requests failed of, the latest first")
    localities: dict[str, int] = Field(
        description="routed requests by what became of the longest overlap"
    )
    localities_window_s: float
    findings: list[Finding] = Field(description="what is wrong first")


class WorkerShown(BaseModel):
    worker: dict[str, Any] = Field(description="its row, and more")
    series: dict[str, list[float | None]] = Field(description="`at_s` and `queue_s`")
    prefixes: TableOf = Field(description="the most frequent of the prompts it was sent")
    decisions: TableOf
    reserved: int = Field(description="requests that are reserved on it")
    errors: TableOf = Field(description="what its requests failed of, the latest first")


class Decisions(BaseModel):
    """Newest first; `id` is that of the entry in the stream."""

    last: str = Field(description="id of the newest decision there is")
    missed: bool = Field(description="there may have been more after `after` than are kept here")
    columns: list[str]
    rows: list[list[Any]]


class Explanation(BaseModel):
    """As `kvroute explain --json`."""

    request_id: str
    worker: str
    policy: str
    locality: str
    locality_text: str
    trust: str
    isl_tokens: int
    full_blocks: int
    best: str
    best_overlap: int
    terms: list[str]
    candidates: list[dict[str, Any]] = Field(
        description="cheapest first, with each term in seconds; empty if they were not kept"
    )


class Heat(BaseModel):
    at_s: list[int]
    workers: dict[str, list[float | None]] = Field(description="seconds of queue")


class HistoryShown(BaseModel):
    step_s: int
    at_s: list[int] = Field(description="seconds since 1970, by the Redis clock")
    series: dict[str, list[float | None]]
    heat: Heat | None = Field(description="of the last hour only")


class RouteShown(BaseModel):
    worker: str
    policy: str
    locality: str
    locality_text: str
    best_worker: str
    best_blocks: int
    tied: bool
    degraded: bool
    trust: str
    terms: list[str]
    candidates: list[dict[str, Any]]


class PrefixShown(BaseModel):
    tokens: int
    full_blocks: int
    block_size: int
    tokens_from: str = Field(description="client, router or engine")
    holders: TableOf
    route: RouteShown | None
    route_error: str | None = Field(description="why it would go nowhere")


class Event(BaseModel):
    id: str
    at_ms: int
    kind: str = Field(
        description="joined, resynced, left, lost, away, back, ill, suspended, drain, undrain, "
        "proposal, replica_joined, replica_left, replica_lost, redis_away"
    )
    subject: str = Field(description="a worker's key, a replica, or planner")
    text: str
    level: str = Field(description="info, warn or bad")


class EventsShown(BaseModel):
    last: str
    events: list[Event] = Field(description="newest first")


class Loss(BaseModel):
    to: str = Field(description="the step before which the tokens were lost")
    cause: str
    tokens: float


class Reuse(BaseModel):
    """Tokens at each step."""

    prompt_tokens: float
    seen: float | None = Field(description="asked before within an hour")
    held: float = Field(description="by any worker")
    best: float = Field(description="by the worker that held most")
    chosen: float = Field(description="by the worker chosen")
    used: float = Field(description="reported by the engine as cached")
    unforeseen: float = Field(description="cached, though nobody knew of it")
    losses: list[Loss]


class ReuseShown(BaseModel):
    models: dict[str, Reuse] = Field(description='"": all of them')
    seen_error: float | None = Field(default=None, description="how far `seen` may be off; 0-1")


class WaitingShown(BaseModel):
    flows: TableOf


class WhatIfChoices(BaseModel):
    policies: list[str]
    policy: str = Field(description="the router's")
    workers: int = Field(description="how many there are")


class WhatIfShown(BaseModel):
    """As `kvroute whatif --json`."""

    kind: str = Field(description="policy or workers")
    decisions: int | None = None
    changed: int | None = Field(default=None, description="would have gone elsewhere")
    mean: dict[str, dict[str, float]] | None = None
    sizes: list[dict[str, Any]] | None = None


class Drained(BaseModel):
    worker: str
    draining: bool
    left: int = Field(description="requests that are still on it")
