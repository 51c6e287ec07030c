"""The router's endpoints."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.responses import PlainTextResponse

from app.core.config import RouterSettings
from app.core.errors import (
    InvalidRequest,
    NamespaceMissing,
    RedisUnavailable,
    WrongVersion,
    shown,
)
from app.core.keys import Keyspace
from app.core.types import checked_request_id, checked_reservation_id, checked_sent_ms
from app.edge import prompts, schemas, views
from app.edge.large import BodyReader
from app.http.body import Caller, header, json_response, read_body
from app.policy.decision import RouteRequest
from app.policy.view import View, load_statistics
from app.router.metrics import text_of
from app.router.router import Router
from app.router.routers import Routers
from app.state import planner
from app.state.endings import Ending

RAW_TOKENS = "application/octet-stream"
HEADER_OF = {"session_id": "x-session-id", "tenant": "x-tenant-id"}
"""Headers that proxies may set if the client sends no such field."""

BALANCER_ID = b"x-balancer-id"
"""Header in which a balancer names each request that it takes, and which it repeats if it sends
that request again to another replica."""
SENT = b"x-request-start"


class AnyText(PathConvertor):
    """Newlines included: with Starlette's own convertor one at the end is lost, and the id before
    it may be another request's."""

    regex = "(?s:.*)"


register_url_convertor("any_text", AnyText())
routes = APIRouter()


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": schemas.ErrorBody} for status in statuses}


def _request_body(model: type[BaseModel], *, raw: bool = False) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": model.model_json_schema()}}
    extra: dict[str, Any] = {"requestBody": {"required": True, "content": content}}
    if raw:
        content[RAW_TOKENS] = {
            "schema": {
                "type": "string",
                "format": "binary",
                "description": "token ids as little-endian u32; the other fields go in the query",
            }
        }
        extra["parameters"] = [
            {"name": name, "in": "query", "required": False, "schema": schema}
            for name, schema in schemas.RouteOptions.model_json_schema()["properties"].items()
        ]
    return extra


@routes.post(
    "/find_best_worker",
    response_model=schemas.BestWorker,
    responses=_errors(408, 413, 422, 429, 503),
    openapi_extra=_request_body(schemas.FindBestWorker),
)
async def find_best_worker(request: Request) -> Response:
    """Say where a prompt would be routed now, without reserving anything."""
    router, settings = _parts(request)
    raw = await read_body(request, settings.max_body_bytes)
    body, _ = await _read(request, schemas.FindBestWorker, raw)
    prompt = prompts.of_hashes(
        body.local_hashes, body.num_tokens, settings.max_prompt_tokens, may_be_longer=True
    )
    chain = await prompt.chain(await router.block_size(settings.policy))
    decision = await router.route(
        RouteRequest(
            request_id=_new_id(),
            chain=chain,
            isl_tokens=body.num_tokens,
            policy=settings.policy,
            reserve=False,
        )
    )
    return json_response(views.best_worker(decision))


@routes.post(
    "/v1/route",
    response_model=schemas.Routed,
    response_model_exclude_none=True,
    responses=_errors(408, 409, 413, 422, 429, 503),
    openapi_extra=_request_body(schemas.RouteBody, raw=True),
)
async def route(request: Request) -> Response:
    """Choose a worker for a prompt and reserve capacity on it."""
    router, settings = _parts(request)
    began_ms = checked_sent_ms(header(request, SENT)) or router.fleet.redis_now_ms
    raw = await read_body(request, settings.max_body_bytes)
    if (header(request, b"content-type") or "").lower().startswith(RAW_TOKENS):
        options = _options_in_query(request)
        prompt = prompts.of_tokens(options, raw, settings.max_prompt_tokens)
    else:
        body, tokens = await _read(request, schemas.RouteBody, raw)
        if request.scope["query_string"]:
            query = shown(request.url.query)
            raise InvalidRequest("query", f"with JSON, options belong in the body, got {query}")
        options = body
        prompt = prompts.of_body(body, tokens, settings.max_prompt_tokens)
    policy = options.policy or settings.policy
    chain = await prompt.chain(await router.block_size(policy))
    caller = Caller(request)
    decision = await router.route(
        RouteRequest(
            request_id=_request_id(request, options),
            chain=chain,
            isl_tokens=prompt.num_tokens,
            policy=policy,
            began_ms=began_ms,
            reserve=options.reserve,
            explain=options.explain,
            exclude=frozenset(options.exclude),
            session=(
                _or_header(request, options, "session_id") if settings.session_affinity else ""
            ),
            tenant=_or_header(request, options, "tenant") if settings.wait_queue else "",
            priority=options.priority,
            retry=options.retry,
            balancer_id=header(request, BALANCER_ID) or "",
        ),
        caller,
    )
    if decision.reserved and caller.has_hung_up():
        # Nobody would ever end what was reserved for a caller that hung up.
        router.abandon(decision)
    return json_response(views.routed(decision))


@routes.post("/v1/requests/{request_id:any_text}/prefill_complete", responses=_errors(422, 503))
async def prefill_complete(request: Request, request_id: str) -> schemas.RequestState:
    """Report that a request's first token is out. Idempotent."""
    found = await _parts(request)[0].prefill_complete(checked_reservation_id(request_id))
    return schemas.RequestState(request_id=request_id, found=found)


