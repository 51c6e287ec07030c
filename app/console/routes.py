"""Paths below /console/api/, which the console's page asks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, HTTPException, Query, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field

from app.console import answers
from app.console.console import Console
from app.console.kept import KEPT_S
from app.console.page import SAFE
from app.console.tail import DecisionFilter
from app.core.errors import cut
from app.edge.client import Client
from app.edge.origins import check_asked
from app.edge.schemas import RequestId
from app.edge.services import REQUEST_ID, Replica, body_of, errors
from app.http.client import CLIENT
from app.ops.reuse import ReuseShown
from app.policy.locality import Locality

MAX_BODY_BYTES = 64 * 1024
DAY_S = 86_400
WORKER = r"[\x21-\x7e]{1,200}"
STREAM_ID = r"\d{1,15}(-\d{1,15})?"
AFTER = "only what came after this one: `last` of an earlier answer"
KEPT_LONGER_S = {"/console/api/history": 2.0, "/console/api/usage": 5.0}
"""Seconds for which answers are kept that cost Redis more than others."""
T = TypeVar("T")


class KeptRoute(APIRoute):
    """A path with an answer for each URL that is kept for a moment: see KeptAnswers."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        kept_s = KEPT_LONGER_S.get(self.path, KEPT_S)

        async def kept(request: Request) -> Response:
            async def make() -> bytes:
                return bytes((await handler(request)).body)

            console = await _console(request.app.replica)
            question = f"{request.scope['path']}?{request.scope['query_string'].decode('latin-1')}"
            answer = await console.answers.of(question, make, kept_s)
            headers = {
                **SAFE,
                "content-type": "application/json",
                "cache-control": "no-store",
                "etag": answer.etag,
                "x-kvroute-at-ms": str(answer.at_ms),
            }
            if answer.stale:
                why = cut(answer.stale, 200).encode("ascii", "replace").decode()
                headers["x-kvroute-stale"] = why.replace("\n", " ")
            if request.headers.get("if-none-match") == answer.etag:
                return Response(status_code=304, headers=headers)
            return Response(answer.body, headers=headers)

        return kept if "GET" in (self.methods or ()) else handler


ROUTER = APIRouter(prefix="/console/api", responses=errors("4XX", 503), route_class=KeptRoute)


async def _console(replica: Replica) -> Console:
    if replica.console is None:
        raise HTTPException(404, "The console is off: --console.")
    return replica.console


Here = Annotated[Console, Depends(_console)]


class DecisionsQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

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


class EventsQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    after: str | None = Field(default=None, pattern=f"^{STREAM_ID}$", description=AFTER)
    limit: int = Field(default=200, ge=1, le=1000)


class HistoryQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    window_s: int = Field(default=3600, ge=60, le=DAY_S, description="how far back")


class DrainBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    worker: str = Field(pattern=f"^{WORKER}$", description="its id, for all ranks, or its key")
    undo: bool = Field(default=False, description="route requests to it again")


@ROUTER.get("/overview")
async def overview(console: Here) -> answers.Overview:
    """Show rates, times, replicas, Redis, and what is wrong now, in words."""
    return await console.overview()


@ROUTER.get("/workers")
async def workers(console: Here) -> answers.Rows:
    """List all workers. One that is gone is shown for a minute."""
    return await console.workers()


@ROUTER.get("/workers/{key:any_text}")
async def worker(console: Here, key: str) -> answers.WorkerShown:
    """Show one worker: its queue over time, its most frequent prefixes and its last decisions."""
    return await _found(console.worker(key), "worker", key)


@ROUTER.get("/decisions")
async def decisions(
    console: Here, asked: Annotated[DecisionsQuery, Query()]
) -> answers.DecisionsShown:
    """List the newest decisions, or those about one request. Filters look through the last
    thousand."""
    if asked.request_id is not None:
        return await console.decision(asked.request_id)
    which = DecisionFilter(asked.reason, asked.worker, asked.model, asked.tenant)
    return await console.decisions(asked.after or "", asked.limit, which)


@ROUTER.get(f"/explain/{REQUEST_ID}")
async def explain(console: Here, request_id: str) -> dict[str, Any]:
    """Explain why a request went where it went, as `kvroute explain --json` does."""
    return await _found(console.explain(request_id), "decision about", request_id)


@ROUTER.get("/history")
async def history(console: Here, asked: Annotated[HistoryQuery, Query()]) -> answers.HistoryShown:
    """Show the last hour by steps of 5 s, or a longer time by minutes; and seconds of queue by
    worker and time. All replicas answer alike."""
    return await console.history(asked.window_s)


@ROUTER.get("/events")
async def events(console: Here, asked: Annotated[EventsQuery, Query()]) -> answers.EventsShown:
    """List what happened to workers, replicas and Redis, the newest first."""
    return await console.events(asked.after or "", asked.limit)


@ROUTER.get("/funnel")
async def reuse(console: Here) -> ReuseShown:
    """Show how many of all prompt tokens were held, reached and used, and why the others were
    not."""
    return await console.reuse()


@ROUTER.get("/usage")
async def usage(console: Here) -> answers.Rows:
    """Show what each key has used in the last day, by hours, and how many requests lately."""
    return await console.usage()


@ROUTER.get("/waiting")
async def waiting(console: Here) -> answers.WaitingShown:
    """List who waits for a worker, in the order of turns, and how much of its limits each key
    uses."""
    return await console.waiting()


async def _drain_body(request: Request) -> DrainBody:
    """Raises HTTPException unless the request comes from the console, with JSON, and
    ValidationError."""
    client: Client = request.scope[CLIENT]
    check_asked(client.scope["headers"])
    kind = client.raw_headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind != b"application/json":
        raise HTTPException(415, "The content-type must be application/json.")
    return DrainBody.model_validate_json(await client.read(MAX_BODY_BYTES))


@ROUTER.post("/drain", openapi_extra={"requestBody": body_of(DrainBody)})
async def drain(
    console: Here, asked: Annotated[DrainBody, Depends(_drain_body)], response: Response
) -> answers.Drained:
    """Route no more requests to a worker, or route them to it again. The request must have the
    header `x-kvroute-console`, with any value: a form of another site cannot send it."""
    response.headers.update({**SAFE, "cache-control": "no-store"})
    return await _found(console.drain(asked.worker, undo=asked.undo), "worker", asked.worker)


async def _found(asking: Awaitable[T | None], what: str, name: str) -> T:
    answer = await asking
    if answer is None:
        raise HTTPException(404, f"There is no {what} {cut(name)!r} (yet, or any longer).")
    return answer
