"""Answers in the forms of OpenAI's chats and completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from workers.engines.base import EngineStoppedError
from workers.server.answer import Piece, Usage, now_s

STOPPING = "stopping"
DONE = b"data: [DONE]\n\n"


def usage_of(usage: Usage) -> dict[str, object]:
    """With the cached tokens by tier."""
    cached = usage.cached_tokens
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": None
        if cached is None
        else {"cached_tokens": sum(cached.values()), "cached_tokens_by_tier": cached},
    }


class CompletionForm:
    """Text. The last event has the usage; a stream of several choices has one more, for that."""

    def __init__(self, request_id: str, model: str, *, choices: int = 1) -> None:
        self._frame: dict[str, object] = {
            "id": request_id,
            "object": "text_completion",
            "created": now_s(),
            "model": model,
        }
        self._choices = choices
        self._waiting = b""
        """The last event of a single choice: it is told along with the usage."""

    def piece(self, piece: Piece) -> bytes:
        if piece.finish_reason is not None and self._choices == 1:
            self._waiting = orjson.dumps(self._choice(piece))
            return b""
        return _event({**self._frame, "choices": [self._choice(piece)]})

    def end(self, usage: Usage) -> bytes:
        choices = [orjson.Fragment(self._waiting)] if self._waiting else []
        return _event({**self._frame, "choices": choices, "usage": usage_of(usage)}) + DONE

    def failed(self, error: EngineStoppedError) -> bytes:
        return _failed(error)

    def whole(self, choices: Sequence[Piece], usage: Usage) -> bytes:
        return orjson.dumps(
            {**self._frame, "choices": [*map(self._choice, choices)], "usage": usage_of(usage)}
        )

    def _choice(self, piece: Piece) -> dict[str, object]:
        return {
            "index": piece.index,
            "text": piece.text,
            "token_ids": piece.token_ids,
            "logprobs": None,
            "finish_reason": piece.finish_reason,
        }


class ChatForm:
    """A chat. fields: of the request. call: the function whose arguments the text is; None: it is
    said.

    The first event of a choice comes with its first token.
    """

    def __init__(self, request_id: str, fields: Mapping[str, Any], call: str | None) -> None:
        self._frame: dict[str, object] = {
            "id": f"chatcmpl-{request_id}",
            "object": "chat.completion.chunk" if fields.get("stream") else "chat.completion",
            "created": now_s(),
            "model": fields["model"],
        }
        self._call = call
        self._wants_usage = (fields.get("stream_options") or {}).get("include_usage")
        self._begun: set[int] = set()

    def piece(self, piece: Piece) -> bytes:
        delta: dict[str, object] = {}
        is_first = piece.index not in self._begun
        if is_first:
            self._begun.add(piece.index)
            delta = {"role": "assistant"}
        if self._call is None:
            delta["content"] = piece.text
        else:
            call = self._called(piece) if is_first else {"function": {"arguments": piece.text}}
            delta["tool_calls"] = [{"index": 0, **call}]
        return _event({**self._frame, "choices": [self._choice(piece, "delta", delta)]})

    def end(self, usage: Usage) -> bytes:
        if not self._wants_usage:
            return DONE
        return _event({**self._frame, "choices": [], "usage": usage_of(usage)}) + DONE

    def failed(self, error: EngineStoppedError) -> bytes:
        return _failed(error)

    def whole(self, choices: Sequence[Piece], usage: Usage) -> bytes:
        said = [self._choice(piece, "message", self._message(piece)) for piece in choices]
        return orjson.dumps({**self._frame, "choices": said, "usage": usage_of(usage)})

    def _message(self, piece: Piece) -> dict[str, object]:
        message: dict[str, object] = {
            "role": "assistant",
            "content": piece.text,
            "refusal": None,
            "annotations": [],
        }
        if self._call is not None:
            message |= {"content": None, "tool_calls": [self._called(piece)]}
        return message

    def _called(self, piece: Piece) -> dict[str, object]:
        function = {"name": self._call, "arguments": piece.text}
        call_id = f"call_{piece.index}_{self._frame['id']}"
        return {"id": call_id, "type": "function", "function": function}

    def _choice(self, piece: Piece, name: str, said: dict[str, object]) -> dict[str, object]:
        reason = piece.finish_reason
        return {
            "index": piece.index,
            name: said,
            "token_ids": piece.token_ids,
            "logprobs": None,
            "finish_reason": "tool_calls" if reason == "stop" and self._call else reason,
        }


def _failed(error: EngineStoppedError) -> bytes:
    told = {"code": STOPPING, "type": "api_error", "message": str(error), "param": None}
    return _event({"error": told})


def _event(content: object) -> bytes:
    return b"data: %b\n\n" % orjson.dumps(content)
