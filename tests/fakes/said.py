"""Texts of answers: words, the arguments of a tool, or an object of the form asked for."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import orjson
from xxhash import xxh3_64_intdigest

TEXT = "tok "
NUM_TOKENS = 8
PIECE_CHARACTERS = 4
DIMENSIONS = 64


class Refused(Exception):
    """An engine refuses a request. field: the member of it that is wrong."""

    def __init__(self, message, field=None, status=400):
        super().__init__(message)
        self.message, self.field, self.status = message, field, status


@dataclass(frozen=True, slots=True)
class Said:
    """tokens: the text of each. call: the tool whose arguments they are; None: they are words.
    stopped_by: the stop string that ended them."""

    tokens: Sequence[str]
    call: str | None = None
    is_cut: bool = False
    stopped_by: str | None = None

    @property
    def text(self):
        return "".join(self.tokens)


def said_to(body, words=(TEXT,), natural=0):
    """Returns the answer to a body of any of the APIs. Raises Refused.

    words: that are said, over and over. natural: after so many an answer ends by itself; 0: it goes
    on to its limit.
    """
    names = ("max_completion_tokens", "max_output_tokens", "max_tokens")
    limit = next((body[name] for name in names if body.get(name)), None)
    call = _called(body)
    schema = call[1] if call else _schema(body)
    if schema is not None:
        text = orjson.dumps(made_up(schema)).decode()
        pieces = range(0, len(text), PIECE_CHARACTERS)
        tokens = [text[at : at + PIECE_CHARACTERS] for at in pieces]
    else:
        if not natural or body.get("ignore_eos"):
            natural = limit or NUM_TOKENS
        tokens = [words[at % len(words)] for at in range(min(natural, limit or natural))]
    kept = tokens[:limit]
    is_cut = len(kept) < len(tokens) or (schema is None and len(kept) == limit)
    return _stopped(Said(kept, call[0] if call else None, is_cut), body)


def _stopped(said, body):
    stops = body.get("stop") or body.get("stop_sequences") or []
    places = [
        (said.text.find(stop), stop)
        for stop in ([stops] if isinstance(stops, str) else stops)
        if stop in said.text
    ]
    if not places:
        return said
    at, stop = min(places)
    kept, tokens = 0, []
    for token in said.tokens:
        tokens.append(token[: max(0, at - kept)])
        kept += len(token)
        if kept >= at:
            break
    return replace(said, tokens=tokens, is_cut=False, stopped_by=stop)


def _called(body):
    """The tool that is called, and its schema. Where the choice is the model's, that is one after
    another until there is a result. Raises Refused."""
    tools = [tool.get("function", tool) for tool in body.get("tools") or ()]
    tools = [tool for tool in tools if "name" in tool]
    choice = body.get("tool_choice") or "auto"
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if isinstance(choice, dict) and kind in ("function", "tool"):
        name = choice.get("function", choice).get("name")
        tools = [tool for tool in tools if tool["name"] == name]
        if not tools:
            raise Refused(f"tool_choice names none of the tools: {name}", "tool_choice")
        kind = "required"
    results = sum(1 for _ in _results(body))
    if not tools or kind == "none" or (kind == "auto" and results):
        return None
    tool = tools[results % len(tools)]
    return tool["name"], tool.get("parameters") or tool.get("input_schema") or {"type": "object"}


def _results(body):
    turns = body.get("messages") or body.get("input")
    for turn in reversed(turns if isinstance(turns, list) else []):
        if not isinstance(turn, dict):
            return
        content = turn.get("content")
        parts = content if isinstance(content, list) else []
        told = [part for part in parts if part.get("type") == "tool_result"]
        if turn.get("role") == "tool" or turn.get("type") == "function_call_output":
            told = [turn]
        yield from told
        if turn.get("role") == "user" and not told:
            return


def _schema(body):
    places = (body.get(name) or {} for name in ("text", "output_config"))
    form = body.get("response_format") or next((p["format"] for p in places if "format" in p), {})
    if form.get("type") == "json_object":
        return {"type": "object", "required": ["answer"]}
    return form.get("schema") or (form.get("json_schema") or {}).get("schema")


def made_up(schema, root=None):
    """A value of a JSON schema."""
    root = schema if root is None else root
    if "$ref" in schema:
        found = root
        for name in schema["$ref"].removeprefix("#").strip("/").split("/"):
            found = found[name]
        return made_up(found, root)
    for name in ("anyOf", "oneOf", "allOf"):
        if schema.get(name):
            return made_up(schema[name][0], root)
    if "const" in schema or schema.get("enum"):
        return schema["const"] if "const" in schema else schema["enum"][0]
    kind = schema.get("type", "object" if "properties" in schema else "string")
    match kind if isinstance(kind, str) else kind[0]:
        case "object":
            # Of the outermost also what is optional: without its kind, Claude Code would run an
            # agent that it is told to, whose results it takes for the user's words, without an end.
            inner, required = schema.get("properties", {}), schema.get("required", ())
            names = {**inner, **dict.fromkeys(required)} if schema is root else required
            return {name: made_up(inner.get(name, {}), root) for name in names}
        case "array":
            return [made_up(schema.get("items", {}), root)] * schema.get("minItems", 0)
        case "boolean":
            return True
        case "null":
            return None
        case "integer" | "number":
            return schema.get("minimum", 1)
    return "the quick"[: schema.get("maxLength")]


def embedding(prompt, encoding):
    """Equal prompts have equal ones. encoding: `base64`, or anything else for numbers."""
    drawn = np.random.default_rng(xxh3_64_intdigest(orjson.dumps(prompt))).normal(size=DIMENSIONS)
    vector = (drawn / np.linalg.norm(drawn)).astype("<f4")
    if encoding == "base64":
        return base64.b64encode(vector.tobytes()).decode()
    return vector.tolist()
