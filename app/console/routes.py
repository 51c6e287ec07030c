"""The paths below /console/api/, which the console's page asks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, HTTPException, Query, Request, Response
from pydantic import BaseModel

from app.console import answers, schemas
from app.console.console import Console
from app.console.kept import KEPT_S
from app.console.page import SAFE
from app.console.tail import DecisionFilter
from app.core.errors import cut
from app.edge.client import Client
from app.edge.origins import check_asked
from app.edge.services import REQUEST_ID, Replica, body_of, errors
from app.http.route import CLIENT

MAX_BODY_BYTES = 64 * 1024
T = TypeVar("T")
ROUTER = APIRouter(prefix="/console/api", responses=errors("4XX", 503))


async def _console(replica: Replica) -> Console:
    if replica.console is None:
        raise HTTPException(404, "The console is off: --console.")
    return replica.console


async def _drain_asked(request: Request) -> schemas.DrainAsked:
    """Raises HTTPException unless the request comes from the console, with JSON, and
    ValidationError."""
    client: Client = request.scope[CLIENT]
    check_asked(client.scope["headers"])
    kind = client.raw_headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind != b"application/json":
        raise HTTPException(415, "The content-type must be application/json.")
    return schemas.DrainAsked.model_validate_json(await client.read(MAX_BODY_BYTES))


Here = Annotated[Console, Depends(_console)]


@ROUTER.get("/overview", response_model=answers.Overview)
async def overview(request: Request, console: Here) -> Response:
    """Rates, times, replicas, Redis, and what is wrong now, in words."""
    return await _kept(request, console, console.overview)


@ROUTER.get("/workers", response_model=answers.TableOf)
async def workers(request: Request, console: Here) -> Response:
    """All workers, as columns. One that is gone is shown for a minute."""
    return await _kept(request, console, console.workers)


@ROUTER.get("/workers/{key:any_text}", response_model=answers.WorkerShown)
async def worker(request: Request, console: Here, key: str) -> Response:
    """One worker: its queue over time, its most frequent prefixes and its last decisions."""
    return await _kept(request, console, lambda: _found(console.worker(key), "worker", key))


@ROUTER.get("/decisions", response_model=answers.Decisions)
async def decisions(
    request: Request, console: Here, asked: Annotated[schemas.DecisionsAsked, Query()]
) -> Response:
    """The newest decisions, or those about one request. Filters look through the last thousand."""
    which = DecisionFilter(asked.reason, asked.worker, asked.model, asked.tenant)
    make: Callable[[], Awaitable[Any]] = partial(
        console.decisions, asked.after or "", asked.limit, which
    )
    if asked.request_id is not None:
        make = partial(console.decision, asked.request_id)
    return await _kept(request, console, make)


@ROUTER.get(f"/explain/{REQUEST_ID}", response_model=answers.Explanation)
async def explain(request: Request, console: Here, request_id: str) -> Response:
    """Why a request went where it went, as `kvroute explain --json` says it."""
    return await _kept(
        request,
        console,
        lambda: _found(console.explain(request_id), "decision about", request_id),
    )


@ROUTER.get("/history", response_model=answers.HistoryShown)
async def history(
    request: Request, console: Here, asked: Annotated[schemas.HistoryAsked, Query()]
) -> Response:
    """The last hour by steps of 5 s, or a longer time by minutes; and seconds of queue by worker
    and time. All replicas answer alike."""
    return await _kept(request, console, partial(console.history, asked.window_s), kept_s=2.0)


@ROUTER.get("/events", response_model=answers.EventsShown)
async def events(
    request: Request, console: Here, asked: Annotated[schemas.EventsAsked, Query()]
) -> Response:
    """What happened to workers, replicas and Redis, the newest first."""
    return await _kept(request, console, partial(console.events, asked.after or "", asked.limit))


@ROUTER.get("/funnel", response_model=answers.ReuseShown)
async def reuse(request: Request, console: Here) -> Response:
    """Of all prompt tokens, how many were held, reached and used, and why the others were not."""
    return await _kept(request, console, console.reuse)


@ROUTER.get("/usage", response_model=answers.TableOf)
async def usage(request: Request, console: Here) -> Response:
    """What each key has used in the last day, by hours, and how many requests lately."""
    return await _kept(request, console, console.usage, kept_s=5.0)


@ROUTER.get("/waiting", response_model=answers.WaitingShown)
async def waiting(request: Request, console: Here) -> Response:
    """Who waits for a worker, in the order of turns."""
    return await _kept(request, console, console.waiting)


@ROUTER.post(
    "/drain",
    response_model=answers.Drained,
    openapi_extra={"requestBody": body_of(schemas.DrainAsked)},
)
async def drain(
    console: Here, asked: Annotated[schemas.DrainAsked, Depends(_drain_asked)], response: Response
) -> Any:
    """Route no more requests to a worker, or route them to it again. The request must have the
    header `x-kvroute-console`, with any value: a form of another site cannot send it."""
    response.headers.update({**SAFE, "cache-control": "no-store"})
    return await _found(console.drain(asked.worker, undo=asked.undo), "worker", asked.worker)


async def _found(asking: Awaitable[T | None], what: str, name: str) -> T:
    answer = await asking
    if answer is None:
        raise HTTPException(404, f"There is no {what} {cut(name)!r} (yet, or any longer).")
    return answer


async def _kept(
    request: Request,
    console: Console,
    make: Callable[[], Awaitable[Any]],
    kept_s: float = KEPT_S,
) -> Response:
    """Returns the answer, in the form of the path's response model, that is kept for the question
    in the URL."""
    model: type[BaseModel] = request.scope["route"].response_model

    async def made() -> dict[str, Any]:
        return model.model_validate(await make()).model_dump(mode="json", exclude_unset=True)

    question = f"{request.scope['path']}?{request.scope['query_string'].decode('latin-1')}"
    answer = await console.answers.of(question, made, kept_s)
    headers = {
        **SAFE,
        "content-type": "application/json",
        "cache-control": "no-store",
        "etag": answer.etag,
        "x-kvroute-at-ms": str(answer.at_ms),
    }
    if answer.stale:
        said = cut(answer.stale, 200).encode("ascii", "replace").decode()
        headers["x-kvroute-stale"] = said.replace("\n", " ")
    if request.headers.get("if-none-match") == answer.etag:
        return Response(status_code=304, headers=headers)
    return Response(answer.body, headers=headers)
