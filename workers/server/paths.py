"""A worker's HTTP interface: completions over token ids, in the format of the OpenAI API.

`POST /v1/completions` takes a JSON object with `prompt` (token ids; with a tokenizer, also text,
and the answer then has text too; or a list of either), `stream_interval` (tokens per chunk after
the first) and the other members of GENERATION; or, as `application/octet-stream`, the prompt in raw
little-endian u32 with the other fields in the query. A body larger than the longest prompt that
fits could need is not read to its end. A client that disconnects cancels its request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

import numpy as np
import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from app.core.errors import BodiesTooLarge, BodyTimeout, BodyTooLarge, InvalidRequest, shown
from app.core.hashing import token_bytes
from app.core.types import new_id
from app.http.bearer import authorization_in, digest_of, name_of
from app.http.body import CLOSE, error_body, header, http_error, json_response, read_body
from app.http.json_body import JsonBody
from app.http.watch import watched
from app.simulation.steps import PromptTooLargeError
from workers.engines.base import EngineStoppedError, QueueFullError
from workers.metrics import registry_of
from workers.server.answer import AnswerChoices, Form, WholeForm
from workers.server.completions import STOPPING, CompletionForm
from workers.server.members import (
    GENERATION,
    MAX_CHOICES,
    GenerationOptions,
    check_members,
    generated,
)
from workers.server.texts import encoded
from workers.server.transfer import KEEP_S, PARAMS, params_of
from workers.server.writers import ServedEngine, check_travels, written

DEFAULT_MAX_TOKENS = 16
"""What the OpenAI API assumes when a request does not say."""

RETRY_AFTER_S = 1
RAW_TOKENS = "application/octet-stream"
RAW_TOKEN_BYTES = 4
JSON_TOKEN_BYTES = 12
"""Ten digits, a comma and a space."""
TEXT_TOKEN_BYTES = 32
"""A word of five non-Latin letters, each escaped in six bytes."""
ROOM_BYTES = 65_536
"""Room in a body for everything but the prompt."""
_COMPLETION = GENERATION | {"prompt"}
_REFUSED = (
    *(InvalidRequest, BodyTooLarge, BodyTimeout, BodiesTooLarge, PromptTooLargeError),
    *(QueueFullError, EngineStoppedError, ClientDisconnect),
)


def create_app(
    served: ServedEngine,
    *,
    registry: CollectorRegistry | None = None,
    key: str = "",
    metrics_key: str = "",
) -> FastAPI:
    """The HTTP interface of an engine; the caller runs it.

    registry: of the metrics; None: the engine's. key: that requests must carry, but for /health.
    metrics_key: that opens /metrics alone. "": none.
    """
    engine = served.engine
    app = FastAPI(title="kvroute worker", openapi_url=None, redirect_slashes=False)
    for kind in _REFUSED:
        app.add_exception_handler(kind, _refuse)
    app.add_exception_handler(HTTPException, http_error)
    if key or metrics_key:
        app.add_middleware(_Guard, key=key, metrics_key=metrics_key)
    collected = registry_of(engine, registry)

    @app.get("/health")
    async def health() -> Response:
        if engine.running:
            return json_response({"status": "ok"})
        return json_response({"status": "the engine is not running"}, 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(collected), media_type=CONTENT_TYPE_LATEST)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        fields, prompts = await _read(request, served)
        check_members(fields, _COMPLETION)
        asked = generated(fields)
        if asked.travels.held_only:
            return await handed_on(served, prompts, asked)
        return await respond(request, _completion(served, prompts, asked), streams=asked.stream)

    return app


class _Guard:
    """Lets only requests with a key pass that opens their path, but for /health."""

    def __init__(self, app: ASGIApp, key: str, metrics_key: str) -> None:
        self._app = app
        self._digests = [("worker", digest_of(key.encode()))] if key else []
        self._readers = [*self._digests]
        if metrics_key:
            self._readers.append(("metrics", digest_of(metrics_key.encode())))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            allowed = self._readers if scope["path"] == "/metrics" else self._digests
            try:
                name = name_of(authorization_in(scope["headers"]), allowed) if allowed else ""
            except InvalidRequest:
                name = None
            if name is None:
                body = error_body("unauthorized", "Authorization: Bearer KEY is missing or wrong")
                answer = json_response(body, 401, {"WWW-Authenticate": "Bearer"})
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def respond(request: Request, answer: AnswerChoices[Form], *, streams: bool) -> Response:
    """The answer, streamed if that is asked for.

    Raises EngineStoppedError, and ClientDisconnect if the client does not wait for the answer.
    """
    return _Stream(answer) if streams else await respond_whole(request, answer)


async def handed_on(
    served: ServedEngine, prompts: Sequence[bytes], asked: GenerationOptions
) -> Response:
    """Keeps what is held of a prompt for another worker, and says where. Raises InvalidRequest."""
    check_travels(served, asked, len(prompts))
    kept = await served.engine.hand_on(prompts[0], KEEP_S, asked.salt)
    return json_response({PARAMS: params_of(kept, kept.num_tokens)} if kept else {})


def _completion(
    served: ServedEngine, prompts: list[bytes], asked: GenerationOptions
) -> AnswerChoices[Form]:
    """Submitted. Raises InvalidRequest, naming the field and its value, and as Engine.complete."""
    request_id = asked.request_id or f"cmpl-{new_id()}"
    limit = asked.max_tokens or DEFAULT_MAX_TOKENS
    writers = written(served, prompts, asked, request_id, limit=limit)
    form = CompletionForm(request_id, served.names[0], choices=len(writers))
    return AnswerChoices(writers, form, per_prompt=asked.choices)


async def _read(request: Request, served: ServedEngine) -> tuple[Mapping[str, object], list[bytes]]:
    """The members of a body, and the prompts in it."""
    is_raw = (header(request, b"content-type") or "").lower().startswith(RAW_TOKENS)
    if is_raw:
        token_size = RAW_TOKEN_BYTES
    else:
        token_size = JSON_TOKEN_BYTES if served.tokenizer is None else TEXT_TOKEN_BYTES
    limit = served.engine.max_context_tokens * token_size + ROOM_BYTES
    body = await read_body(request, limit)
    if is_raw:
        if len(body) % 4:
            raise InvalidRequest("prompt", f"{len(body)} bytes are not a whole number of u32")
        return _query_fields(request.query_params), [_not_empty(body)]
    fields = dict((await JsonBody.read(body)).fields)
    return fields, [await ids_of(each, served) for each in texts_of(fields, "prompt")]


def texts_of(fields: Mapping[str, object], name: str) -> list[object]:
    """Each of the texts, or lists of token ids, that a member gives, be it one or several. Raises
    InvalidRequest if there are too many, before any is looked at."""
    given = fields.get(name)
    is_batch = isinstance(given, list) and given and isinstance(given[0], list | str | np.ndarray)
    texts = given if isinstance(given, list) and is_batch else [given]
    if len(texts) > MAX_CHOICES:
        raise InvalidRequest(name, f"asks for {len(texts)} choices, over {MAX_CHOICES}")
    return texts


async def ids_of(prompt: object, served: ServedEngine, field: str = "prompt") -> bytes:
    """A prompt, little-endian u32. Raises InvalidRequest."""
    if isinstance(prompt, str):
        if served.tokenizer is None:
            raise InvalidRequest(field, "is text, but this worker has no tokenizer")
        prompt = await encoded(served.tokenizer, prompt, field)
    return _not_empty(_prompt_bytes(prompt, field), field)


def _not_empty(prompt: bytes, field: str = "prompt") -> bytes:
    if not prompt:
        raise InvalidRequest(field, "is empty")
    return prompt


def _prompt_bytes(prompt: object, field: str) -> bytes:
    if isinstance(prompt, np.ndarray):
        with suppress(InvalidRequest):
            return token_bytes(prompt)
        prompt = prompt.tolist()
    if not isinstance(prompt, list):
        raise InvalidRequest(field, f"needs a list of token ids, got {type(prompt).__name__}")
    # In Python a boolean is an int, but it is not a token.
    if set(map(type, prompt)) <= {int}:
        with suppress(InvalidRequest):
            return token_bytes(prompt)
    bad = next(t for t in prompt if type(t) is not int or not 0 <= t < 1 << 32)
    raise InvalidRequest(field, f"{shown(bad)} is not a token id")


def _query_fields(query: Mapping[str, str]) -> dict[str, object]:
    """Query fields as JSON would have them; what cannot be converted is left for the checks."""
    fields: dict[str, object] = dict(query)
    for name in query.keys() - {"request_id"}:
        with suppress(orjson.JSONDecodeError):
            fields[name] = orjson.loads(query[name])
    return fields


class _Stream(StreamingResponse):
    """Cancels the request however the exchange with the client ends."""

    def __init__(self, answer: AnswerChoices[Form]) -> None:
        super().__init__(answer.events(), media_type="text/event-stream")
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.cancel()


async def respond_whole(request: Request, answer: AnswerChoices[WholeForm]) -> Response:
    """Computed before anything is sent, so that the status reflects the outcome."""
    try:
        async with watched(request.scope):
            return Response(await answer.whole(), media_type="application/json")
    finally:
        answer.cancel()
    raise ClientDisconnect


async def _refuse(request: Request, error: Exception) -> Response:
    status, code, field = 422, "invalid_request", None
    headers: Mapping[str, str] = {}
    match error:
        case InvalidRequest():
            field = error.field
        case BodyTooLarge():
            status, code = 413, "body_too_large"
        case BodyTimeout():
            status, code, headers = 408, "body_timeout", CLOSE
        case BodiesTooLarge():
            status, code = 503, "bodies_too_large"
            headers = {"Retry-After": str(RETRY_AFTER_S), **CLOSE}
        case PromptTooLargeError():
            code, field = "prompt_too_large", error.field
        case QueueFullError():
            status, code = 429, "queue_full"
            headers = {"Retry-After": str(RETRY_AFTER_S)}
        case EngineStoppedError():
            status, code = 503, STOPPING
        case ClientDisconnect():
            status, code = 499, "caller_gone"
    return json_response(error_body(code, str(error), field), status, headers)
