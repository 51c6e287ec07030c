"""Chats, models and tokens over HTTP, as vLLM's server has them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response

from app.core.errors import InvalidRequest, shown
from app.core.hashing import token_bytes
from app.door.tokens import Renderer, Unrenderable, chat_of_messages, load
from app.http.body import header, json_response, read_body
from app.simulation.steps import Finished
from workers.engines.base import Engine, Tokenizer
from workers.http import Completion, CompletionCall, check, respond, usage_of
from workers.messages import Message

MAX_BODY_BYTES = 64 * 1024 * 1024
DEFAULT_MAX_TOKENS = 128


class _Chat(Completion):
    """A chat's answer under way: the first event comes with the first token."""

    def __init__(
        self,
        engine: Engine,
        call: CompletionCall,
        model: str,
        tokenizer: Tokenizer | None,
        *,
        usage: bool,
    ) -> None:
        super().__init__(engine, call, model, tokenizer)
        self._streams = call.stream
        self._wants_usage = usage
        kind = "chat.completion.chunk" if call.stream else "chat.completion"
        self._frame |= {"id": f"chatcmpl-{call.completion.request_id}", "object": kind}
        self._has_begun = False

    def _json_now(self, token_ids: list[int], finished: Finished | None) -> bytes:
        text = self._next_text(token_ids, finished is not None)
        message: dict[str, object] = {"content": text}
        if not self._has_begun:
            message = {"role": "assistant", "content": text}
            self._has_begun = True
        choice = {
            "index": 0,
            "delta" if self._streams else "message": message,
            "token_ids": token_ids,
            "finish_reason": finished.finish_reason if finished else None,
        }
        if finished is None:
            return orjson.dumps({**self._frame, "choices": [choice]})
        usage = usage_of(finished)
        if not self._streams:
            return orjson.dumps({**self._frame, "choices": [choice], "usage": usage})
        event = orjson.dumps({**self._frame, "choices": [choice]})
        if not self._wants_usage:
            return event
        last = orjson.dumps({**self._frame, "choices": [], "usage": usage})
        return event + b"\n\ndata: " + last


def add_chat(
    app: FastAPI,
    engine: Engine,
    names: Sequence[str],
    tokenizer: Tokenizer | None,
    source: str,
) -> None:
    """Add POST /v1/chat/completions, /v1/messages, /tokenize, /detokenize and GET /v1/models to
    `app`.

    source: the folder of the model's tokenizer and chat template; "": there is none, and chats come
    as token ids. Raises TokenizerUnavailable.
    """
    renderer = load(source) if source else None
    created = int(time.time())

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        fields = await _fields(request, names)
        if fields.get("n") not in (None, 1):
            raise InvalidRequest("n", f"must be 1, got {shown(fields['n'])}")
        prompt = await _chat_ids(fields, renderer)
        limit = fields.get("max_completion_tokens") or fields.get("max_tokens")
        call = _call(request, {**fields, "max_tokens": limit or DEFAULT_MAX_TOKENS}, prompt)
        options = fields.get("stream_options")
        usage = bool(isinstance(options, dict) and options.get("include_usage"))
        answer = _Chat(engine, call, fields["model"], tokenizer, usage=usage)
        return await respond(request, call, answer)

    @app.post("/v1/messages")
    async def messages(request: Request) -> Response:
        fields = await _fields(request, names)
        if "max_tokens" not in fields:
            raise InvalidRequest("max_tokens", "is missing")
        call = _call(request, fields, await _message_ids(fields, renderer))
        return await respond(request, call, Message(engine, call, fields["model"], tokenizer))

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        fields = await _fields(request, names)
        if "messages" in fields:
            ids = np.frombuffer(await _chat_ids(fields, renderer), "<u4").tolist()
        else:
            text = fields.get("prompt")
            if tokenizer is None or not isinstance(text, str):
                raise InvalidRequest("prompt", f"needs text, got {shown(text)}")
            ids = tokenizer.encode(text)
        limit = engine.max_context_tokens
        return json_response({"count": len(ids), "max_model_len": limit, "tokens": ids})

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        fields = await _fields(request, names)
        ids = fields.get("tokens")
        if (
            tokenizer is None
            or not isinstance(ids, list)
            or not all(type(token) is int and 0 <= token < 1 << 32 for token in ids)
        ):
            raise InvalidRequest("tokens", f"needs token ids, got {shown(ids)}")
        return json_response({"prompt": tokenizer.decode(ids)})

    @app.get("/v1/models")
    async def models() -> Response:
        cards = [
            {
                "id": name,
                "object": "model",
                "created": created,
                "owned_by": "kvroute",
                "root": source or names[0],
                "parent": None,
                "max_model_len": engine.max_context_tokens,
            }
            for name in names
        ]
        return json_response({"object": "list", "data": cards})


async def _fields(request: Request, names: Sequence[str]) -> dict[str, Any]:
    """Raises InvalidRequest."""
    try:
        fields = orjson.loads(await read_body(request, MAX_BODY_BYTES))
    except orjson.JSONDecodeError as error:
        raise InvalidRequest("body", f"not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidRequest("body", f"needs a JSON object, got {type(fields).__name__}")
    model = fields.setdefault("model", names[0])
    if model not in names:
        raise InvalidRequest("model", f"must be one of {', '.join(names)}, got {shown(model)}")
    return fields


def _call(request: Request, fields: Mapping[str, Any], prompt: bytes) -> CompletionCall:
    """Raises InvalidRequest."""
    given = header(request, b"x-request-id")
    return check({"request_id": given} | dict(fields) if given else fields, prompt)


async def _chat_ids(fields: Mapping[str, Any], renderer: Renderer | None) -> bytes:
    """The prompt, little-endian u32: as a router gives it, or else rendered. Raises
    InvalidRequest."""
    given = _given_ids(fields)
    return await _rendered(fields, renderer) if given is None else given


async def _message_ids(fields: Mapping[str, Any], renderer: Renderer | None) -> bytes:
    """As _chat_ids."""
    given = _given_ids(fields)
    if given is not None:
        return given
    try:
        chat = chat_of_messages(fields)
    except Unrenderable as error:
        raise InvalidRequest("messages", str(error)) from None
    return await _rendered(chat, renderer)


def _given_ids(fields: Mapping[str, Any]) -> bytes | None:
    params = fields.get("kv_transfer_params")
    given = params.get("prompt_token_ids") if isinstance(params, dict) else None
    if given is None:
        given = fields.get("input_ids")
    return token_bytes(given) if isinstance(given, list) else None


async def _rendered(chat: Mapping[str, Any], renderer: Renderer | None) -> bytes:
    if renderer is None:
        raise InvalidRequest("messages", "are text, but this worker has no tokenizer")
    try:
        ids = await renderer.of_chat(chat)
    except Unrenderable as error:
        raise InvalidRequest("messages", str(error)) from None
    return token_bytes(ids)
