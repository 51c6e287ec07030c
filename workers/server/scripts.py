"""What an engine whose words are invented writes where a request asks for a form: calls of tools,
and objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from app.core.errors import InvalidRequest, shown
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

    def push(self, number: int) -> str:
        """The text of the token of that number."""
        return self.text[number * TOKEN_CHARACTERS : (number + 1) * TOKEN_CHARACTERS]


class ScriptStream:
    """The text of a script as its tokens are produced, whichever they are."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._number = -1

    def push(self, token: int) -> str:
        self._number += 1
        return self._script.push(self._number)

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
    schema = _schema(chat.get("response_format"))
    return None if schema is None else Script(_dumps(made_up(schema, _FORMAT), _FORMAT))


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
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    for tool in tools:
        if tool["name"] == name:
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
    arguments = made_up({"type": "object"} | parameters, "tools")
    return Script(_dumps(arguments, "tools"), call=function["name"])


def _schema(response_format: object) -> object:
    """What the answer has to match; None: it may be any text."""
    kind = response_format.get("type") if isinstance(response_format, dict) else response_format
    match kind:
        case None | "text":
            return None
        case "json_object":
            return {"type": "object", "properties": {"answer": {"type": "string"}}}
        case "json_schema":
            assert isinstance(response_format, dict)
            wrapped = response_format.get("json_schema")
            schema = wrapped.get("schema") if isinstance(wrapped, dict) else None
            if schema is not None:
                return schema
    raise InvalidRequest(
        "response_format",
        f"must be text, json_object or json_schema with a schema, got {shown(response_format)}",
    )


def _dumps(value: object, field: str) -> str:
    try:
        return orjson.dumps(value).decode()
    except TypeError as error:  # what can be read can be written, but for its depth
        raise InvalidRequest(field, f"is nested too deeply: {error}") from None


def check_unscripted(chat: Mapping[str, Any]) -> None:
    """Raises InvalidRequest if a form is asked for to which only made up words can be held."""
    if chat.get("tools") and chat.get("tool_choice") != "none":
        raise InvalidRequest(
            "tools", "this engine does not tell calls from text: tool_choice must be none"
        )
    if _schema(chat.get("response_format")) is not None:
        raise InvalidRequest("response_format", "must be text for this engine")
