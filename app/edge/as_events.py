"""A whole answer as the stream that was asked for, where a comment has begun that. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from app.door.asked import PATHS, Api
from app.edge.errors import DONE


def as_events(body: bytes, path: str) -> bytes:
    """Raises ValueError if it is not as the API at `path` has it."""
    try:
        fields = orjson.loads(body)
        match PATHS[path]:
            case Api.CHAT:
                return _data(_chunk(fields)) + DONE
            case Api.COMPLETIONS:
                return _data(fields) + DONE
            case Api.MESSAGES:
                return b"".join(_message(fields))
            case Api.RESPONSES:
                return _event("response.completed", sequence_number=0, response=fields)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"not an answer of {path}: {error}") from None
    raise ValueError(f"{path} has no streams")


def _chunk(fields: dict[str, Any]) -> dict[str, Any]:
    choices = [
        {name: value for name, value in choice.items() if name != "message"}
        | {"delta": _delta(choice["message"])}
        for choice in fields["choices"]
    ]
    return fields | {"object": "chat.completion.chunk", "choices": choices}


def _delta(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls") or []
    numbered = [{"index": number, **call} for number, call in enumerate(calls)]
    return message | ({"tool_calls": numbered} if numbered else {})


def _message(fields: dict[str, Any]) -> Iterator[bytes]:
    begun = fields | {"content": [], "stop_reason": None, "stop_sequence": None}
    yield _event("message_start", message=begun)
    for index, block in enumerate(fields["content"]):
        begin, deltas = _block(block)
        yield _event("content_block_start", index=index, content_block=begin)
        for delta in deltas:
            yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    last = {name: fields.get(name) for name in ("stop_reason", "stop_sequence")}
    yield _event("message_delta", delta=last, usage=fields.get("usage"))
    yield _event("message_stop")


def _block(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """How it begins, and what is said of it then."""
    match block["type"]:
        case "text":
            return block | {"text": ""}, [{"type": "text_delta", "text": block["text"]}]
        case "thinking":
            deltas = [{"type": "thinking_delta", "thinking": block["thinking"]}]
            if block.get("signature"):
                deltas.append({"type": "signature_delta", "signature": block["signature"]})
            return block | {"thinking": "", "signature": ""}, deltas
        case "tool_use":
            said = orjson.dumps(block["input"]).decode()
            return block | {"input": {}}, [{"type": "input_json_delta", "partial_json": said}]
    return block, []


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\n" + _data({"type": kind, **fields})


def _data(fields: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(fields) + b"\n\n"
