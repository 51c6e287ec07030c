"""Answers in the form of Anthropic's Messages API, as vLLM has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from xxhash import xxh3_64_hexdigest

from workers.engines.base import EngineStoppedError
from workers.server.answer import Piece, Usage


class MessageForm:
    """One block. fields: of the request. call: the tool whose input the text is; None: it is
    said."""

    def __init__(self, request_id: str, fields: Mapping[str, Any], call: str | None) -> None:
        self._frame: dict[str, object] = {
            "id": f"msg_{request_id}",
            "type": "message",
            "role": "assistant",
            "model": fields["model"],
            "container": None,
        }
        self._call = call
        self._block: dict[str, object] = {"type": "text", "text": "", "citations": None}
        if call is not None:
            # An id of a request may have characters that an id of a call may not.
            call_id = f"toolu_{xxh3_64_hexdigest(request_id.encode())}"
            self._block = {"type": "tool_use", "id": call_id, "name": call, "input": {}}
            self._block["caller"] = {"type": "direct"}
        self._last: Piece | None = None

    def piece(self, piece: Piece) -> bytes:
        beginning = self._beginning() if self._last is None else b""
        self._last = piece
        delta = {"type": "text_delta", "text": piece.text}
        if self._call is not None:
            delta = {"type": "input_json_delta", "partial_json": piece.text}
        return beginning + _event("content_block_delta", index=0, delta=delta)

    def end(self, usage: Usage) -> bytes:
        assert self._last is not None
        return (
            _event("content_block_stop", index=0)
            + _event("message_delta", delta=self._ended(self._last), usage=_usage(usage))
            + _event("message_stop")
        )

    def failed(self, error: EngineStoppedError) -> bytes:
        return _event("error", error={"type": "api_error", "message": str(error)})

    def whole(self, choices: Sequence[Piece], usage: Usage) -> bytes:
        (piece,) = choices
        text: object = piece.text
        if self._call is not None:
            text = _parsed(piece.text)
        block = self._block | {"text" if self._call is None else "input": text}
        return orjson.dumps(
            {**self._frame, "content": [block], **self._ended(piece), "usage": _usage(usage)}
        )

    def _beginning(self) -> bytes:
        ended = dict.fromkeys(("stop_reason", "stop_sequence", "stop_details"))
        usage = _usage(Usage(0, 0, None))
        message = {**self._frame, "content": [], **ended, "usage": usage}
        return _event("message_start", message=message) + _event(
            "content_block_start", index=0, content_block=self._block
        )

    def _ended(self, piece: Piece) -> dict[str, object]:
        reason = "max_tokens" if piece.finish_reason == "length" else "end_turn"
        if reason == "end_turn" and self._call is not None:
            reason = "tool_use"
        if piece.stopped_by is not None:
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": piece.stopped_by, "stop_details": None}


def _parsed(arguments: str) -> object:
    try:
        return orjson.loads(arguments)
    except orjson.JSONDecodeError:  # cut short by max_tokens
        return {}


def _event(kind: str, **fields: object) -> bytes:
    return f"event: {kind}\n".encode() + b"data: %b\n\n" % orjson.dumps({"type": kind, **fields})


def _usage(usage: Usage) -> dict[str, object]:
    """Cached tokens count apart from the others of the prompt."""
    cached = sum((usage.cached_tokens or {}).values())
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.output_tokens,
        **_NOT_COUNTED,
    }


_NOT_COUNTED = dict.fromkeys(
    ("cache_creation", "inference_geo", "output_tokens_details", "server_tool_use", "service_tier")
)
