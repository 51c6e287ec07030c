"""The router's endpoints."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from math import isfinite
from typing import Any, TypeVar, cast

import numpy as np
from fastapi import APIRouter, FastAPI, Request, Response
from numpy.typing import NDArray
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from app.api import errors, schemas
from app.core.config import RouterSettings
from app.core.errors import (
    InvalidRequest,
    NamespaceMissing,
    NoWorkers,
    RedisUnavailable,
    shown,
)
from app.core.hashing import (
    Tokens,
    compute_local_hashes,
    compute_sequence_hashes,
    seed_for,
    token_bytes,
)
from app.core.http import header, hung_up, json_response, read_body
from app.core.metrics import NO_READINGS
from app.core.types import REQUEST_ID, LocalHash, SequenceHash
from app.decision import Candidate, Decision, RouteRequest
from app.fleet import View
from app.router import Router

try:
    import simdjson
except ImportError:  # there is no wheel for the newest Python yet
    simdjson = None  # type: ignore[assignment]

RAW_TOKENS = "application/octet-stream"
HEADER_OF = {"session_id": "x-session-id", "tenant": "x-tenant-id"}
"""What proxies may set where a client does not."""

M = TypeVar("M", schemas.RouteBody, schemas.FindBestWorker)

routes = APIRouter()
_errors: dict[int | str, dict[str, Any]] = {
    status: {"model": schemas.ErrorBody} for status in (413, 422, 429, 503)
}


def _request_body(model: type[BaseModel], *, raw: bool = False) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": model.model_json_schema()}}
    extra: dict[str, Any] = {"requestBody": {"required": True, "content": content}}
    if raw:
        content[RAW_TOKENS] = {
            "schema": {
                "type": "string",
                "format": "binary",
                "description": "token ids, little-endian u32; the other fields in the query",
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
    responses=_errors,
    openapi_extra=_request_body(schemas.FindBestWorker),
)
async def find_best_worker(request: Request) -> Response:
    """Where a prompt would go now. A look only: nothing is reserved."""
    router, settings = _parts(request)
    body, _ = _parsed(schemas.FindBestWorker, await read_body(request, settings.max_body_bytes))
    chain = await _chain_of_hashes(router, settings, body.local_hashes, body.num_tokens)
    decision = await router.route(
        RouteRequest(
            request_id=_new_id(),
            chain=chain,
            isl_tokens=body.num_tokens,
            policy=settings.policy,
            reserve=False,
        )
    )
    return json_response(
        {
            **_worker(decision),
            "overlap_blocks": decision.overlap.total,
            "isl_blocks": decision.isl_blocks,
            "policy": decision.policy,
            "degraded": decision.degraded,
        }
    )


@routes.post(
    "/v1/route",
    response_model=schemas.Routed,
    response_model_exclude_none=True,
    responses=_errors,
    openapi_extra=_request_body(schemas.RouteBody, raw=True),
)
async def route(request: Request) -> Response:
    """Choose a worker for a prompt and reserve its capacity."""
    router, settings = _parts(request)
    raw = await read_body(request, settings.max_body_bytes)
    if (header(request, b"content-type") or "").lower().startswith(RAW_TOKENS):
        options: schemas.RouteOptions = _options_in_query(request)
        chain, isl_tokens = await _chain_of_tokens(router, settings, options, raw)
    else:
        body, tokens = _parsed(schemas.RouteBody, raw)
        if request.scope["query_string"]:
            query = shown(request.url.query)
            raise InvalidRequest("query", f"with JSON, options stand in the body, got {query}")
        options = body
        chain, isl_tokens = await _prompt(router, settings, body, tokens)
    decision = await router.route(
        RouteRequest(
            request_id=_request_id(request, options),
            chain=chain,
            isl_tokens=isl_tokens,
            policy=options.policy or settings.policy,
            reserve=options.reserve,
            explain=options.explain,
            exclude=frozenset(options.exclude),
            session=(
                _or_header(request, options, "session_id") if settings.session_affinity else ""
            ),
            tenant=_or_header(request, options, "tenant") if settings.wait_queue else "",
            priority=options.priority,
            hung_up=partial(hung_up, request) if settings.wait_queue else None,
        )
    )
    if decision.reserved and _has_hung_up(request):
        # Nobody would ever end what was reserved for a caller that hung up.
        router.abandon(decision)
    return json_response(_routed(decision))


@routes.post("/v1/requests/{request_id:path}/prefill_complete", responses=_errors)
async def prefill_complete(request: Request, request_id: str) -> schemas.RequestState:
    """The request's first token is out. Idempotent."""
    found = await _parts(request)[0].prefill_complete(request_id)
    return schemas.RequestState(request_id=request_id, found=found)


