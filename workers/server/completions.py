"""Answers in the forms of OpenAI's chats and completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from workers.engines.base import EngineStoppedError
from workers.server.answer import Piece, ServedTokens, now_s

STOPPING = "stopping"
DONE = b"data: [DONE]\n\n"


def usage_of(usage: ServedTokens) -> dict[str, object]:
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

    def end(self, usage: ServedTokens) -> bytes:
        choices = [orjson.Fragment(self._waiting)] if self._waiting else []
        return _event({**self._frame, "choices": choices, "usage": usage_of(usage)}) + DONE

    def failed(self, error: EngineStoppedError) -> bytes:
        return _failed(error)

    def whole(self, choices: Sequence[Piece], usage: ServedTokens) -> bytes:
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
    """A chat. fields: of the request.

    The first event of a choice comes with its first token.
    """

    def __init__(self, request_id: str, fields: Mapping[str, Any]) -> None:
        self._frame: dict[str, object] = {
            "id": f"chatcmpl-{request_id}",
            "object": "chat.completion.chunk" if fields.get("stream") else "chat.completion",
            "created": now_s(),
            "model": fields["model"],
        }
        self._wants_usage = (fields.get("stream_options") or {}).get("include_usage")
        self._begun: set[int] = set()

    def piece(self, piece: Piece) -> bytes:
        role = {} if piece.index in self._begun else {"role": "assistant"}
        self._begun.add(piece.index)
        delta: dict[str, object] = {**role, "content": piece.text}
        return _event({**self._frame, "choices": [self._choice(piece, "delta", delta)]})

    def end(self, usage: ServedTokens) -> bytes:
        if not self._wants_usage:
            return DONE
        return _event({**self._frame, "choices": [], "usage": usage_of(usage)}) + DONE

    def failed(self, error: EngineStoppedError) -> bytes:
        return _failed(error)

    def whole(self, choices: Sequence[Piece], usage: ServedTokens) -> bytes:
        said = [self._choice(piece, "message", self._message(piece)) for piece in choices]
        return orjson.dumps({**self._frame, "choices": said, "usage": usage_of(usage)})

    def _message(self, piece: Piece) -> dict[str, object]:
        return {"role": "assistant", "content": piece.text, "refusal": None, "annotations": []}

    def _choice(self, piece: Piece, name: str, said: dict[str, object]) -> dict[str, object]:
        return {
            "index": piece.index,
            name: said,
            "token_ids": piece.token_ids,
            "logprobs": None,
            "finish_reason": piece.finish_reason,
        }


def _failed(error: EngineStoppedError) -> bytes:
    told = {"code": STOPPING, "type": "api_error", "message": str(error), "param": None}
    return _event({"error": told})


def _event(content: object) -> bytes:
    return b"data: %b\n\n" % orjson.dumps(content)
