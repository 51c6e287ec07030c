"""A worker's HTTP interface: completions over token ids, in the format of the OpenAI API."""

from __future__ import annotations

import asyncio
import hmac
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from dataclasses import fields as fields_of

import numpy as np
import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from app.core.errors import BodyTimeout, BodyTooLarge, InvalidRequest, shown
from app.core.hashing import token_bytes
from app.core.types import checked_request_id
from app.http.body import CLOSE, error_body, header, http_error, json_response, read_body
from app.http.watch import watched
from app.simulation.steps import Finished, PromptTooLargeError
from workers.engines.base import (
    CompletionRequest,
    Engine,
    EngineStoppedError,
    QueueFullError,
    TextStream,
    Tokenizer,
)
from workers.engines.sampling_options import Sampling
from workers.metrics import registry_of

DEFAULT_MAX_TOKENS = 16
"""What the OpenAI API assumes when a request does not say."""

RETRY_AFTER_S = 1
STOPPING = "stopping"
RAW_TOKENS = "application/octet-stream"
RAW_TOKEN_BYTES = 4
JSON_TOKEN_BYTES = 12
"""Ten digits, a comma and a space."""
TEXT_TOKEN_BYTES = 32
"""A word of five non-Latin letters, each escaped in six bytes."""
LONG_OUTPUT_TOKENS = 1024
"""Decoding this many tokens takes milliseconds, 100,000 most of a second."""
ROOM_BYTES = 65_536
"""Room in a body for everything but the prompt."""
_SAMPLING = tuple(field.name for field in fields_of(Sampling))


def create_app(
    engine: Engine,
    *,
    model: str = "simulated",
    tokenizer: Tokenizer | None = None,
    registry: CollectorRegistry | None = None,
    key: str = "",
) -> FastAPI:
    """The HTTP interface of `engine`; the caller runs it.

    `POST /v1/completions` takes a JSON object with `prompt` (token ids; with a tokenizer, also
    text, and the answer then has text too), `max_tokens`, `stream`, `request_id`,
    `stream_interval` (tokens per chunk after the first), `ignore_eos` and the fields of Sampling;
    or, as `application/octet-stream`, the prompt in raw little-endian u32 with the other fields in
    the query. Unknown fields are ignored. A body larger than the longest prompt that fits could
    need is not read to its end. A client that disconnects cancels its request.

    registry: of the metrics; None: the engine's. key: that requests must carry, but for /health;
    "": none.
    """
    app = FastAPI(title="kvroute worker", openapi_url=None, redirect_slashes=False)
    for kind in (
        InvalidRequest,
        BodyTooLarge,
        BodyTimeout,
        PromptTooLargeError,
        QueueFullError,
        EngineStoppedError,
        ClientDisconnect,
    ):
        app.add_exception_handler(kind, _refuse)
    app.add_exception_handler(HTTPException, http_error)

    if key:
        app.add_middleware(_Guard, key=key)

    @app.get("/health")
    async def health() -> Response:
        if engine.running:
            return json_response({"status": "ok"})
        return json_response({"status": "the engine is not running"}, 503)

    collected = registry_of(engine, registry)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(collected), media_type=CONTENT_TYPE_LATEST)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        call = await _read(request, engine.max_context_tokens, tokenizer)
        return await respond(request, call, Completion(engine, call, model, tokenizer))

    return app


