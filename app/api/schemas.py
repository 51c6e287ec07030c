"""Bodies of requests and responses."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from app.core.config import POLICY_NAMES, PRIORITIES
from app.core.metrics import GpuReadings
from app.core.types import REQUEST_ID

T = TypeVar("T")

U64 = 1 << 64

Array = Annotated[list[T], Field(fail_fast=True)]
"""An error is told of its first bad item alone: to make one of each of a million takes seconds."""


def _u64(value: Any) -> int:
    """A hash as engines write it: an integer, signed or not, or 16 hex digits."""
    if isinstance(value, str):
        if len(value) != 16 or set(value) - set("0123456789abcdefABCDEF"):
            raise ValueError("not 16 hex digits")
        return int(value, 16)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("not an integer or 16 hex digits")
    if not -(U64 >> 1) <= value < U64:
        raise ValueError("does not fit into 64 bits")
    return value % U64


HashValue = Annotated[
    int,
    BeforeValidator(_u64),
    WithJsonSchema(
        {
            "anyOf": [{"type": "integer"}, {"type": "string", "pattern": "^[0-9a-fA-F]{16}$"}],
            "description": "u64 as an integer (signed or unsigned) or as 16 hex digits",
        }
    ),
]
RequestId = Annotated[str, Field(pattern=f"^{REQUEST_ID.pattern}$")]
TenantId = Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,64}$")]
Priority = Annotated[str, Field(pattern=f"^({'|'.join(PRIORITIES)})$")]
PolicyName = Annotated[str, Field(pattern=f"^({'|'.join(POLICY_NAMES)})$")]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class FindBestWorker(_Body):
    """A look only: nothing is reserved."""

    local_hashes: Array[HashValue] = Field(description="one per full block, in prompt order")
    num_tokens: int = Field(ge=1, description="length of the prompt")


class RouteOptions(_Body):
    """Everything of a route request but its prompt. With raw tokens these stand in the query."""

    request_id: RequestId | None = Field(
        default=None,
        description="routing it again moves its reservation; else the header x-request-id, else "
        "made up",
    )
    lora_name: str | None = None
    cache_namespace: str | None = None
    policy: PolicyName | None = None
    exclude: Array[str] = Field(default=[], description="worker ids, or <worker_id>:<dp_rank>")
    session_id: RequestId | None = Field(
        default=None,
        description="with --session-affinity, requests of a session rather go where the last one "
        "went; else the header x-session-id",
    )
    tenant: TenantId | None = Field(
        default=None,
        description="where requests wait, turns are shared between tenants; else the header "
        "x-tenant-id",
    )
    priority: Priority = "normal"
    reserve: bool = True
    explain: bool = False


class RouteBody(RouteOptions):
    """`token_ids`, or `local_hashes` and `num_tokens`."""

    token_ids: Array[Annotated[int, Field(ge=0, lt=1 << 32)]] | None = None
    local_hashes: Array[HashValue] | None = None
    num_tokens: int | None = Field(default=None, ge=1)
    mm_hashes: Array[Array[HashValue]] | None = Field(
        default=None,
        description="with token_ids: for each full block the hashes of the images or other items "
        "that touch it",
    )


class TierOverlapModel(BaseModel):
    """Leading blocks the worker holds, by the tier they would be read from."""

    device: int
    host: int
    disk: int


class BestWorker(BaseModel):
    worker_id: str
    dp_rank: int
    address: str
    overlap_blocks: int
    isl_blocks: int
    policy: str
    degraded: bool


class CandidateModel(BaseModel):
    """A worker as the decision saw it. cost is null where the policy rules it out."""

    worker_id: str
    dp_rank: int
    eligible: bool
    overlap_blocks: TierOverlapModel
    active_requests: int
    active_blocks: int
    decoding_requests: int
    prefill_tokens: int
    queue_s: float
    cost: float | None
    terms: dict[str, float | None]


class BestOverlap(BaseModel):
    """The longest overlap that anybody had. worker: `<worker_id>:<dp_rank>`; "" for nobody."""

    worker: str
    blocks: int


class Routed(BaseModel):
    request_id: str
    worker_id: str
    dp_rank: int
    address: str
    overlap_blocks: TierOverlapModel
    isl_tokens: int
    isl_blocks: int
    policy: str
    degraded: bool = Field(description="decided without Redis, by the last loads seen")
    reserved: bool
    waited_ms: int | None = Field(default=None, description="if it had to, for a worker")
    tied: bool | None = Field(
        default=None, description="with explain: several shared the lowest cost, one was drawn"
    )
    tries: int | None = Field(
        default=None, description="with explain: more than one, if another replica was first"
    )
    locality: str | None = Field(
        default=None,
        description="with explain: kept, where the worker with the longest overlap was chosen; "
        "none, where nobody had any; else why it was not: tie, load, session, full, excluded, "
        "lease, degraded",
    )
    best_overlap: BestOverlap | None = None
    candidates: list[CandidateModel] | None = None


class RequestState(BaseModel):
    """found is false for a request that holds no reservation (any more)."""

    request_id: str
    found: bool


class WorkerModel(BaseModel):
    worker_id: str
    dp_rank: int
    address: str
    incarnation: int
    accelerator: str
    block_size: int
    max_requests: int
    active_requests: int
    decoding_requests: int
    active_blocks: int
    prefill_tokens: int
    queue_s: float
    kv_active_blocks: int
    kv_total_blocks: int
    num_requests_waiting: int
    gpu_cache_usage: float
    gpu_prefix_cache_hit_rate: float
    kv_idle_before_evict_s: float = Field(
        description="for which the blocks evicted lately had not been used; 0: none was"
    )
    gpu: GpuReadings | None = Field(description="null where nothing was read")
    stale: bool = Field(description="what is measured is older than a second")


class Workers(BaseModel):
    """load_avg, load_std: used fraction of KV blocks over the workers that are not stale."""

    workers: list[WorkerModel]
    load_avg: float
    load_std: float


class Readiness(BaseModel):
    """missing: what is, each as `<what>: <why>`; without Redis a router may still be ready."""

    ready: bool
    missing: list[str]


class ErrorDetail(BaseModel):
    code: str
    message: str
    field: str | None = None


class ErrorBody(BaseModel):
    """The one shape of every error. `code` is stable."""

    error: ErrorDetail
