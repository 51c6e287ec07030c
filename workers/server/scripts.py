"""What an engine whose words are invented writes where a request asks for a form: calls of tools,
and objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any

from app.core.errors import InvalidRequest, shown
from app.http.json_body import dumps
from workers.engines.sim.objects import made_up

TOKEN_CHARACTERS = 4
_FORMAT = "response_format"


@dataclass(frozen=True, slots=True)
class Script:
    """text: said, or the arguments of `call`. call: name of the function called; None: none is."""

    text: str
    call: str | None = None

    @property
    def num_tokens(self) -> int:
        return max(1, -(-len(self.text) // TOKEN_CHARACTERS))


class ScriptStream:
    """The text of a script as its tokens are produced, whichever they are."""

    def __init__(self, script: Script) -> None:
        self._text = StringIO(script.text)

    def push(self, token: int) -> str:
        return self._text.read(TOKEN_CHARACTERS)

    def end(self) -> str:
        return ""


def script_of(chat: Mapping[str, Any]) -> Script | None:
    """What the answer to a chat has to be; None: any text. Raises InvalidRequest.

    Where the choice is the model's, it calls a tool once the user has spoken, and answers in words
    once it has a result. Of several tools it calls one after another.
    """
    tools = _tools(chat.get("tools"))
    choice = chat.get("tool_choice") or ("auto" if tools else "none")
    results = _results(chat.get("messages"))
    if isinstance(choice, dict):
        return _call(_named(choice, tools))
    if choice not in ("auto", "none", "required"):
        raise InvalidRequest(
            "tool_choice", f"must be none, auto, required or a function's, got {shown(choice)}"
        )
    if choice == "required" and not tools:
        raise InvalidRequest("tool_choice", "is required, but there are no tools")
    if choice == "required" or (choice == "auto" and tools and not results):
        return _call(tools[results % len(tools)])
    schema = _schema(chat.get(_FORMAT))
    return None if schema is None else _made_up(schema, _FORMAT)


def _tools(tools: object) -> list[Mapping[str, Any]]:
    """The functions that may be called."""
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise InvalidRequest("tools", f"needs a list, got {shown(tools)}")
    functions: list[Mapping[str, Any]] = []
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequest("tools", f"needs functions with a name, got {shown(tool)}")
        functions.append(function)
    return functions


def _named(choice: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    for tool in tools:
        if choice.get("function") == {"name": tool["name"]}:
            return tool
    raise InvalidRequest("tool_choice", f"names none of the tools: {shown(choice)}")


def _results(messages: object) -> int:
    """Results of tools since the user spoke."""
    count = 0
    for message in reversed(messages if isinstance(messages, list) else []):
        role = message.get("role") if isinstance(message, dict) else None
        if role == "user":
            break
        count += role == "tool"
    return count


def _call(function: Mapping[str, Any]) -> Script:
    parameters = function.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise InvalidRequest("tools", f"needs a schema of parameters, got {shown(parameters)}")
    return _made_up({"type": "object"} | parameters, "tools", function["name"])


def _made_up(schema: object, field: str, call: str | None = None) -> Script:
    return Script(dumps(made_up(schema, field), field).decode(), call)


def _schema(asked: object) -> object:
    """What the answer has to match; None: it may be any text."""
    form = asked if isinstance(asked, dict) else {"type": asked}
    wrapped = form.get("json_schema")
    schema = wrapped.get("schema") if isinstance(wrapped, dict) else None
    match form.get("type"):
        case None | "text":
            return None
        case "json_object":
            return {"type": "object", "required": ["answer"]}
        case "json_schema" if schema is not None:
            return schema
    raise InvalidRequest(
        _FORMAT, f"must be text, json_object or json_schema with a schema, got {shown(asked)}"
    )


def check_unscripted(chat: Mapping[str, Any]) -> None:
    """Raises InvalidRequest if a form is asked for to which only made up words can be held."""
    if chat.get("tools") and chat.get("tool_choice") != "none":
        raise InvalidRequest(
            "tools", "this engine does not tell calls from text: tool_choice must be none"
        )
    if _schema(chat.get(_FORMAT)) is not None:
        raise InvalidRequest(_FORMAT, "must be text for this engine")
