"""Prompts, as engines make them of bodies: rendered and tokenized here, or asked of an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from app.core.chains import trail_of
from app.core.errors import InvalidRequest, shown
from app.door.answer_request import PROMPTS, Api, ids_field
from app.door.errors import NotTokenized
from app.door.model import Model
from app.http.json_body import Fields, dumps
from app.tokens import Renderer, Unrenderable, chat_of_messages, chat_of_response, variables_of
from app.tokens.encoder import Ids

MAX_ASKED_BYTES = 256 * 1024
"""Bytes of a prompt whose ids an engine is asked for: it tokenizes where it answers everybody."""
MAX_CONVERTED_BYTES = 64 * 1024
"""Bytes of a body that becomes one of a chat within a few ms; a thread makes larger ones."""
LEFT_TO_THE_ENGINE = ("media", "size")
"""Why a prompt is not even worth asking for."""
_RENDERED = (
    "messages",
    "tools",
    "tool_choice",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template_kwargs",
    "documents",
)
"""Members of a chat request that its rendering depends on."""
_NO_MEDIA = ("text", "tool_reference", None)


MEDIA = (b"image", b"audio", b"video", b"file")
"""One of these is in the JSON of what is no text, whatever API it is of."""
_CONVERSING = (Api.CHAT, Api.COMPLETIONS, Api.MESSAGES, Api.RESPONSES)
TEXTS: Mapping[Api, tuple[str, ...]] = {
    Api.CHAT: ("messages", "tools"),
    Api.COMPLETIONS: ("prompt",),
    Api.EMBEDDINGS: ("input", "messages"),
    Api.MESSAGES: ("system", "messages", "tools"),
    Api.RERANK: ("query", "documents"),
    Api.RESPONSES: ("instructions", "input", "tools"),
    Api.SCORE: ("text_1", "text_2"),
}
"""Members of a body of which engines make the prompt."""


async def render(
    api: Api, model: Model, renderer: Renderer, fields: Mapping[str, Any], holder: str = ""
) -> Ids:
    """Raises TooManyTokens if they do not leave room for an answer; Unrenderable; Overloaded."""
    most = max(0, model.max_tokens - 1)
    if api is Api.COMPLETIONS:
        text = _one_text(fields.get("prompt"))
        return await renderer.of_text(text, _adds_special(fields), most, holder=holder)
    if api is Api.RESPONSES:
        return await renderer.of_response(fields, most, holder=holder)
    _check_alike(api, model, fields)
    if _has_media(fields.get("messages")):  # however large, nothing of it is rendered here
        raise Unrenderable("media", "a part that is no text")
    return await renderer.of_chat(fields, most, holder=holder)


def question(api: Api, model: Model, fields: Mapping[str, Any]) -> bytes:
    """Returns the body of POST /tokenize that asks for a prompt's ids. Raises NotTokenized."""
    if api is not Api.COMPLETIONS:
        asked = {name: fields[name] for name in _RENDERED if fields.get(name) is not None}
        if fields.get("reasoning_effort") is not None:  # which this path of vLLM's ignores
            try:
                asked["chat_template_kwargs"] = variables_of(fields)
            except Unrenderable as error:
                raise NotTokenized(error.reason) from None
        if _has_media(fields.get("messages")):
            raise NotTokenized("media")
        if api is Api.RESPONSES:
            if any("tool_calls" in message for message in fields["messages"]):
                raise NotTokenized("message")  # written in another way in chats
            asked["add_special_tokens"] = True
    else:
        asked = {"prompt": _one_text(fields.get("prompt"))}
        if "add_special_tokens" in fields:
            asked["add_special_tokens"] = fields["add_special_tokens"]
    asked["model"] = model.name
    body = dumps(asked)
    if len(body) > MAX_ASKED_BYTES:
        raise NotTokenized("size")
    return body


async def converted(
    api: Api, model: Model, fields: Fields, renderer: Renderer | None, holder: str
) -> Mapping[str, Any]:
    """Returns the body as that of a chat, unless it is of a completion; only where ids go along, as
    engines do not all convert alike. Raises NotTokenized, Overloaded."""
    if api in (Api.CHAT, Api.COMPLETIONS):
        return fields
    is_chat = api in (Api.MESSAGES, Api.RESPONSES)
    if not is_chat or not all(ids_field(api, worker.engine) for worker in model.workers):
        raise NotTokenized(api)
    convert: Callable[[], dict[str, Any]] = partial(chat_of_response, fields)
    if api is Api.MESSAGES:
        convert = partial(chat_of_messages, fields, None if renderer is None else renderer.habits)
    length = sum(fields.size(name) for name in TEXTS[api])
    try:
        if renderer is None and length > MAX_ASKED_BYTES:
            raise NotTokenized("size")
        if renderer is None or length <= MAX_CONVERTED_BYTES:
            return convert()
        return await renderer.apart(length, convert, holder=holder)
    except Unrenderable as error:
        raise NotTokenized(error.reason) from None


def _check_alike(api: Api, model: Model, fields: Mapping[str, Any]) -> None:
    """Raises Unrenderable where not all workers make of a chat what vLLM does."""
    if api is Api.CHAT and fields.get("tools") == []:
        raise Unrenderable("tools", "not a list of at least one")  # refused, or taken for none
    if not any(worker.engine.startswith("sglang") for worker in model.workers):
        return
    if fields.get("reasoning_effort") is not None:
        raise Unrenderable("reasoning_effort", "SGLang has its own rules for it")
    if fields.get("response_format") not in (None, {"type": "text"}):
        raise Unrenderable("response_format", "SGLang has its own rules for it")


def trail(api: Api, model: Model, fields: Fields) -> list[str]:
    """Returns the names of the prefixes of a prompt's text: what a conversation adds to with each
    turn is last."""
    if api not in _CONVERSING:
        return []
    first = [name for name in TEXTS[api] if name != PROMPTS[api]]
    text = b"".join([fields.raw(name) for name in (*first, PROMPTS[api])])
    return trail_of(text, f"{model.name} {fields.get('cache_salt') or ''}")


def _one_text(prompt: object) -> str:
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if isinstance(prompt, list):
        raise NotTokenized("batch")
    if not isinstance(prompt, str):
        raise InvalidRequest("prompt", f"must be text or token ids, got {shown(prompt)}")
    return prompt


def _adds_special(fields: Mapping[str, Any]) -> bool:
    return fields.get("add_special_tokens") is not False


def _has_media(messages: object) -> bool:
    if not isinstance(messages, list):
        return False
    contents = [m.get("content") for m in messages if isinstance(m, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, dict) and part.get("type") not in _NO_MEDIA for part in parts)
