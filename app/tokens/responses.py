"""Conversion of requests of OpenAI's Responses API to the chats that engines make of them.

The rules are those of vLLM 0.32 (entrypoints/openai/responses/utils.py). What it treats in other
ways than these is not converted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from app.core.errors import shown
from app.tokens.errors import Unrenderable
from app.tokens.messages import text_of
from app.tokens.templates import Message

_MESSAGE = frozenset({"type", "role", "content", "id", "status", "phase"})
_INPUT = "input"
_CUSTOM_TOOL_SCHEMA = {
    "type": "object",
    "properties": {
        _INPUT: {"type": "string", "description": "The freeform text payload for this tool."}
    },
    "required": [_INPUT],
    "additionalProperties": False,
}


def chat_of_response(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the body of the chat request. Raises Unrenderable."""
    if body.get("truncation", "disabled") != "disabled":
        raise Unrenderable("truncation", "truncation is given")
    if body.get("previous_input_messages") is not None or body.get("prompt") is not None:
        raise Unrenderable("message", "previous_input_messages or prompt is given")
    reasoning = body.get("reasoning")
    if reasoning is not None and not isinstance(reasoning, dict):
        raise Unrenderable("refused", f"reasoning is {shown(reasoning)}")
    instructions = body.get("instructions")
    messages: list[Message] = []
    if instructions:
        messages.append({"role": "system", "content": text_of(instructions)})
    _add_input(messages, body.get("input"))
    chat: dict[str, Any] = {"messages": messages}
    tools = _tools(body.get("tools"))
    for name, value in (
        ("tools", tools),
        ("tool_choice", body.get("tool_choice", "auto") if tools is not None else None),
        ("chat_template_kwargs", body.get("chat_template_kwargs")),
        ("reasoning_effort", (reasoning or {}).get("effort")),
    ):
        if value is not None:
            chat[name] = value
    return chat


def _add_input(messages: list[Message], given: Any) -> None:
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
        return
    if not isinstance(given, list) or not all(isinstance(item, dict) for item in given):
        raise Unrenderable("message", f"input is {shown(given)}")
    first = len(messages)
    for item in given:
        # Answers, thoughts and calls in a row are one message, but not with the instructions.
        before = messages[-1] if len(messages) > first else {}
        made = _message(item)
        if made["role"] == "assistant" == before.get("role") and _merged(before, made):
            continue
        messages.append(made)


def _merged(before: Message, made: Message) -> bool:
    """Whether `before` could take in `made`, and did."""
    if "tool_calls" in made:
        before.setdefault("tool_calls", []).extend(made["tool_calls"])
        return True
    name = "reasoning" if "reasoning" in made else "content"
    if name in before:
        return False
    before[name] = made[name]
    return True


def _message(item: dict[str, Any]) -> Message:
    if item.get("status") not in (None, "completed"):
        raise Unrenderable("message", "an item is to be continued")
    match item.get("type", "message"):
        case "message":
            return _said(item)
        case "reasoning":
            return {"role": "assistant", "reasoning": _thought(item)}
        case "function_call" | "custom_tool_call":
            return {"role": "assistant", "tool_calls": [_call(item)]}
        case "function_call_output" | "custom_tool_call_output":
            output = {"role": "tool", "content": _content(item.get("output"))}
            return output | {"tool_call_id": text_of(item.get("call_id"))}
    raise Unrenderable("message", f"an item of type {shown(item.get('type'))}")


def _said(item: dict[str, Any]) -> Message:
    role, content = item.get("role"), item.get("content")
    if item.keys() - _MESSAGE:
        raise Unrenderable("message", f"a message of another form: {shown(item)}")
    if role == "assistant":
        parts = content if isinstance(content, list) else [{"type": "output_text", "text": content}]
        if not parts:
            raise Unrenderable("message", "an answer of no part")
        return {"role": role, "content": _part(parts[0], "output_text")}
    if role not in ("user", "system", "developer"):
        raise Unrenderable("message", f"a message of {shown(role)}")
    return {"role": role, "content": _content(content)}


def _content(content: Any) -> str | list[dict[str, str]]:
    if isinstance(content, list):
        texts = [_part(part, "input_text") for part in content]
        return [{"type": "text", "text": text} for text in texts]
    return text_of(content)


def _part(part: Any, kind: str) -> str:
    if not isinstance(part, dict) or part.get("type") != kind:
        raise Unrenderable("media", f"a part {shown(part)}")
    return text_of(part.get("text"))


def _thought(item: dict[str, Any]) -> str:
    parts = item.get("content") or item.get("summary") or []
    if item.get("encrypted_content") or not isinstance(parts, list):
        raise Unrenderable("message", "reasoning that nobody here can read")
    if not parts:
        return ""
    if not isinstance(parts[0], dict):
        raise Unrenderable("message", f"reasoning of {shown(parts[0])}")
    return text_of(parts[0].get("text"))


def _call(item: dict[str, Any]) -> dict[str, Any]:
    name = text_of(item.get("name"))
    if item["type"] == "custom_tool_call":
        given = text_of(item.get("input") or "")
        arguments = json.dumps({_INPUT: given}, ensure_ascii=False)
    else:
        arguments = text_of(item.get("arguments"))
        if item.get("namespace"):
            name = _flat(text_of(item["namespace"]), name)
    function = {"name": name, "arguments": arguments}
    return {"id": text_of(item.get("call_id")), "function": function, "type": "function"}


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    if not tools:
        return None
    if not isinstance(tools, list):
        raise Unrenderable("tools", shown(tools))
    return [made for tool in tools for made in _shown_as(tool)]


def _flat(namespace: str, name: str) -> str:
    return f"{namespace}__{name}"


def _shown_as(tool: Any) -> Iterator[dict[str, Any]]:
    """Yields the functions that a tool is shown to the model as: none, if it is not one to call."""
    match _kind(tool):
        case "function":
            function = {name: value for name, value in tool.items() if name != "type"}
        case "custom" if tool.get("format") is None or _kind(tool["format"]) == "text":
            function = {name: tool.get(name) for name in ("name", "description")}
            function["parameters"] = _CUSTOM_TOOL_SCHEMA
        case "namespace" if isinstance(tool.get("tools"), list):
            for inner in tool["tools"]:
                for made in _shown_as(inner) if _kind(inner) == "function" else ():
                    name = _flat(text_of(tool.get("name")), text_of(made["function"].get("name")))
                    made["function"]["name"] = name
                    yield made
            return
        case str(other) if other != "custom":
            return
        case _:
            raise Unrenderable("tools", shown(tool))
    yield {"type": "function", "function": function}


def _kind(value: Any) -> object:
    return value.get("type") if isinstance(value, dict) else None
