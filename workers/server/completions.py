"""Answers in the forms of OpenAI's chats and completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from workers.server.answer import Piece, ServedTokens, event, now_s

DONE = b"data: [DONE]\n\n"


def usage_of(usage: ServedTokens) -> dict[str, object]:
    """Returns the usage as OpenAI has it, with the cached tokens by tier."""
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
    """A completion: its last event has the usage, or one more event if it has several choices."""

    def __init__(self, request_id: str, model: str, *, choices: int = 1) -> None:
        self._frame: dict[str, object] = {
            "id": request_id,
            "object": "text_completion",
            "created": now_s(),
            "model": model,
        }
        self._choices = choices
        self._waiting = b""
        """The last event of a single choice, which is sent along with the usage."""

    def piece(self, piece: Piece) -> bytes:
        choice = _choice(piece, "text", piece.text)
        if piece.finish_reason is not None and self._choices == 1:
            self._waiting = orjson.dumps(choice)
            return b""
        return event({**self._frame, "choices": [choice]})

    def end(self, usage: ServedTokens) -> bytes:
        choices = [orjson.Fragment(self._waiting)] if self._waiting else []
        return event({**self._frame, "choices": choices, "usage": usage_of(usage)}) + DONE

    def whole(self, choices: Sequence[Piece], usage: ServedTokens) -> dict[str, object]:
        said = [_choice(piece, "text", piece.text) for piece in choices]
        return {**self._frame, "choices": said, "usage": usage_of(usage)}


class ChatForm:
    """A chat, in which the first event of a choice comes with its first token.

    fields: of the request.
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
        return event({**self._frame, "choices": [_choice(piece, "delta", delta)]})

    def end(self, usage: ServedTokens) -> bytes:
        if not self._wants_usage:
            return DONE
        return event({**self._frame, "choices": [], "usage": usage_of(usage)}) + DONE

    def whole(self, choices: Sequence[Piece], usage: ServedTokens) -> dict[str, object]:
        message: dict[str, object] = {"role": "assistant", "refusal": None, "annotations": []}
        said = [_choice(piece, "message", message | {"content": piece.text}) for piece in choices]
        return {**self._frame, "choices": said, "usage": usage_of(usage)}


def _choice(piece: Piece, name: str, said: object) -> dict[str, object]:
    return {
        "index": piece.index,
        name: said,
        "token_ids": piece.token_ids,
        "logprobs": None,
        "finish_reason": piece.finish_reason,
    }