class _Guard:
    """Lets only requests with the key pass, but for /health."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._wanted = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._wanted):
                body = error_body("unauthorized", "Authorization: Bearer KEY is missing or wrong")
                answer = json_response(body, 401, {"WWW-Authenticate": "Bearer"})
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def respond(request: Request, call: CompletionCall, completion: Completion) -> Response:
    """The answer, streamed if the call asks for that."""
    return _Stream(completion) if call.stream else await _answer(request, completion)


@dataclass(frozen=True, slots=True)
class CompletionCall:
    """A checked request."""

    completion: CompletionRequest
    stream: bool
    stream_interval: int


async def _read(
    request: Request, max_context_tokens: int, tokenizer: Tokenizer | None
) -> CompletionCall:
    """Raises InvalidRequest, naming the field and its value, and what `read_body` raises."""
    is_raw = (header(request, b"content-type") or "").lower().startswith(RAW_TOKENS)
    if is_raw:
        token_size = RAW_TOKEN_BYTES
    else:
        token_size = JSON_TOKEN_BYTES if tokenizer is None else TEXT_TOKEN_BYTES
    body = await read_body(request, max_context_tokens * token_size + ROOM_BYTES)
    if is_raw:
        if len(body) % 4:
            raise InvalidRequest("prompt", f"{len(body)} bytes are not a whole number of u32")
        return check(_query_fields(request.query_params), body)
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest("body", f"not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidRequest("body", f"needs a JSON object, got {type(fields).__name__}")
    prompt = fields.get("prompt")
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InvalidRequest("prompt", "is text, but this worker has no tokenizer")
        # Encoding a megabyte takes a second.
        prompt = await asyncio.to_thread(tokenizer.encode, prompt)
    return check(fields, _prompt_bytes(prompt))


def _prompt_bytes(prompt: object) -> bytes:
    if not isinstance(prompt, list):
        raise InvalidRequest("prompt", f"needs a list of token ids, got {type(prompt).__name__}")
    # In Python a boolean is an int, but it is not a token.
    if set(map(type, prompt)) <= {int}:
        with suppress(InvalidRequest):
            return token_bytes(prompt)
    bad = next(t for t in prompt if type(t) is not int or not 0 <= t < 1 << 32)
    raise InvalidRequest("prompt", f"{shown(bad)} is not a token id")


def _query_fields(query: Mapping[str, str]) -> dict[str, object]:
    """Query fields as JSON would have them; what cannot be converted is left for the checks."""
    fields: dict[str, object] = dict(query)
    for name in query.keys() - {"request_id"}:
        with suppress(orjson.JSONDecodeError):
            fields[name] = orjson.loads(query[name])
    return fields


def check(fields: Mapping[str, object], prompt: bytes) -> CompletionCall:
    """The request that these fields of a body ask for. Raises InvalidRequest."""
    if not prompt:
        raise InvalidRequest("prompt", "is empty")
    request_id = fields.get("request_id")
    if request_id is None:
        request_id = f"cmpl-{uuid.uuid4().hex}"
    chosen = {name: fields[name] for name in _SAMPLING if fields.get(name) is not None}
    completion = CompletionRequest(
        checked_request_id(request_id),
        prompt,
        _positive(fields, "max_tokens", DEFAULT_MAX_TOKENS),
        Sampling(**chosen),  # type: ignore[arg-type]  # it checks them
        _flag(fields, "ignore_eos"),
    )
    return CompletionCall(
        completion, _flag(fields, "stream"), _positive(fields, "stream_interval", 1)
    )


def _flag(fields: Mapping[str, object], name: str) -> bool:
    value = fields.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise InvalidRequest(name, f"needs true or false, got {shown(value)}")
    return value


def _positive(fields: Mapping[str, object], name: str, default: int) -> int:
    value = fields.get(name)
    if value is None:
        return default
    if type(value) is not int or value < 1:
        raise InvalidRequest(name, f"needs an integer of at least 1, got {shown(value)}")
    return value


class Completion:
    """A request under way, submitted on construction; `cancel` it in every case."""

    def __init__(
        self, engine: Engine, call: CompletionCall, model: str, tokenizer: Tokenizer | None
    ) -> None:
        request = call.completion
        interval = call.stream_interval if call.stream else request.max_tokens
        self._generation = engine.complete(request, stream_interval=interval)
        self._text: TextStream | None = None
        if tokenizer is not None:
            self._text = tokenizer.stream(np.frombuffer(request.prompt, "<u4").tolist())
        self._frame: dict[str, object] = {
            "id": request.request_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    def cancel(self) -> None:
        """Does nothing once it has finished."""
        self._generation.cancel()

    async def chunks(self) -> AsyncIterator[bytes]:
        try:
            async for output in self._generation:
                yield b"data: %b\n\n" % await self._json(output.token_ids, output.finished)
        except EngineStoppedError as error:
            # The status line is already sent, so only the stream can report the error.
            yield b"data: %b\n\n" % orjson.dumps(error_body(STOPPING, str(error)))
        else:
            yield b"data: [DONE]\n\n"

    async def whole(self) -> bytes:
        """Raises EngineStoppedError if the engine stops before the request is complete."""
        token_ids: list[int] = []
        async for output in self._generation:
            token_ids += output.token_ids
        return await self._json(token_ids, output.finished)

    async def _json(self, token_ids: list[int], finished: Finished | None) -> bytes:
        if len(token_ids) < LONG_OUTPUT_TOKENS:
            return self._json_now(token_ids, finished)
        return await asyncio.to_thread(self._json_now, token_ids, finished)

    def _next_text(self, token_ids: Sequence[int], is_last: bool) -> str:
        if self._text is None:
            return ""
        pieces = [self._text.push(token) for token in token_ids]
        return "".join([*pieces, self._text.end()] if is_last else pieces)

    def _json_now(self, token_ids: list[int], finished: Finished | None) -> bytes:
        choice = {
            "index": 0,
            "text": self._next_text(token_ids, finished is not None),
            "token_ids": token_ids,
            "finish_reason": finished.finish_reason if finished else None,
        }
        usage = {"usage": usage_of(finished)} if finished else {}
        return orjson.dumps({**self._frame, "choices": [choice], **usage})


class _Stream(StreamingResponse):
    """Cancels the request however the exchange with the client ends."""

    def __init__(self, completion: Completion) -> None:
        super().__init__(completion.chunks(), media_type="text/event-stream")
        self._completion = completion

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._completion.cancel()


async def _answer(request: Request, completion: Completion) -> Response:
    """The whole answer, computed before anything is sent, so that the status reflects the outcome.

    Raises EngineStoppedError, and ClientDisconnect if the client does not wait for the answer.
    """
    try:
        async with watched(request.scope):
            return Response(await completion.whole(), media_type="application/json")
    finally:
        completion.cancel()
    raise ClientDisconnect


def usage_of(finished: Finished) -> dict[str, object]:
    """As in the OpenAI API, with the cached tokens by tier."""
    return {
        "prompt_tokens": finished.prompt_tokens,
        "completion_tokens": finished.output_tokens,
        "total_tokens": finished.prompt_tokens + finished.output_tokens,
        "prompt_tokens_details": {
            "cached_tokens": finished.cached_tokens,
            "cached_tokens_by_tier": {
                "device": finished.cached_tokens - finished.host_tokens - finished.disk_tokens,
                "host": finished.host_tokens,
                "disk": finished.disk_tokens,
            },
        },
    }


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