@routes.delete("/v1/requests/{request_id:any_text}", responses=_errors(422, 503))
async def release(
    request: Request, request_id: str, options: Annotated[schemas.ReleaseOptions, Query()]
) -> schemas.RequestState:
    """Report that a request has ended, and release its reservation. Idempotent."""
    router, _ = _parts(request)
    found = await router.release(
        checked_reservation_id(request_id),
        worker_failed=options.worker_failed,
        ending=Ending(options.output_tokens, options.ttft_ms) if options.output_tokens else None,
    )
    return schemas.RequestState(request_id=request_id, found=found)


@routes.get("/v1/workers", response_model=schemas.Workers, responses=_errors(503))
async def workers(request: Request) -> Mapping[str, Any]:
    """List the live workers and the load on each, and those that are left alone for a while."""
    router, _ = _parts(request)
    try:
        view = await router.refresh()
    except NamespaceMissing:
        return views.NO_WORKERS
    values = await planner.values(router.redis, Keyspace(router.namespace))
    return views.workers(view, *load_statistics(view), values)


@routes.head("/health", include_in_schema=False)
@routes.get("/health")
async def health() -> dict[str, str]:
    """Confirm that the process answers."""
    return {"status": "ok"}


@routes.get(
    "/readiness",
    response_model=schemas.Readiness,
    responses={503: {"model": schemas.Readiness}},
)
async def readiness(request: Request) -> Response:
    """Say whether requests can be routed (503 if not), and what is missing."""
    router, _ = _parts(request)
    missing = []
    view: View | None = None
    try:
        view = await router.refresh()
    except NamespaceMissing:
        pass
    except WrongVersion as error:
        return json_response({"ready": False, "missing": [f"namespace: {error}"]}, 503)
    except RedisUnavailable as error:
        missing.append(f"redis: {error}")
        # Without Redis a router still routes, by the last loads it saw.
        view = router.fleet.last_view
    ready = view is not None and bool(view.infos)
    missing += request.app.state.door.remarks()
    if router.danger_of_eviction:
        missing.append(f"redis: {router.danger_of_eviction}")
    if not ready:
        missing.append("workers: none is alive")
        missing += [f"workers: {what}" for what in router.fleet.strangers.values()]
    return json_response({"ready": ready, "missing": missing}, 200 if ready else 503)


@routes.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Metrics in Prometheus text format, with a label `namespace` where it is not the own one."""
    routers: Routers = request.app.state.routers
    own, by_namespace = routers.own, dict(routers.by_namespace)
    await asyncio.gather(*map(_take_stock, by_namespace.values()))
    del by_namespace[own.namespace]
    others = {name: router.telemetry for name, router in sorted(by_namespace.items())}
    return Response(await text_of(own.telemetry, others), media_type=CONTENT_TYPE_LATEST)


async def _take_stock(router: Router) -> None:
    """Set the gauges of what a router sees."""
    telemetry, fleet = router.telemetry, router.fleet
    try:
        view = await router.refresh()
    except (RedisUnavailable, NamespaceMissing, WrongVersion):
        # Gauges of workers that nobody can vouch for are left out.
        telemetry.view = None
    else:
        telemetry.view = view
        telemetry.keep_workers({str(i.key) for i in (*view.infos, *view.paused.values())})
        load_avg, load_std = load_statistics(view)
        telemetry.load_mean.set(load_avg)
        telemetry.load_std.set(load_std)
    telemetry.metrics_age.set(fleet.metrics_age_s)


def _parts(request: Request) -> tuple[Router, RouterSettings]:
    return request.app.state.router, request.app.state.settings


async def _read(
    request: Request, model: type[prompts.M], raw: bytes
) -> tuple[prompts.M, bytes | None]:
    """As BodyReader.read."""
    bodies: BodyReader = request.app.state.bodies
    return await bodies.read(model, raw, _parts(request)[0].fleet.block_size)


def _new_id() -> str:
    return f"req-{uuid.uuid4().hex}"


def _options_in_query(request: Request) -> schemas.RouteOptions:
    # Reading the query, even an empty one, takes longer than looking whether there is one.
    if not request.scope["query_string"]:
        return schemas.RouteOptions()
    return prompts.options_in_query(request.query_params)


def _request_id(request: Request, options: schemas.RouteOptions) -> str:
    """The caller's id, else the balancer's, which a request keeps when it is resent."""
    if options.request_id is not None:
        return options.request_id
    request_id = header(request, b"x-request-id")
    if not request_id:
        return _new_id()
    return checked_request_id(request_id)


def _or_header(request: Request, options: schemas.RouteOptions, field: str) -> str:
    """A field from the body, else from its header; "" for neither."""
    text = request.headers.get(HEADER_OF[field]) if getattr(options, field) is None else None
    if text:
        options = schemas.RouteOptions.model_validate({field: text})
    return getattr(options, field) or ""


HOT_ROUTES: Mapping[str, Callable[[Request], Awaitable[Response]]] = {
    "/v1/route": route,
    "/find_best_worker": find_best_worker,
}
