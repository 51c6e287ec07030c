"""Answers in the form of OpenAI's Responses API. None is stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from app.http.json_body import dumps
from workers.engines.base import EngineStoppedError
from workers.server.answer import Piece, Usage, now_s

_ECHOED: Mapping[str, object] = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "prompt_cache_key": None,
    "reasoning": None,
    "safety_identifier": None,
    "service_tier": "default",
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
}
"""Members of the request that its answer repeats, and what they are unless given."""
_ALWAYS: Mapping[str, object] = {
    "background": False,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "previous_response_id": None,
    "store": False,
    "top_logprobs": 0,
    "truncation": "disabled",
}


class ResponseForm:
    """One item. fields: of the request. call: the function whose arguments the text is; None: it is
    said. Raises InvalidRequest for what cannot be repeated."""

    def __init__(self, request_id: str, fields: Mapping[str, Any], call: str | None) -> None:
        given = {name: fields[name] for name in _ECHOED if fields.get(name) is not None}
        self._frame: dict[str, object] = {
            "id": f"resp_{request_id}",
            "object": "response",
            "created_at": now_s(),
            "model": fields["model"],
            **_ALWAYS,
            **_ECHOED,
            **given,
        }
        self._frame["tools"] = [{"strict": None, **tool} for tool in given.get("tools", ())]
        dumps(self._frame)
        self._call = call
        self._id = f"{'msg' if call is None else 'fc'}_{request_id}"
        self._text: list[str] = []
        self._last: Piece | None = None
        self._number = -1

    def piece(self, piece: Piece) -> bytes:
        beginning = self._beginning() if self._last is None else b""
        self._last = piece
        self._text.append(piece.text)
        if self._call is not None:
            kind = "response.function_call_arguments.delta"
            return beginning + self._on_item(kind, delta=piece.text)
        kind = "response.output_text.delta"
        return beginning + self._on_part(kind, delta=piece.text, logprobs=[])

    def end(self, usage: Usage) -> bytes:
        assert self._last is not None
        text = "".join(self._text)
        item = self._item(text, self._status(self._last))
        if self._call is not None:
            kind = "response.function_call_arguments.done"
            done = self._on_item(kind, name=self._call, arguments=text)
        else:
            done = self._on_part("response.output_text.done", text=text, logprobs=[])
            done += self._on_part("response.content_part.done", part=_part(text))
        done += self._event("response.output_item.done", output_index=0, item=item)
        response = self._response(self._last, text, usage)
        return done + self._event(f"response.{response['status']}", response=response)

    def failed(self, error: EngineStoppedError) -> bytes:
        return self._event("error", code="stopping", message=str(error), param=None)

    def whole(self, choices: Sequence[Piece], usage: Usage) -> bytes:
        (piece,) = choices
        return orjson.dumps(self._response(piece, piece.text, usage))

    def _beginning(self) -> bytes:
        response = self._frame | {"status": "in_progress", "output": [], "usage": None}
        response |= {"completed_at": None, "incomplete_details": None, "error": None}
        begun = self._event("response.created", response=response)
        begun += self._event("response.in_progress", response=response)
        item = self._item("", "in_progress")
        if self._call is None:
            item["content"] = []
        begun += self._event("response.output_item.added", output_index=0, item=item)
        if self._call is None:
            begun += self._on_part("response.content_part.added", part=_part(""))
        return begun

    def _response(self, last: Piece, text: str, usage: Usage) -> dict[str, Any]:
        status = self._status(last)
        is_cut = status == "incomplete"
        return self._frame | {
            "status": status,
            "completed_at": None if is_cut else now_s(),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "error": None,
            "output": [self._item(text, status)],
            "usage": _usage(usage),
        }

    def _status(self, last: Piece) -> str:
        return "incomplete" if last.finish_reason == "length" else "completed"

    def _item(self, text: str, status: str) -> dict[str, object]:
        if self._call is None:
            item: dict[str, object] = {"type": "message", "role": "assistant"}
            item["content"] = [_part(text)]
        else:
            item = {"type": "function_call", "name": self._call, "arguments": text}
            item["call_id"] = f"call_{self._id}"
        return item | {"id": self._id, "status": status}

    def _on_item(self, kind: str, **more: object) -> bytes:
        return self._event(kind, item_id=self._id, output_index=0, **more)

    def _on_part(self, kind: str, **more: object) -> bytes:
        return self._on_item(kind, content_index=0, **more)

    def _event(self, kind: str, **more: object) -> bytes:
        self._number += 1
        content = {"type": kind, "sequence_number": self._number, **more}
        return f"event: {kind}\n".encode() + b"data: %b\n\n" % orjson.dumps(content)


def _part(text: str) -> dict[str, object]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: Usage) -> dict[str, object]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": sum((usage.cached_tokens or {}).values())},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
    }
