"""Conversion of chat requests to what the engine gives to the model's template.

The rules are those of vLLM 0.32: of its request models (entrypoints/openai/chat_completion) and of
`parse_chat_messages` (renderers/chat_utils.py). What they treat in other ways than these, or may in
another version, is left to the engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from app.core.errors import shown
from app.tokens.content_format import ContentFormat
from app.tokens.errors import Reason, Unrenderable
from app.tokens.templates import Message

MAX_MESSAGES = 10_000
"""Messages of a chat: some templates look at all messages for each."""

MAX_ARGUMENT_VALUES = 100_000
"""Values in one call of a tool: nothing else runs while they are read."""
CHARACTERS_A_TOOL = 2_000
"""Characters that a tool counts for: templates take longer for tools than for texts."""
CHARACTERS_AT_MOST = 1 << 20
"""Characters assumed for what cannot be counted."""

_LEFT_TO_THE_ENGINE: dict[str, Reason] = {
    "chat_template": "template",
    "documents": "documents",
    "functions": "tools",
    "function_call": "tool_choice",
    "truncate_prompt_tokens": "truncation",
    "media_io_kwargs": "media",
    "mm_processor_kwargs": "media",
    "audio": "media",
    "add_special_tokens": "special_tokens",
    "echo": "echo",
}
"""Members of a request that change how it is rendered, unless null, false or an empty object."""
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
MEMBERS = frozenset(
    {
        *("messages", "tools", "tool_choice", "chat_template_kwargs", "reasoning_effort"),
        *("add_generation_prompt", "continue_final_message", *_LEFT_TO_THE_ENGINE),
    }
)
"""Members of a request that its rendering depends on."""
_OVERRULED = frozenset({"add_generation_prompt", "continue_final_message", "reasoning_effort"})
"""Variables of templates that other members of a request say."""
_TOKENIZER_ARGUMENTS = frozenset(
    {
        *("chat_template", "conversation", "documents", "messages", "tokenize", "tools"),
        *("max_length", "padding", "return_assistant_tokens_mask", "return_dict"),
        *("return_tensors", "tokenizer_kwargs", "truncation"),
    }
)
"""Names that are no variables of templates, but arguments of what renders them."""
_KNOWN = frozenset({"role", "content", "name", "tool_calls", "tool_call_id"})
_REASONING = ("reasoning", "reasoning_content")
_IGNORED = frozenset({"annotations", "audio", "function_call", "refusal", "tools", "task"})
"""Members of messages that clients send back as they got them, empty."""
BILLING = "x-anthropic-billing-header"
"""Beginning of a line that vLLM drops from system messages, as it differs in every request."""
_LARGE_FLOAT = re.compile(rb"[0-9]e\+?[0-9]")


@dataclass(slots=True)
class Chat:
    """Input of a template. messages: in the content format asked for. variables: all further
    ones."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    variables: dict[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool


def size(body: Mapping[str, Any]) -> int:
    """Returns about how many characters there are to render: of all texts in any body, however
    malformed."""
    tools = body.get("tools")
    total = CHARACTERS_A_TOOL * len(tools) if isinstance(tools, list) else 0
    given = [body.get(name) for name in ("messages", "tools", "chat_template_kwargs")]
    try:
        return total + len(orjson.dumps(given))
    except TypeError:  # nested so deeply that it will be refused, but who knows after how long
        return total + CHARACTERS_AT_MOST


