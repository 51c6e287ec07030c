"""Chats, models and tokens over HTTP, as vLLM's server has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from app.core.errors import InvalidRequest, shown
from app.core.hashing import token_bytes
from app.core.types import new_id
from app.http.client import Exchange
from app.http.json_body import JsonBody
from app.simulation.steps import PromptTooLargeError
from app.tokens import Renderer, TooManyTokens, Unrenderable, load
from workers.engines.base import Tokenizer
from workers.server.answer import NATURAL_TOKENS, AnswerChoices, ServedEngine, now_s, written
from workers.server.completions import ChatForm
from workers.server.members import GENERATION, PARAMS, check_members, count, generated
from workers.server.paths import WorkerApp, decoded, encoded, hand_on, respond

MAX_BODY_BYTES = 32 * 1024 * 1024
"""Bytes of a body: what a router takes, and the ids that it adds."""
DEFAULT_MAX_TOKENS = 128
_CHAT = GENERATION | {
    *("messages", "input_ids", "max_completion_tokens", "reasoning_effort"),
    *("add_generation_prompt", "continue_final_message", "chat_template_kwargs"),
}


def add_chat(app: WorkerApp, served: ServedEngine, source: str) -> None:
    """Adds the paths of chats, models and tokens to `app`.

    source: the folder of the model's tokenizer and chat template; "": there is none, and chats come
    as token ids. Raises TokenizerUnavailable.
    """
    chats = _Chats(served, load(source) if source else None)
    app.add("POST", "/v1/chat/completions", chats.complete)
    app.add("POST", "/tokenize", chats.tokenize)
    app.add("POST", "/detokenize", chats.detokenize)
    created = now_s()

    async def models(client: Exchange) -> None:
        cards = [
            {
                "id": name,
                "object": "model",
                "created": created,
                "owned_by": "kvroute",
                "root": source or served.names[0],
                "parent": None,
                "max_model_len": served.engine.max_context_tokens,
            }
            for name in served.names
        ]
        await client.answer({"object": "list", "data": cards})

    app.add("GET", "/v1/models", models)


class _Chats:
    """The paths of chats. renderer: None: prompts come as token ids."""

    def __init__(self, served: ServedEngine, renderer: Renderer | None) -> None:
        self._served = served
        self._renderer = renderer

    async def complete(self, client: Exchange) -> None:
        fields = await self._fields(client)
        named = client.raw_headers.get(b"x-request-id")
        if named is not None:
            fields.setdefault("request_id", named.decode("latin-1"))
        check_members(fields, _CHAT)
        limit = count(fields, "max_completion_tokens")
        asked = generated(fields if limit is None else fields | {"max_tokens": limit})
        prompt = _given_ids(fields)
        if prompt is None:
            prompt = await self._rendered(fields)
        if not prompt:
            raise InvalidRequest("messages", "is empty")
        if asked.travels.held_only:
            await hand_on(client, self._served, [prompt], asked)
            return
        request_id = asked.request_id or new_id()
        try:
            writers = written(
                self._served,
                [prompt],
                asked,
                request_id,
                limit=asked.max_tokens or DEFAULT_MAX_TOKENS,
                natural=NATURAL_TOKENS if self._served.invents and not asked.ignore_eos else None,
            )
        except PromptTooLargeError as error:
            error.field = {"prompt": "messages"}.get(error.field, error.field)
            raise
        answer = AnswerChoices(writers, ChatForm(request_id, fields), per_prompt=asked.choices)
        await respond(client, answer, streams=asked.stream)

    async def tokenize(self, client: Exchange) -> None:
        fields = await self._fields(client)
        if "messages" in fields:
            ids = np.frombuffer(await self._rendered(fields), "<u4").tolist()
        else:
            text = fields.get("prompt")
            if not isinstance(text, str):
                raise InvalidRequest("prompt", f"needs text, got {shown(text)}")
            ids = (await encoded(self._tokenizer("prompt"), text)).tolist()
        limit = self._served.engine.max_context_tokens
        await client.answer({"count": len(ids), "max_model_len": limit, "tokens": ids})

    async def detokenize(self, client: Exchange) -> None:
        fields = await self._fields(client)
        ids, tokenizer = fields.get("tokens"), self._tokenizer("tokens")
        if isinstance(ids, list) and not ids:
            await client.answer({"prompt": ""})
            return
        most = self._served.engine.max_context_tokens
        if not isinstance(ids, np.ndarray) or ids.max() >= 1 << 32:
            raise InvalidRequest("tokens", f"needs token ids, got {shown(ids)}")
        if len(ids) > most:
            raise InvalidRequest("tokens", f"has {len(ids)} token ids, over {most}")
        await client.answer({"prompt": await decoded(tokenizer, ids.tolist())})

    def _tokenizer(self, field: str) -> Tokenizer:
        """Raises InvalidRequest."""
        if self._served.tokenizer is None:
            raise InvalidRequest(field, "this worker has no tokenizer")
        return self._served.tokenizer

    async def _fields(self, client: Exchange) -> dict[str, Any]:
        """Raises InvalidRequest."""
        names = self._served.names
        raw = await client.read(MAX_BODY_BYTES)
        fields = dict((await JsonBody.read(raw)).fields)
        if fields.get("model") is None:
            fields["model"] = names[0]
        if fields["model"] not in names:
            raise InvalidRequest(
                "model", f"must be one of {', '.join(names)}, got {shown(fields['model'])}"
            )
        return fields

    async def _rendered(self, fields: Mapping[str, Any]) -> bytes:
        """Returns a chat's prompt, little-endian u32. Raises InvalidRequest, Overloaded."""
        if self._renderer is None:
            raise InvalidRequest("messages", "are text, but this worker has no tokenizer")
        chat = {name: value for name, value in fields.items() if name not in GENERATION}
        try:
            most = self._served.engine.max_context_tokens
            return token_bytes(await self._renderer.of_chat(chat, most))
        except Unrenderable as error:
            raise InvalidRequest("messages", error.cause) from None
        except TooManyTokens as error:
            raise InvalidRequest("messages", f"are {error}; {most} are allowed") from None


def _given_ids(fields: Mapping[str, Any]) -> bytes | None:
    """Returns the prompt's ids, if a router has given them."""
    params = fields.get(PARAMS)
    given = params.get("prompt_token_ids") if isinstance(params, dict) else None
    if given is None:
        given = fields.get("input_ids")
    return token_bytes(given) if isinstance(given, list | np.ndarray) else None
