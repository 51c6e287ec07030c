"""Bodies and queries of requests."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
)

from app.core.hashing import U64
from app.core.settings.kinds import PRIORITIES
from app.core.types import REQUEST_ID, TENANT_ID
from app.core.usage import BY
from app.core.worker_report import MAX_CONTEXT
from app.ops.usage import hours_in
from app.policy.policies import POLICIES

T = TypeVar("T")

ONLY_WITH_TOKENS = "only with tokens; local_hashes already cover it"

MAX_TTFT_MS = 86_400_000
MAX_EXCLUDED = 4096
"""More workers than a fleet has."""

Array = Annotated[list[T], Field(fail_fast=True)]
"""Only the first bad item is reported: making an error for each of a million takes seconds."""


def _u64(value: Any) -> int:
    """Returns a hash that engines write as an integer, signed or not, or as 16 hex digits."""
    if isinstance(value, str):
        if len(value) != 16 or set(value) - set("0123456789abcdefABCDEF"):
            raise ValueError("not 16 hex digits")
        return int(value, 16)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("not an integer or 16 hex digits")
    if not -(1 << 63) <= value <= U64:
        raise ValueError("does not fit in 64 bits")
    return value & U64


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
Token = Annotated[int, Field(ge=0, lt=1 << 32)]
RequestId = Annotated[str, Field(pattern=f"^{REQUEST_ID.pattern}$")]
TenantId = Annotated[str, Field(pattern=f"^{TENANT_ID.pattern}$")]
Priority = Annotated[str, Field(pattern=f"^({'|'.join(PRIORITIES)})$")]
PolicyName = Annotated[str, Field(pattern=f"^({'|'.join(POLICIES)})$")]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class FindBestWorker(_Body):
    """A lookup that reserves nothing."""

    local_hashes: Array[HashValue] = Field(description="one per full block, in prompt order")
    num_tokens: int = Field(ge=1, description="length of the prompt")


class RouteOptions(_Body):
    """Everything in a route request except its prompt. With raw tokens, these go in the query."""

    request_id: RequestId | None = Field(
        default=None,
        description="default: the header x-request-id, or else a generated id",
    )
    retry: bool = Field(
        default=False,
        description="the same request_id was sent before: take the place of what it has reserved; "
        "otherwise requests with the same id have a reservation each",
    )
    lora_name: str | None = Field(default=None, description=ONLY_WITH_TOKENS)
    cache_namespace: str | None = Field(default=None, description=ONLY_WITH_TOKENS)
    policy: PolicyName | None = Field(default=None, description="default: the router's --policy")
    exclude: Array[str] = Field(
        default_factory=list,
        max_length=MAX_EXCLUDED,
        description="worker ids, or <worker_id>:<dp_rank>",
    )
    session_id: RequestId | None = Field(
        default=None,
        description="with --session-affinity, a session's requests tend to go where the last one "
        "went; default: the header x-session-id",
    )
    tenant: TenantId | None = Field(
        default=None,
        description="where requests wait, turns are shared between tenants; default: the header "
        "x-tenant-id",
    )
    priority: Priority = Field(default="normal", description="where requests wait")
    reserve: bool = Field(default=True, description="false: only say what would be chosen")
    explain: bool = Field(default=False, description="answer with all candidates and their costs")


class RouteBody(RouteOptions):
    """`token_ids`, or `local_hashes` and `num_tokens`."""

    token_ids: Array[Token] | None = Field(default=None, description="the prompt")
    local_hashes: Array[HashValue] | None = Field(
        default=None, description="instead of token_ids: one per full block, in prompt order"
    )
    num_tokens: int | None = Field(
        default=None,
        ge=1,
        description="with local_hashes: length of the prompt; less than a block beyond the hashes",
    )
    mm_hashes: Array[Array[HashValue]] | None = Field(
        default=None,
        description="with token_ids: for each full block, the hashes of the images or other items "
        "that touch it",
    )


class ReleaseOptions(BaseModel):
    """The query of a release."""

    model_config = ConfigDict(extra="forbid")

    worker_failed: bool = Field(
        default=False,
        description="no request goes to the worker until it has renewed its lease; longer if it "
        "failed others before, and none in between was answered",
    )
    output_tokens: int | None = Field(
        default=None,
        ge=0,
        le=MAX_CONTEXT,
        description="how many tokens the answer had, at most as many as a worker takes: `kvroute "
        "planner` replays it so",
    )
    ttft_ms: int | None = Field(
        default=None,
        ge=0,
        le=MAX_TTFT_MS,
        description="time from the request to its first token, by which the planner tells whether "
        "the SLO was kept",
    )


class Generation(BaseModel):
    """Body of that path's API, of which the router looks at these members."""

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


def _hours(since: str) -> str:
    hours_in(since)
    return since


class UsageAsked(BaseModel):
    model_config = ConfigDict(extra="forbid")
    by: Literal[tuple(BY)] = "key"  # type: ignore[valid-type]
    since: Annotated[str, AfterValidator(_hours)] = Field(
        default="7d", description="how far back: 12h, 7d"
    )
