"""A request of Anthropic's Messages API, as the chat that the engine makes of it.

The rules are those of vLLM 0.32 (entrypoints/anthropic/serving.py). What it treats in other ways
than these, or by the template's habits, is not converted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from app.core.errors import shown
from app.door.tokens.errors import Unrenderable
from app.door.tokens.messages import BILLING, check_numbers, text_of
from app.door.tokens.templates import Message

_TOOL_CHOICES = {"auto": "auto", "none": "none", "any": "required"}


def chat_of_messages(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of the chat request. Raises Unrenderable."""
    thinking = body.get("thinking")
    if thinking is not None and _kind(thinking) not in ("enabled", "adaptive"):
        raise Unrenderable("reasoning_effort", f"thinking is {shown(thinking)}")
    messages = [*_system(body.get("system")), *_messages(body.get("messages"))]
    chat: dict[str, Any] = {"messages": messages}
    tools = _tools(body.get("tools"))
    choice = _tool_choice(body.get("tool_choice")) or ("auto" if tools else None)
    output = body.get("output_config")
    if output is not None and not isinstance(output, dict):
        raise Unrenderable("refused", f"output_config is {shown(output)}")
    for name, value in (
        ("tools", tools),
        ("tool_choice", choice),
        ("chat_template_kwargs", body.get("chat_template_kwargs")),
        ("reasoning_effort", (output or {}).get("effort")),
        ("response_format", (output or {}).get("format")),
    ):
        if value is not None:
            chat[name] = value
    return chat


def _kind(value: Any) -> object:
    return value.get("type") if isinstance(value, dict) else None


def _listed(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise Unrenderable("message", f"{shown(value)} is not a list of objects")
    return value


def _system(system: Any) -> Iterator[Message]:
    if not system:
        return
    if isinstance(system, str):
        text = system
    else:
        texts = [_text(block, "text") for block in _listed(system)]
        text = "".join(text for text in texts if not text.startswith(BILLING))
    if text or isinstance(system, str):
        yield {"role": "system", "content": text}


def _text(block: dict[str, Any], kind: str) -> str:
    """What a block of that type says; "": nothing."""
    if _kind(block) != kind:
        raise Unrenderable("media", f"a block of type {shown(_kind(block))}")
    return text_of(block.get(kind) or "")


def _messages(messages: Any) -> Iterator[Message]:
    for message in _listed(messages):
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant"):
            raise Unrenderable("message", f"a message of {shown(role)}")
        if isinstance(content, str):
            yield {"role": role, "content": content}
        elif role == "user":
            yield from _from_user(_listed(content))
        else:
            yield _from_assistant(_listed(content))


def _from_user(blocks: list[dict[str, Any]]) -> Iterator[Message]:
    texts = []
    for block in blocks:
        if _kind(block) == "tool_result":
            yield _tool_result(block)
        else:
            texts.append(_text(block, "text"))
    yield from _with_texts({"role": "user"}, texts)


def _from_assistant(blocks: list[dict[str, Any]]) -> Message:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        match _kind(block):
            case "thinking":
                thoughts.append(_text(block, "thinking"))
            case "redacted_thinking":
                pass  # nobody but who wrote it can read it
            case "tool_use":
                calls.append(_tool_call(block))
            case _:
                texts.append(_text(block, "text"))
    made: Message = {"role": "assistant"}
    if thoughts:
        made["reasoning"] = "".join(thoughts)
    if calls:
        made["tool_calls"] = calls
    return next(_with_texts(made, texts), made)


def _with_texts(message: Message, texts: list[str]) -> Iterator[Message]:
    """Nothing if there is no text."""
    texts = [text for text in texts if text]
    if len(texts) == 1:
        yield message | {"content": texts[0]}
    elif texts:
        yield message | {"content": [{"type": "text", "text": text} for text in texts]}


def _tool_call(block: dict[str, Any]) -> dict[str, Any]:
    given = block.get("input") or {}
    if not isinstance(given, dict) or not block.get("id"):
        raise Unrenderable("message", f"a tool_use of another form: {shown(block)}")
    check_numbers(given)
    function = {"name": text_of(block.get("name") or ""), "arguments": json.dumps(given)}
    return {"id": text_of(block["id"]), "type": "function", "function": function}


def _tool_result(block: dict[str, Any]) -> Message:
    content = block.get("content") or ""
    if not isinstance(content, str):
        content = "\n".join(_text(part, "text") for part in _listed(content))
    call = text_of(block.get("tool_use_id") or "")
    return {"role": "tool", "tool_call_id": call, "content": content}


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    made = []
    for tool in _listed(tools):
        schema = tool.get("input_schema")
        if not isinstance(schema, dict) or tool.get("defer_loading") is not None:
            raise Unrenderable("tools", shown(tool))
        function = {name: tool.get(name) for name in ("name", "description", "strict")}
        function["parameters"] = schema if "type" in schema else schema | {"type": "object"}
        made.append({"type": "function", "function": function})
    if not made:
        raise Unrenderable("tools", "not a list of at least one")
    return made


def _tool_choice(choice: Any) -> object:
    if choice is None:
        return None
    if not isinstance(choice, dict):
        raise Unrenderable("tool_choice", shown(choice))
    named = {"type": "function", "function": {"name": choice.get("name")}}
    return named if choice.get("type") == "tool" else _TOOL_CHOICES.get(str(choice.get("type")))
