"""Chats, in the forms of three APIs, embeddings, models and tokens over HTTP, as vLLM's server has
them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from app.core.errors import InvalidRequest, shown
from app.core.hashing import token_bytes
from app.core.types import new_id
from app.http.client import Client
from app.http.json_body import JsonBody
from app.simulation.steps import PromptTooLargeError
from app.tokens import Overloaded, Renderer, TooManyTokens, Unrenderable, load
from workers.engines.base import QueueFullError, Tokenizer
from workers.server.answer import AnswerChoices, Form, now_s
from workers.server.chats import (
    chat_of,
    chat_of_input,
    chat_of_message,
    check_numbers_of_messages,
    renderable,
    with_opaque_images,
)
from workers.server.completions import ChatForm
from workers.server.embeddings import embedded
from workers.server.members import generated
from workers.server.messages import MessageForm
from workers.server.paths import WorkerApp, hand_on, ids_of, respond, texts_of
from workers.server.responses import ResponseForm
from workers.server.scripts import check_unscripted, script_of
from workers.server.texts import apart, decoded, encoded
from workers.server.transfer import PARAMS
from workers.server.writers import NATURAL_TOKENS, ServedEngine, written

MAX_BODY_BYTES = 32 * 1024 * 1024
"""What a router takes, and the ids that it adds."""
AT_ONCE_BYTES = 32 * 1024
DEFAULT_MAX_TOKENS = 128


def add_chat(app: WorkerApp, served: ServedEngine, source: str) -> None:
    """Add the paths of chats, embeddings, models and tokens to `app`.

    source: the folder of the model's tokenizer and chat template; "": there is none, and chats come
    as token ids. Raises TokenizerUnavailable.
    """
    chats = _Chats(served, load(source) if source else None)
    app.add("POST", "/v1/chat/completions", chats.complete)
    app.add("POST", "/v1/messages", chats.message)
    app.add("POST", "/v1/messages/count_tokens", chats.count)
    app.add("POST", "/v1/responses", chats.response)
    app.add("POST", "/tokenize", chats.tokenize)
    app.add("POST", "/detokenize", chats.detokenize)
    if served.invents:
        app.add("POST", "/v1/embeddings", chats.embed)
    created = now_s()

    async def models(client: Client) -> None:
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
    """renderer: None: prompts come as token ids."""

    def __init__(self, served: ServedEngine, renderer: Renderer | None) -> None:
        self._served = served
        self._renderer = renderer

    async def complete(self, client: Client) -> None:
        fields = await self._fields(client)
        await self._answer(client, fields, chat_of, ChatForm, {"prompt": "messages"})

    async def message(self, client: Client) -> None:
        fields = await self._fields(client)
        if fields.get("max_tokens") is None:
            raise InvalidRequest("max_tokens", "is missing")
        names = {"prompt": "messages"}
        await self._answer(client, fields, self._chat_of_message, MessageForm, names)

    async def response(self, client: Client) -> None:
        fields = await self._fields(client)
        names = {"prompt": "input", "max_tokens": "max_output_tokens"}
        await self._answer(client, fields, chat_of_input, ResponseForm, names)

    async def _answer(
        self,
        client: Client,
        fields: dict[str, Any],
        chat_of: Callable[[Mapping[str, Any]], dict[str, Any]],
        form_of: Callable[[str, Mapping[str, Any], str | None], Form],
        names: Mapping[str, str],
    ) -> None:
        """names: of members, where they are called otherwise than in completions."""
        named = client.raw_headers.get(b"x-request-id")
        if named is not None:
            fields.setdefault("request_id", named.decode("latin-1"))
        chat = await self._converted(client, fields, chat_of)
        asked = generated(chat)
        served = self._served
        script = script_of(chat) if served.invents else None
        if not served.invents:
            check_unscripted(chat)
        prompt = _given_ids(fields)
        if prompt is None:
            prompt = await self._rendered(chat)
        if not prompt:
            raise InvalidRequest(names["prompt"], "is empty")
        if asked.travels.held_only:
            await hand_on(client, served, [prompt], asked)
            return
        request_id = asked.request_id or new_id()
        form = form_of(request_id, fields, script.call if script else None)
        try:
            writers = written(
                served,
                [prompt],
                asked,
                request_id,
                limit=asked.max_tokens or DEFAULT_MAX_TOKENS,
                natural=NATURAL_TOKENS if served.invents and not asked.ignore_eos else None,
                script=script,
            )
        except PromptTooLargeError as error:
            error.field = names.get(error.field, error.field)
            raise
        answer = AnswerChoices(writers, form, per_prompt=asked.choices)
        await respond(client, answer, streams=asked.stream)

    async def embed(self, client: Client) -> None:
        fields = await self._fields(client)
        inputs = texts_of(fields, "input")
        prompts = [await ids_of(each, self._served, "input") for each in inputs]
        await client.answer(embedded(fields, prompts))

    async def count(self, client: Client) -> None:
        fields = await self._fields(client)
        chat = await self._converted(client, fields, self._chat_of_message)
        prompt = await self._rendered(chat)
        count = len(prompt) // 4
        await client.answer(
            {"input_tokens": count, "context_management": {"original_input_tokens": count}}
        )

    async def tokenize(self, client: Client) -> None:
        fields = await self._fields(client)
        if "messages" in fields:
            chat = await self._converted(client, fields, dict)
            ids = np.frombuffer(await self._rendered(chat), "<u4").tolist()
        else:
            text = fields.get("prompt")
            if not isinstance(text, str):
                raise InvalidRequest("prompt", f"needs text, got {shown(text)}")
            ids = (await encoded(self._tokenizer("prompt"), text, "prompt")).tolist()
        limit = self._served.engine.max_context_tokens
        await client.answer({"count": len(ids), "max_model_len": limit, "tokens": ids})

    async def detokenize(self, client: Client) -> None:
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

    async def _fields(self, client: Client) -> dict[str, Any]:
        """Raises InvalidRequest."""
        names = self._served.names
        raw = await client.read(MAX_BODY_BYTES)
        client.state.size = len(raw)
        fields = dict((await JsonBody.read(raw)).fields)
        if fields.get("model") is None:
            fields["model"] = names[0]
        if fields["model"] not in names:
            raise InvalidRequest(
                "model", f"must be one of {', '.join(names)}, got {shown(fields['model'])}"
            )
        tools = fields.get("tools")
        if isinstance(tools, list) and not tools:  # so clients say that there are none
            del fields["tools"]
        return fields

    async def _converted(
        self,
        client: Client,
        fields: dict[str, Any],
        chat_of: Callable[[Mapping[str, Any]], dict[str, Any]],
    ) -> dict[str, Any]:
        """As a chat. What of it is large keeps no other request waiting. Raises InvalidRequest,
        QueueFullError."""
        check_numbers_of_messages(fields)
        size = client.state.size
        if size <= AT_ONCE_BYTES:
            return chat_of(self._seen(fields))
        return await apart(size, lambda: chat_of(self._seen(fields)))

    def _seen(self, fields: dict[str, Any]) -> dict[str, Any]:
        """With images as this engine sees them."""
        if not self._served.invents:
            return fields
        seen = {"messages": "text", "input": "input_text"}
        return fields | {
            name: with_opaque_images(fields[name], text)
            for name, text in seen.items()
            if name in fields
        }

    def _chat_of_message(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        renderer = self._renderer
        return chat_of_message(fields, None if renderer is None else renderer.habits)

    async def _rendered(self, chat: Mapping[str, Any]) -> bytes:
        """A chat's prompt, little-endian u32. Raises InvalidRequest."""
        if self._renderer is None:
            raise InvalidRequest("messages", "are text, but this worker has no tokenizer")
        try:
            most = self._served.engine.max_context_tokens
            return token_bytes(await self._renderer.of_chat(renderable(chat), most))
        except Unrenderable as error:
            raise InvalidRequest("messages", error.cause) from None
        except TooManyTokens as error:
            raise InvalidRequest("messages", f"are {error}; {most} are allowed") from None
        except Overloaded as error:
            raise QueueFullError(str(error)) from None


def _given_ids(fields: Mapping[str, Any]) -> bytes | None:
    """A prompt as a router gives it."""
    params = fields.get(PARAMS)
    given = params.get("prompt_token_ids") if isinstance(params, dict) else None
    if given is None:
        given = fields.get("input_ids")
    return token_bytes(given) if isinstance(given, list | np.ndarray) else None
