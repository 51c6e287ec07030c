"""What requests below /console/api/ may say."""

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
