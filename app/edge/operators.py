"""The paths by which operators and balancers look at a replica, besides its metrics."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from app.core.errors import NamespaceMissing
from app.core.keys import Keyspace
from app.edge import answers
from app.edge.schemas import UsageAsked
from app.edge.services import Replica, errors
from app.http.keys import HEALTH, USAGE
from app.ops.usage import answer, hours_in
from app.state import planner

ROUTER = APIRouter()


class Health(TypedDict):
    status: str


class Readiness(BaseModel):
    """Without Redis, or with one that may drop keys, a router may still be ready."""

    ready: bool
    missing: list[str] = Field(description="each entry is `<what>: <why>`")


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


@ROUTER.get(HEALTH)
async def health() -> Health:
    """Confirm that the process answers."""
    return {"status": "ok"}


@ROUTER.get("/readiness", responses=errors(503, error=Readiness))
async def readiness(replica: Replica, response: Response) -> Readiness:
    """Say whether requests can be routed in any namespace (503 if not), and what is missing. It
    looks at most twice a second."""
    ready, missing = await replica.readiness.now()
    if replica.is_stopping:
        ready, missing = False, ["router: it is stopping", *missing]
    if not ready:
        response.status_code = 503
    return Readiness(ready=ready, missing=missing)


@ROUTER.get("/v1/workers", responses=errors(401, 503))
async def workers(replica: Replica) -> answers.Workers:
    """List the live workers and the load on each, and those that are left alone for a while."""
    router = replica.router
    try:
        view = await router.refresh()
    except NamespaceMissing:
        return answers.Workers(workers=[], paused=[], load_avg=0.0, load_std=0.0)
    return answers.workers(view, await planner.values(router.redis, Keyspace(router.namespace)))


@ROUTER.get(USAGE, responses=errors(401, 422, 503), response_model=UsageShown)
async def usage(asked: Annotated[UsageAsked, Query()], replica: Replica) -> dict[str, Any]:
    """Tell operators what each key, tenant or model has used."""
    router = replica.router
    return await answer(router.redis, router.keyspace, asked.by, hours_in(asked.since))