@routes.delete("/v1/requests/{request_id:path}", responses=_errors)
async def release(request: Request, request_id: str) -> schemas.RequestState:
    """The request is over: give back what was reserved for it. Idempotent."""
    found = await _parts(request)[0].release(request_id)
    return schemas.RequestState(request_id=request_id, found=found)


@routes.get("/v1/workers", responses=_errors)
async def workers(request: Request) -> schemas.Workers:
    """The workers that live now, and the load on each."""
    router, _ = _parts(request)
    try:
        view = await router.refresh()
    except NamespaceMissing:
        return schemas.Workers(workers=[], load_avg=0.0, load_std=0.0)
    load_avg, load_std = router.fleet.load_statistics(view.now_ms)
    return schemas.Workers(workers=_worker_models(view), load_avg=load_avg, load_std=load_std)


@routes.head("/health", include_in_schema=False)
@routes.get("/health")
async def health() -> dict[str, str]:
    """The process answers."""
    return {"status": "ok"}


@routes.get(
    "/readiness",
    response_model=schemas.Readiness,
    responses={503: {"model": schemas.Readiness}},
)
async def readiness(request: Request) -> Response:
    """Can requests be routed? If not, 503; either way, what is missing."""
    router, _ = _parts(request)
    missing = []
    view: View | None = None
    try:
        view = await router.refresh()
    except NamespaceMissing:
        pass
    except RedisUnavailable as error:
        missing.append(f"redis: {error}")
        # Without Redis a router still routes, by the last loads it saw.
        view = router.fleet.last_view
    ready = view is not None and bool(view.infos)
    if not ready:
        missing.append("workers: none is alive")
    return json_response({"ready": ready, "missing": missing}, 200 if ready else 503)


