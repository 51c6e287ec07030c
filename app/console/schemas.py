"""What requests below /console/api/ may say."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from app.edge.schemas import RequestId
from app.policy.locality import Locality

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


class DrainAsked(_Asked):
    model_config = ConfigDict(extra="forbid", strict=True)
    worker: str = Field(pattern=f"^{WORKER}$", description="its id, for all ranks, or its key")
    undo: bool = Field(default=False, description="route requests to it again")
