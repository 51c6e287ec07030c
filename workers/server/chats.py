"""Every kind of chat as one of OpenAI's: the one form in which our engines take them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from xxhash import xxh3_64_hexdigest

from app.core.errors import InvalidRequest, shown
from app.http.json_body import dumps
from app.tokens import MAX_MESSAGES, Habits, Unrenderable, chat_of_messages, chat_of_response
from workers.server.members import GENERATION, check_members, count, stops_in
from workers.server.transfer import PARAMS

_ROUTERS = frozenset({PARAMS, "input_ids"})
"""By which a router gives the ids of the prompt."""
_RENDERED = frozenset({"messages", "tools", "tool_choice", "parallel_tool_calls"})
_CHAT = (
    GENERATION
    | _ROUTERS
    | _RENDERED
    | {
        *("max_completion_tokens", "response_format", "add_generation_prompt"),
        *("continue_final_message", "chat_template_kwargs", "reasoning_effort"),
    }
)
_MESSAGES = frozenset(
    (
        *("model", "stream", "max_tokens", "stop_sequences", "temperature", "top_p", "top_k"),
        *("system", "messages", "tools", "tool_choice", "output_config", "thinking"),
        *("context_management", "safeguards", "chat_template_kwargs", "request_id", "cache_salt"),
        *_ROUTERS,
    )
)
_RESPONSE = frozenset(
    (
        *("model", "stream", "stream_options", "max_output_tokens", "temperature", "top_p"),
        *("input", "instructions", "tools", "tool_choice", "parallel_tool_calls", "text"),
        *("include", "reasoning", "client_metadata", "chat_template_kwargs", "request_id"),
        *("ignore_eos", "cache_salt", *_ROUTERS),
    )
)
_GIVEN = (
    *("model", "stream", "temperature", "top_p", "top_k", "request_id", "ignore_eos"),
    "cache_salt",
)
MAX_ITEMS = {"messages": MAX_MESSAGES, "input": 2 * MAX_MESSAGES}
"""Several items of a response may be one message."""
MAX_DEPTH = 2
"""Of images: in the results of tools, which are in messages."""
_IMAGES = ("image", "image_url", "input_image")


def check_numbers_of_messages(fields: Mapping[str, Any]) -> None:
    """Raises InvalidRequest for more than are ever rendered, before one is looked at."""
    for name, most in MAX_ITEMS.items():
        given = fields.get(name)
        if isinstance(given, list) and len(given) > most:
            raise InvalidRequest(name, f"has {len(given)} items, over {most}")


def chat_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A chat. Raises InvalidRequest."""
    check_members(fields, _CHAT)
    if fields.get("tools") == []:
        raise InvalidRequest("tools", "needs at least one, or to be left out")
    limit = count(fields, "max_completion_tokens")
    return {**fields} if limit is None else {**fields, "max_tokens": limit}


def chat_of_message(fields: Mapping[str, Any], habits: Habits | None) -> dict[str, Any]:
    """What a request of the Messages API asks, as a chat. habits: None: there is no template.
    Raises InvalidRequest."""
    check_members(fields, _MESSAGES)
    chat = _converted(partial(chat_of_messages, habits=habits), fields, "messages")
    form = chat.pop("response_format", None)
    if isinstance(form, dict) and form.get("type") == "json_schema":
        chat["response_format"] = {"type": "json_schema", "json_schema": form}
    return (
        _given(fields)
        | chat
        | {
            "max_tokens": fields.get("max_tokens"),
            "stop": [*stops_in(fields, "stop_sequences")],
        }
    )


def chat_of_input(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What a request of the Responses API asks, as a chat. Raises InvalidRequest."""
    check_members(fields, _RESPONSE)
    asked = {name: value for name, value in fields.items() if value is not None}
    asked["input"] = _items(fields.get("input"))
    chat = _converted(chat_of_response, asked, "input")
    choice = chat.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "function":
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    text = fields.get("text")
    form = text.get("format") if isinstance(text, dict) else text
    if isinstance(form, dict) and form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": form}
    return (
        _given(fields)
        | chat
        | {
            "max_tokens": count(fields, "max_output_tokens"),
            "response_format": form,
        }
    )


def with_opaque_images(items: Any, text: str, depth: int = 0) -> Any:
    """`items`, messages or content, with a text in place of each image, that differs between
    different ones. text: the type of parts that are text."""
    if not isinstance(items, list) or depth > MAX_DEPTH:
        return items
    return [_opaque(item, text, depth) if isinstance(item, dict) else item for item in items]


def _opaque(item: dict[str, Any], text: str, depth: int) -> dict[str, Any]:
    if item.get("type") in _IMAGES:
        return {"type": text, "text": f"[image {xxh3_64_hexdigest(dumps(item))}]"}
    inner = {name: item[name] for name in ("content", "output") if name in item}
    return item | {n: with_opaque_images(value, text, depth + 1) for n, value in inner.items()}


def renderable(chat: Mapping[str, Any]) -> dict[str, Any]:
    """What of a chat its prompt depends on."""
    kept = {name: value for name, value in chat.items() if name not in _NOT_RENDERED}
    choice = chat.get("tool_choice")
    if chat.get("tools"):
        kept["tool_choice"] = choice if choice == "none" else "auto"
    return kept


_NOT_RENDERED = GENERATION | {"response_format", "tool_choice"}


def _items(given: Any) -> Any:
    """The input of a response, without what labels it."""
    if not isinstance(given, list):
        return given
    made = []
    for item in given:
        if not isinstance(item, dict):
            raise InvalidRequest("input", f"needs objects, got {shown(item)}")
        if item.get("type") == "item_reference":
            raise InvalidRequest("input", "refers to what would have to be stored here")
        content = item.get("content")
        if item.get("role") == "assistant" and isinstance(content, list):
            texts = [str(part.get("text") or part.get("refusal") or "") for part in _dicts(content)]
            item["content"] = "".join(texts)
        made.append(item)
    return made


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: fields[name] for name in _GIVEN if name in fields}


def _converted(
    convert: Callable[[Mapping[str, Any]], dict[str, Any]], asked: Mapping[str, Any], field: str
) -> dict[str, Any]:
    """Raises InvalidRequest."""
    try:
        return convert(asked)
    except Unrenderable as error:
        raise InvalidRequest(field, error.cause) from None