@routes.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Prometheus text."""
    router, _ = _parts(request)
    telemetry, fleet = router.telemetry, router.fleet
    telemetry.clear_workers()
    try:
        view = await router.refresh()
    except (RedisUnavailable, NamespaceMissing):
        # Gauges of workers that nobody can vouch for are left out.
        pass
    else:
        telemetry.keep_workers({str(info.key) for info in view.infos})
        for worker in _worker_models(view):
            gauges = telemetry.worker_load
            name = f"{worker.worker_id}:{worker.dp_rank}"
            gauges["requests"].labels(name).set(worker.active_requests)
            gauges["blocks"].labels(name).set(worker.active_blocks)
            gauges["prefill_tokens"].labels(name).set(worker.prefill_tokens)
            gauges["queue_seconds"].labels(name).set(worker.queue_s)
            gauges["kv_active_blocks"].labels(name).set(worker.kv_active_blocks)
            gauges["requests_waiting"].labels(name).set(worker.num_requests_waiting)
            gauges["cache_usage"].labels(name).set(worker.gpu_cache_usage)
            gauges["stale"].labels(name).set(worker.stale)
            if worker.gpu is not None and not worker.stale:
                for reading, value in worker.gpu.known().items():
                    telemetry.worker_gpu[reading].labels(name).set(value)
        load_avg, load_std = fleet.load_statistics(view.now_ms)
        telemetry.load_mean.set(load_avg)
        telemetry.load_std.set(load_std)
    telemetry.metrics_age.set(fleet.metrics_age_s)
    return Response(generate_latest(telemetry.registry), media_type=CONTENT_TYPE_LATEST)


def _parts(request: Request) -> tuple[Router, RouterSettings]:
    return request.app.state.router, request.app.state.settings


def _new_id() -> str:
    return f"req-{uuid.uuid4().hex}"


def _request_id(request: Request, options: schemas.RouteOptions) -> str:
    """The caller's, else the balancer's, which a request keeps when it is sent again."""
    if options.request_id is not None:
        return options.request_id
    request_id = header(request, b"x-request-id")
    if not request_id:
        return _new_id()
    if not REQUEST_ID.fullmatch(request_id):
        schemas.RouteOptions(request_id=request_id)  # says what is wrong with it
    return request_id


def _or_header(request: Request, options: schemas.RouteOptions, field: str) -> str:
    """A field as the body says, else its header; "" for neither."""
    text = request.headers.get(HEADER_OF[field]) if getattr(options, field) is None else None
    if text:
        options = schemas.RouteOptions.model_validate({field: text})
    return getattr(options, field) or ""


def _has_hung_up(request: Request) -> bool:
    """Whether the caller of a request that was read is gone.

    One step of `receive` says so, or would wait for it. Request.is_disconnected does the same in a
    scope that it cancels, and took 30 µs of CPU to this one's 3.
    """
    waiting = request.receive().__await__()
    try:
        next(waiting)
    except StopIteration as done:
        return bool(done.value["type"] == "http.disconnect")
    waiting.close()
    return False


def _parsed(model: type[M], raw: bytes) -> tuple[M, bytes | None]:
    """The body; and its `token_ids`, as `token_bytes` makes them, where they are not in it.

    simdjson writes an array of numbers into a buffer, without an object for each: half the time of
    the fastest parser that makes them, a fifth of pydantic's. pydantic sees the other fields, and
    the whole body where that is not plainly right, as it knows what to say of it.
    """
    # Only objects; and after a byte order mark simdjson would read on.
    if simdjson is not None and raw.startswith(b"{"):
        with suppress(InvalidRequest, LookupError, RuntimeError, TypeError, ValueError):
            return _parsed_fields(model, raw)
    return model.model_validate_json(raw), None


def _parsed_fields(model: type[M], raw: bytes) -> tuple[M, bytes | None]:
    """Raises for what is not plainly right."""
    # A parser of its own, which takes no longer: it holds all that it has read.
    document: Any = simdjson.Parser().parse(raw)
    fields: dict[str, Any] = {}
    tokens: bytes | None = None
    hashes: list[int] | None = None
    # Buffers are flat, so there must be no arrays in the arrays that become one.
    num_arrays = 0
    for name in document:
        if name in fields:
            raise ValueError(f"{name} comes twice, and simdjson shows only the first")
        value = document[name]
        if not isinstance(value, simdjson.Array):
            fields[name] = value
            continue
        num_arrays += 1
        if name == "token_ids":
            tokens, fields[name] = token_bytes(_unsigned(value)), []
        elif name == "local_hashes":
            hashes, fields[name] = _unsigned(value).tolist(), []
        else:
            fields[name] = value.as_list()
            num_arrays += sum(isinstance(inner, list) for inner in fields[name])
    if raw.count(b"[") != num_arrays:
        raise ValueError("there are other arrays in arrays")
    body = model.model_validate(fields)
    if hashes is not None:
        body.local_hashes = hashes
    return body, tokens


def _unsigned(numbers: simdjson.Array) -> NDArray[np.uint64]:
    """Raises TypeError or ValueError if one is not an integer in [0, 2^64), or there are none."""
    return np.frombuffer(numbers.as_buffer(of_type="u"), np.uint64)


def _options_in_query(request: Request) -> schemas.RouteOptions:
    if not request.scope["query_string"]:
        return schemas.RouteOptions()
    fields: dict[str, Any] = dict(request.query_params)
    if "exclude" in fields:
        fields["exclude"] = request.query_params.getlist("exclude")
    return schemas.RouteOptions.model_validate(fields, strict=False)


async def _block_size(router: Router) -> int:
    """Raises NoWorkers, NamespaceMissing or RedisUnavailable while it is not known."""
    if router.fleet.block_size is None:
        await router.refresh()
    if router.fleet.block_size is None:
        raise NoWorkers("no worker is alive")
    return router.fleet.block_size


async def _prompt(
    router: Router, settings: RouterSettings, body: schemas.RouteBody, tokens: bytes | None
) -> tuple[list[SequenceHash], int]:
    if (body.token_ids is None) == (body.local_hashes is None):
        raise InvalidRequest("token_ids", "give either token_ids or local_hashes and num_tokens")
    if body.token_ids is not None:
        if body.num_tokens is not None:
            raise InvalidRequest("num_tokens", "belongs to local_hashes; token_ids are counted")
        given = body.token_ids if tokens is None else tokens
        return await _chain_of_tokens(router, settings, body, given, body.mm_hashes)
    if body.mm_hashes is not None:
        raise InvalidRequest("mm_hashes", "belongs to token_ids; local_hashes hold it already")
    if body.num_tokens is None:
        raise InvalidRequest("num_tokens", "is needed with local_hashes")
    assert body.local_hashes is not None
    chain = await _chain_of_hashes(router, settings, body.local_hashes, body.num_tokens)
    return chain, body.num_tokens


async def _chain_of_tokens(
    router: Router,
    settings: RouterSettings,
    options: schemas.RouteOptions,
    tokens: Tokens,
    mm_hashes: list[list[int]] | None = None,
) -> tuple[list[SequenceHash], int]:
    num_tokens = len(tokens) // 4 if isinstance(tokens, bytes) else len(tokens)
    _check_length("token_ids", num_tokens, settings)
    block_size = await _block_size(router)
    if mm_hashes is not None and len(mm_hashes) != num_tokens // block_size:
        raise InvalidRequest(
            "mm_hashes",
            f"{len(mm_hashes)} lists; {num_tokens} tokens are {num_tokens // block_size} full "
            f"blocks of {block_size}",
        )
    seed = seed_for(options.lora_name, options.cache_namespace)
    local = compute_local_hashes(tokens, block_size, seed=seed, mm_hashes=mm_hashes)
    return compute_sequence_hashes(local), num_tokens


async def _chain_of_hashes(
    router: Router, settings: RouterSettings, local_hashes: list[int], num_tokens: int
) -> list[SequenceHash]:
    _check_length("num_tokens", num_tokens, settings)
    block_size = await _block_size(router)
    if len(local_hashes) * block_size > num_tokens:
        raise InvalidRequest(
            "local_hashes",
            f"{len(local_hashes)} full blocks of {block_size} tokens do not fit "
            f"into num_tokens {num_tokens}",
        )
    return compute_sequence_hashes(cast(list[LocalHash], local_hashes))


def _check_length(field: str, num_tokens: int, settings: RouterSettings) -> None:
    if not 1 <= num_tokens <= settings.max_prompt_tokens:
        raise InvalidRequest(
            field, f"{num_tokens} tokens; 1 to {settings.max_prompt_tokens} are allowed"
        )


HOT_ROUTES: Mapping[str, Callable[[Request], Awaitable[Response]]] = {
    "/v1/route": route,
    "/find_best_worker": find_best_worker,
}


class Application(FastAPI):
    """FastAPI, which only documents the endpoints of decisions: they are called past all of it.

    They read their bodies and write their answers by themselves. What FastAPI and its middleware do
    besides took a fifth of a decision's CPU.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = None
        if scope["type"] == "http" and scope["method"] == "POST":
            endpoint = HOT_ROUTES.get(scope["path"])
        if endpoint is None:
            await super().__call__(scope, receive, send)
            return
        scope["app"] = self
        request = Request(scope, receive)
        try:
            response = await endpoint(request)
        except ClientDisconnect:
            return
        except Exception as error:
            response = await errors.answer(request, error)
        await response(scope, receive, send)


