"""Answers below /console/api/."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


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
    """What `kvroute explain --json` says: the record of the decision, and these."""

    model_config = ConfigDict(extra="allow")
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
    heat: Heat | None = Field(default=None, description="of the last hour only")


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


class Drained(BaseModel):
    worker: str
    draining: bool
    left: int = Field(description="requests that are still on it")
