"""Conversion of requests of Anthropic's Messages API to the chats that engines make of them.

The rules are those of vLLM 0.32 (entrypoints/anthropic/serving.py). What it treats in other ways
than these, or by the template's habits, is not converted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from app.core.errors import shown
from app.tokens.errors import Unrenderable
from app.tokens.messages import BILLING, check_numbers, text_of
from app.tokens.templates import Message

_CHANGES = ("tool_addition", "tool_removal")
_REFERENCE = "tool_reference"
"""Block about a tool that was deferred, and is found by a search of tools."""
_TOOL_CHOICES = {"auto": "auto", "none": "none", "any": "required"}


@dataclass(frozen=True, slots=True)
class Habits:
    """Ways in which an engine treats a request by its model's templates. merges_systems: whether
    messages of role `system` between others go to the beginning. effort_without_thoughts: the
    effort that `thinking` disabled stands for."""

    merges_systems: bool
    effort_without_thoughts: str


def chat_of_messages(body: Mapping[str, Any], habits: Habits | None) -> dict[str, Any]:
    """Returns the body of the chat request. habits: None: not known. Raises Unrenderable."""
    given = _listed(body.get("messages"))
    if habits is None and any(message.get("role") == "system" for message in given):
        raise Unrenderable("message", "a message of role system among others")
    merges = habits is not None and habits.merges_systems
    inline = [text for m in given if m.get("role") == "system" for text in _of_system(m)]
    messages = [*_system(body.get("system"), inline if merges else []), *_messages(given, merges)]
    chat: dict[str, Any] = {"messages": messages}
    tools = _tools(body.get("tools"), given)
    choice = _tool_choice(body.get("tool_choice")) or (None if tools is None else "auto")
    output = body.get("output_config")
    if output is not None and not isinstance(output, dict):
        raise Unrenderable("refused", f"output_config is {shown(output)}")
    for name, value in (
        ("tools", tools),
        ("tool_choice", choice),
        ("chat_template_kwargs", body.get("chat_template_kwargs")),
        ("reasoning_effort", _effort(body.get("thinking"), output or {}, habits)),
        ("response_format", (output or {}).get("format")),
    ):
        if value is not None:
            chat[name] = value
    return chat


def _effort(thinking: Any, output: dict[str, Any], habits: Habits | None) -> object:
    match None if thinking is None else _kind(thinking):
        case None if thinking is None:
            return output.get("effort")
        case "enabled" | "adaptive":
            return output.get("effort")
        case "disabled" if habits is not None:
            return habits.effort_without_thoughts
    raise Unrenderable("reasoning_effort", f"thinking is {shown(thinking)}")


def _kind(value: Any) -> object:
    return value.get("type") if isinstance(value, dict) else None


def _listed(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise Unrenderable("message", f"{shown(value)} is not a list of objects")
    return value


def _system(system: Any, inline: list[str]) -> Iterator[Message]:
    """Yields the system message, if any. inline: texts of later system messages, merged into it."""
    texts = []
    if isinstance(system, str) and system:
        texts = [system]
    elif system:
        texts = [_text(block, "text") for block in _listed(system)]
        texts = [text for text in texts if text and not text.startswith(BILLING)]
    if texts or inline:
        yield {"role": "system", "content": "".join((*texts, *inline))}


def _of_system(message: Message) -> Iterator[str]:
    content = message.get("content")
    if isinstance(content, str):
        texts = [content]
    else:
        blocks = [block for block in _listed(content) if _kind(block) not in _CHANGES]
        texts = [_text(block, "text") for block in blocks]
    if text := "".join(text for text in texts if not text.startswith(BILLING)):
        yield text


def _text(block: dict[str, Any], kind: str) -> str:
    if _kind(block) != kind:
        raise Unrenderable("media", f"a block of type {shown(_kind(block))}")
    return text_of(block.get(kind) or "")


def _messages(messages: list[Message], merges: bool) -> Iterator[Message]:
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if role == "system":
            texts = () if merges else _of_system(message)
            yield from ({"role": role, "content": text} for text in texts)
            continue
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
            yield from _tool_result(block)
        elif _kind(block) != _REFERENCE:
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


def _tool_result(block: dict[str, Any]) -> Iterator[Message]:
    content = block.get("content") or ""
    references: list[dict[str, str]] = []
    if not isinstance(content, str):
        parts = _listed(content)
        names = [p.get("tool_name") or p.get("name") for p in parts if _kind(p) == _REFERENCE]
        references = [{"type": _REFERENCE, "name": text_of(name)} for name in names if name]
        content = "\n".join(_text(part, "text") for part in parts if _kind(part) != _REFERENCE)
    answered = {"role": "tool", "tool_call_id": text_of(block.get("tool_use_id") or "")}
    yield answered | {"content": content}
    if references:
        yield answered | {"content": references}


def _in_effect(tools: Any, messages: list[Message]) -> list[dict[str, Any]] | None:
    """Returns the tools that there are in the end: messages may add some, and take some away."""
    changes = [
        block
        for message in messages
        if message.get("role") == "system" and isinstance(message.get("content"), list)
        for block in message["content"]
        if _kind(block) in _CHANGES
    ]
    if not changes:
        return None if tools is None else _listed(tools)
    by_name = {tool.get("name"): tool for tool in _listed(tools or [])}
    gone: set[object] = set()
    for block in changes:
        change, adds = block.get("tool"), block["type"] == "tool_addition"
        if adds and _kind(change) == "tool_definition":
            [tool] = _listed([change.get("definition")])
            by_name[name := tool.get("name")] = tool
        elif _kind(change) == "tool_reference" and (name := change.get("name")) in by_name:
            if adds:
                by_name[name] = by_name[name] | {"defer_loading": None}
        else:
            raise Unrenderable("tools", shown(block))
        (gone.discard if adds else gone.add)(name)
    return [tool for name, tool in by_name.items() if name not in gone]


def _tools(given: Any, messages: list[Message]) -> list[dict[str, Any]] | None:
    tools = _in_effect(given, messages)
    if tools is None:
        return None
    made = []
    for tool in tools:
        schema = tool.get("input_schema")
        if not isinstance(schema, dict):
            raise Unrenderable("tools", shown(tool))
        names = ("name", "description", "strict", "defer_loading")
        function = {name: tool.get(name) for name in names}
        function["parameters"] = schema if "type" in schema else schema | {"type": "object"}
        made.append({"type": "function", "function": function})
    return made


def _tool_choice(choice: Any) -> object:
    if choice is None:
        return None
    if not isinstance(choice, dict):
        raise Unrenderable("tool_choice", shown(choice))
    named = {"type": "function", "function": {"name": choice.get("name")}}
    return named if choice.get("type") == "tool" else _TOOL_CHOICES.get(str(choice.get("type")))