def _worker(decision: Decision) -> dict[str, Any]:
    info = decision.worker
    return {
        "worker_id": info.key.worker_id,
        "dp_rank": info.key.dp_rank,
        "address": info.address,
    }


def _routed(decision: Decision) -> dict[str, Any]:
    answer = {
        "request_id": decision.request_id,
        **_worker(decision),
        "overlap_blocks": decision.overlap,
        "isl_tokens": decision.isl_tokens,
        "isl_blocks": decision.isl_blocks,
        "policy": decision.policy,
        "degraded": decision.degraded,
        "reserved": decision.reserved,
    }
    if decision.waited_ms:
        answer["waited_ms"] = decision.waited_ms
    if decision.candidates:
        answer["tied"] = decision.tied
        answer["locality"] = decision.locality
        answer["best_overlap"] = {"worker": decision.best, "blocks": decision.best_overlap}
        answer["tries"] = decision.tries
        answer["candidates"] = [_candidate(c) for c in decision.candidates]
    return answer


def _candidate(c: Candidate) -> dict[str, Any]:
    return {
        "worker_id": c.info.key.worker_id,
        "dp_rank": c.info.key.dp_rank,
        "eligible": c.eligible,
        "overlap_blocks": c.overlap,
        "active_requests": c.load.requests,
        "active_blocks": c.load.blocks,
        "decoding_requests": c.load.decoding,
        "prefill_tokens": c.load.prefill_tokens,
        "queue_s": c.queue_s,
        "cost": c.cost if isfinite(c.cost) else None,
        "terms": {name: v if isfinite(v) else None for name, v in c.terms.items()},
    }


def _worker_models(view: View) -> list[schemas.WorkerModel]:
    return [
        schemas.WorkerModel(
            worker_id=info.key.worker_id,
            dp_rank=info.key.dp_rank,
            address=info.address,
            incarnation=inc,
            accelerator=info.accelerator,
            block_size=info.block_size,
            max_requests=info.max_requests,
            active_requests=load.requests,
            decoding_requests=load.decoding,
            active_blocks=load.blocks,
            prefill_tokens=load.prefill_tokens,
            queue_s=load.queue_s(view.now_ms),
            kv_active_blocks=measured.metrics.kv_active_blocks,
            kv_total_blocks=info.kv_total_blocks,
            num_requests_waiting=measured.metrics.num_requests_waiting,
            gpu_cache_usage=measured.metrics.gpu_cache_usage_perc,
            gpu_prefix_cache_hit_rate=measured.metrics.gpu_prefix_cache_hit_rate,
            kv_idle_before_evict_s=measured.metrics.kv_idle_before_evict_s,
            gpu=None if measured.gpu == NO_READINGS else measured.gpu,
            stale=measured.is_stale(view.now_ms),
        )
        for inc, info, load, measured in zip(
            view.incarnations, view.infos, view.loads, view.measured, strict=True
        )
    ]
