"""The console: its page, and the paths below /console/api/ that it asks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from app.console import schemas
from app.console.console import Console
from app.console.kept import KEPT_S
from app.console.page import SAFE, page, redirect
from app.console.tail import DecisionFilter
from app.core.errors import cut
from app.door.client import Headers
from app.edge.client import Client
from app.edge.origins import check_asked
from app.edge.routes import REQUEST_ID, Route
from app.http.client import JSON

MAX_BODY_BYTES = 64 * 1024
API = "/console/api"
M = TypeVar("M", bound=BaseModel)
Endpoint = Callable[[Client], Awaitable[None]]


async def overview(client: Client) -> None:
    """Rates, times, replicas, Redis, and what is wrong now, in words."""
    console = _console(client)
    await _answer(client, "overview", console.overview)


async def workers(client: Client) -> None:
    """All workers, as columns. One that is gone is shown for a minute."""
    console = _console(client)
    await _answer(client, "workers", console.workers)


async def worker(client: Client) -> None:
    """One worker: its queue over time, its most frequent prefixes and its last decisions."""
    console, key = _console(client), client.path_params["key"]
    await _answer(client, f"workers/{key}", lambda: _found(console.worker(key), "worker", key))


async def decisions(client: Client) -> None:
    """The newest decisions, or those about one request. Filters look through the last thousand."""
    console = _console(client)
    asked = schemas.DecisionsAsked.model_validate(dict(client.query_params))
    if (request_id := asked.request_id) is not None:
        await _answer(client, f"of {request_id}", lambda: console.decision(request_id))
        return
    which = DecisionFilter(asked.reason, asked.worker, asked.model, asked.tenant)
    await _answer(
        client,
        f"decisions {asked!r}",
        lambda: console.decisions(asked.after or "", asked.limit, which),
    )


async def explain(client: Client) -> None:
    """Why a request went where it went, as `kvroute explain --json` says it."""
    console, request_id = _console(client), client.path_params["request_id"]
    await _answer(
        client,
        f"explain/{request_id}",
        lambda: _found(console.explain(request_id), "decision about", request_id),
    )


async def history(client: Client) -> None:
    """The last hour by steps of 5 s, or a longer time by minutes; and seconds of queue by worker
    and time. All replicas answer alike."""
    console = _console(client)
    asked = schemas.HistoryAsked.model_validate(dict(client.query_params))
    await _answer(
        client, f"history {asked.window_s}", lambda: console.history(asked.window_s), kept_s=2.0
    )


async def events(client: Client) -> None:
    """What happened to workers, replicas and Redis, the newest first."""
    console = _console(client)
    asked = schemas.EventsAsked.model_validate(dict(client.query_params))
    after = asked.after or ""
    await _answer(
        client, f"events {after} {asked.limit}", lambda: console.events(after, asked.limit)
    )


async def reuse(client: Client) -> None:
    """Of all prompt tokens, how many were held, reached and used, and why the others were not."""
    console = _console(client)
    await _answer(client, "funnel", console.reuse)


async def usage(client: Client) -> None:
    """What each key has used in the last day, by hours, and how many requests lately."""
    console = _console(client)
    await _answer(client, "usage", console.usage, kept_s=5.0)


async def waiting(client: Client) -> None:
    """Who waits for a worker, in the order of turns."""
    console = _console(client)
    await _answer(client, "waiting", console.waiting)


async def drain(client: Client) -> None:
    """Route no more requests to a worker, or route them to it again. The request must have the
    header `x-kvroute-console`, with any value: a form of another site cannot send it."""
    console = _console(client)
    check_asked(client.scope["headers"])
    body = await _body(client, schemas.DrainAsked)
    drained = await _found(console.drain(body.worker, undo=body.undo), "worker", body.worker)
    await _say(client, drained)


def _console(client: Client) -> Console:
    console = client.replica.console
    if console is None:
        raise HTTPException(404, "The console is off: --console.")
    return console


async def _found(asking: Awaitable[Any], what: str, name: str) -> Any:
    answer = await asking
    if answer is None:
        raise HTTPException(404, f"There is no {what} {cut(name)!r} (yet, or any longer).")
    return answer


async def _body(client: Client, model: type[M]) -> M:
    """Raises HTTPException unless it says that it is JSON, and ValidationError."""
    kind = client.raw_headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind != b"application/json":
        raise HTTPException(415, "The content-type must be application/json.")
    return model.model_validate_json(await client.read(MAX_BODY_BYTES))


async def _answer(
    client: Client, question: str, make: Callable[[], Awaitable[Any]], kept_s: float = KEPT_S
) -> None:
    answer = await _console(client).answers.of(question, make, kept_s)
    headers: Headers = [
        JSON,
        *SAFE,
        (b"cache-control", b"no-store"),
        (b"etag", answer.etag),
        (b"x-kvroute-at-ms", b"%d" % answer.at_ms),
    ]
    if answer.stale:
        said = cut(answer.stale, 200).encode("ascii", "replace").replace(b"\n", b" ")
        headers = [*headers, (b"x-kvroute-stale", said)]
    if client.raw_headers.get(b"if-none-match") == answer.etag:
        await client.start(304, headers)
        await client.send(b"", last=True)
        return
    await client.answer_whole(answer.body, 200, *headers)


async def _say(client: Client, content: object) -> None:
    body = orjson.dumps(content)
    await client.answer_whole(body, 200, JSON, *SAFE, (b"cache-control", b"no-store"))


def _get(
    path: str,
    endpoint: Endpoint,
    answered: str,
    error: int = 503,
    query: type[BaseModel] | None = None,
) -> Route:
    """A path that is asked again and again."""
    errors = sorted({401, 403, error, 503})
    return Route("GET", API + path, endpoint, *errors, answered=answered, query=query)


def _post(
    path: str, endpoint: Endpoint, body: type[BaseModel], answered: str, *errors: int
) -> Route:
    statuses = sorted({401, 403, 408, 413, 415, 422, 503, *errors})
    return Route("POST", API + path, endpoint, *statuses, answered=answered, body=body)


ROUTES = [
    Route("GET", "/console", redirect, is_described=False),
    Route("GET", "/console/", page, is_described=False),
    Route("GET", "/console/static/{file:path}", page, is_described=False),
    _get("/overview", overview, "Overview"),
    _get("/workers", workers, "TableOf"),
    _get("/workers/{key:any_text}", worker, "WorkerShown", 404),
    _get("/decisions", decisions, "Decisions", 422, schemas.DecisionsAsked),
    _get("/explain/" + REQUEST_ID, explain, "Explanation", 404),
    _get("/history", history, "HistoryShown", 422, schemas.HistoryAsked),
    _get("/events", events, "EventsShown", 422, schemas.EventsAsked),
    _get("/funnel", reuse, "ReuseShown"),
    _get("/usage", usage, "TableOf"),
    _get("/waiting", waiting, "WaitingShown"),
    _post("/drain", drain, schemas.DrainAsked, "Drained", 404),
]