def tools_of(body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Returns the tools as the engine passes them on: known members only, in the order of its
    models."""
    tools = body.get("tools")
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise Unrenderable("tool_choice", shown(choice))
    if tools is None:
        if choice == "auto":
            raise Unrenderable("tool_choice", "auto, without tools")
        return None
    if not isinstance(tools, list):
        raise Unrenderable("tools", shown(tools))
    check_numbers(tools)
    return [_tool(tool) for tool in tools]


def check_numbers(given: Any) -> None:
    """Raises Unrenderable for integers beyond 64 bits, of which some parsers make floats."""
    try:
        text = orjson.dumps(given)
    except TypeError as error:  # what can be read can be written, but for its depth
        raise Unrenderable("tools", str(error)) from None
    if _LARGE_FLOAT.search(text):
        pending = [given]
        while pending:
            value = pending.pop()
            if isinstance(value, float) and abs(value) >= 1e15:
                raise Unrenderable("tools", f"{value} may have been an integer")
            if isinstance(value, dict):
                pending += value.values()
            elif isinstance(value, list):
                pending += value


def _tool(tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if (
        not isinstance(function, dict)
        or tool.get("type", "function") != "function"
        or not isinstance(function.get("name"), str)
        or not isinstance(function.get("description"), str | None)
        or not isinstance(function.get("parameters"), dict | None)
        or not isinstance(function.get("strict"), bool | None)
        or not isinstance(function.get("defer_loading"), bool | None)
        or not isinstance(tool.get("defer_loading"), bool | None)
    ):
        raise Unrenderable("tools", shown(tool))
    made = {name: function.get(name) for name in ("name", "description", "parameters")}
    if function.get("strict") is not None:
        made["strict"] = function["strict"]
    deferred, of_function = tool.get("defer_loading"), function.get("defer_loading")
    if of_function is not None or deferred is not None:
        made["defer_loading"] = deferred if of_function is None else of_function
    more = {} if deferred is None else {"defer_loading": deferred}
    return {"type": "function", "function": made, **more}


def chat_of(body: Mapping[str, Any], content: ContentFormat, *, takes_developers: bool) -> Chat:
    """Returns the chat in the body of a request, for a template of these habits. Raises
    Unrenderable."""
    for name, reason in _LEFT_TO_THE_ENGINE.items():
        value = body.get(name)
        if value is not None and value is not False and value != {}:
            raise Unrenderable(reason, f"{name} is given")
    tools = tools_of(body)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Unrenderable("message", "not a list of at least one")
    if len(messages) > MAX_MESSAGES:
        raise Unrenderable("size", f"{len(messages)} messages, over {MAX_MESSAGES}")
    parsed = [_message(message, content) for message in messages]
    if not takes_developers and any(message["role"] == "developer" for message in parsed):
        parsed = _with_one_system_message(parsed)
    prompted = _flag(body, "add_generation_prompt", True)
    continued = _flag(body, "continue_final_message", False)
    if prompted and continued:
        raise Unrenderable("refused", "both add_generation_prompt and continue_final_message")
    return Chat(parsed, tools, variables_of(body), prompted, continued)


def variables_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the variables that a request gives the template: an effort asks for thoughts, unless
    it is none. Raises Unrenderable."""
    given = body.get("chat_template_kwargs")
    if given is None:
        given = {}
    if not isinstance(given, dict) or given.keys() & _TOKENIZER_ARGUMENTS:
        raise Unrenderable("template_kwargs", shown(given))
    check_numbers(given)
    variables = {name: value for name, value in given.items() if name not in _OVERRULED}
    effort = body.get("reasoning_effort")
    if effort is None:
        return variables | {n: v for n, v in given.items() if n == "reasoning_effort"}
    if effort not in EFFORTS:
        raise Unrenderable("reasoning_effort", shown(effort))
    return {"enable_thinking": effort != "none", **variables, "reasoning_effort": effort}


def _flag(body: Mapping[str, Any], name: str, default: bool) -> bool:
    value = body.get(name, default)
    if not isinstance(value, bool):
        raise Unrenderable("refused", f"{name} is {shown(value)}")
    return value


def _message(message: Any, content_format: ContentFormat) -> Message:
    if not isinstance(message, dict) or not isinstance(role := message.get("role"), str):
        raise Unrenderable("message", f"{shown(message)} has no role")
    for name in message.keys() - _KNOWN:
        is_ignored = name in _IGNORED and not message[name]
        if not is_ignored and not (role == "assistant" and name in _REASONING):
            raise Unrenderable("message", f"{shown(name)} of a message")
    made: Message = {"role": role, "content": _content(message, role, content_format)}
    if role == "assistant":
        if tool_calls := _tool_calls(message.get("tool_calls")):
            made["tool_calls"] = tool_calls
        thoughts = [message[name] for name in _REASONING if message.get(name) is not None]
        if thoughts:
            made["reasoning"] = made["reasoning_content"] = text_of(thoughts[0])
    elif message.get("tool_calls"):
        raise Unrenderable("message", f"tool_calls of {shown(role)}")
    if role == "tool" and "tool_call_id" in message:
        made["tool_call_id"] = text_of(message["tool_call_id"])
    if message.get("name") is not None:
        made["name"] = text_of(message["name"])
    if role == "developer":
        made["tools"] = None
    return made


def text_of(value: Any) -> str:
    """Returns `value`, which must be text. Raises Unrenderable."""
    if not isinstance(value, str):
        raise Unrenderable("message", f"{shown(value)} is not text")
    return value


def _content(message: Message, role: str, content_format: ContentFormat) -> object:
    content = message.get("content")
    if isinstance(content, str) and role != "system":
        is_text = content_format == "string" or role == "tool"
        return content if is_text else [{"type": "text", "text": content}]
    parts = _parts(message, role)
    texts = [part[_PARTS[part["type"]]] for part in parts]
    if content_format == "string":
        return "\n".join(filter(None, texts))
    is_text = all(part["type"] == "text" for part in parts)
    return "\n".join(texts) if role == "tool" and is_text else parts


_PARTS = {"text": "text", "tool_reference": "name"}
"""Types of the parts of content, and their only other member."""


def _parts(message: Message, role: str) -> list[dict[str, str]]:
    content = message.get("content")
    if content is None and role == "assistant":
        return []
    if isinstance(content, str):
        content = [content]
    if not isinstance(content, list):
        raise Unrenderable("message", f"content is {shown(content)}")
    parts = [_part(part) for part in content]
    return [kept for part in parts for kept in _unbilled(part)] if role == "system" else parts


def _unbilled(part: dict[str, str]) -> Iterator[dict[str, str]]:
    if not part.get("text", "").startswith(BILLING):
        yield part
    elif rest := part["text"].partition("\n")[2]:
        yield part | {"text": rest}


def _part(part: Any) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        raise Unrenderable("message", f"{shown(part)} in content")
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in _PARTS:
        raise Unrenderable("media", f"a part of type {shown(kind)}")
    if part.keys() != {"type", name := _PARTS[kind]}:
        raise Unrenderable("message", f"more than {name} in a part of type {kind}")
    return {"type": kind, name: text_of(part[name])}


def _tool_calls(calls: Any) -> list[dict[str, Any]]:
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise Unrenderable("message", f"tool_calls is {shown(calls)}")
    return [_tool_call(call) for call in calls]


def _tool_call(call: Any) -> dict[str, Any]:
    """Returns a call in the order of the engine's models, as templates may write all of it."""
    function = call.get("function") if isinstance(call, dict) else None
    if (
        not isinstance(function, dict)
        or call.get("type") != "function"
        or not all(isinstance(text, str) for text in (call.get("id"), function.get("name")))
        or not isinstance(function.get("arguments"), str)
    ):
        raise Unrenderable("message", f"a tool call of another form: {shown(call)}")
    made = {"arguments": _arguments(function["arguments"]), "name": function["name"]}
    first = {"id": call["id"], "function": _followed(made, function), "type": "function"}
    return _followed(first, call)


def _followed(first: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    return first | {name: others[name] for name in others if name not in first}


def _arguments(text: str) -> dict[str, Any]:
    # What of them is in strings counts too: to tell it apart takes as long as to read them.
    if sum(map(text.count, "[{,")) > MAX_ARGUMENT_VALUES:
        raise Unrenderable("size", f"arguments of a tool call: over {MAX_ARGUMENT_VALUES} values")
    try:
        parsed = json.loads(text) if text else {}
    except ValueError:
        parsed = {}  # as the engine does, lest the chat can never go on
    except RecursionError:
        raise Unrenderable("message", "arguments of a tool call are too deep") from None
    return parsed if isinstance(parsed, dict) else {}


def _with_one_system_message(messages: list[Message]) -> list[Message]:
    """Returns the messages with developers as systems, and all of those as one, at the start."""
    for message in messages:
        if message["role"] == "developer":
            message["role"] = "system"
            del message["tools"]
    systems = [message for message in messages if message["role"] == "system"]
    if systems == messages[:1]:
        return messages
    contents = [_joined(message["content"]) for message in systems]
    merged: Message = {"role": "system", "content": "\n\n".join(filter(None, contents))}
    return [merged, *(message for message in messages if message["role"] != "system")]


def _joined(content: str | list[dict[str, str]]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part[_PARTS[part["type"]]] for part in content)
