"""Answers as engines give them, in each API that clients speak: events, bodies and errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

TEXT = "tok "
"""That each token is, unless said otherwise."""
FAULT = "the engine core has died"


class Chat:
    """POST /v1/chat/completions. body: of the request."""

    def __init__(self, body: Mapping[str, Any], prompt_tokens: int, num_tokens: int) -> None:
        self.model = body.get("model", "")
        self.num_tokens = num_tokens
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = 0
        self.text = TEXT
        """That each token is."""
        self.members: dict[str, Any] = {}
        """More of a whole answer."""
        self._names_ids = bool(body.get("return_token_ids"))
        self._shows_usage = bool((body.get("stream_options") or {}).get("include_usage"))

    def begin(self) -> bytes:
        """What comes before the first token."""
        return self._chunk({"role": "assistant", "content": ""}, None)

    def token(self, number: int) -> bytes:
        """From 0."""
        return self._chunk({"content": self.text}, number)

    def end(self) -> bytes:
        last = self._chunk({}, None, finish_reason="stop")
        usage = _data(self._frame | {"choices": [], "usage": self.usage})
        return last + (usage if self._shows_usage else b"") + b"data: [DONE]\n\n"

    def error(self) -> bytes:
        """The event of a failure, and what follows it."""
        return _data(self.refusal(500)) + b"data: [DONE]\n\n"

    def whole(self) -> dict[str, Any]:
        choice = {"index": 0, "finish_reason": "stop", **self._said()}
        return self._frame | {"choices": [choice], "usage": self.usage} | self.members

    @staticmethod
    def refusal(status: int) -> dict[str, Any]:
        kind = "InternalServerError" if status >= 500 else "BadRequestError"
        return {"error": {"message": FAULT, "type": kind, "param": None, "code": status}}

    @property
    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.num_tokens,
            "total_tokens": self.prompt_tokens + self.num_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    @property
    def _frame(self) -> dict[str, Any]:
        return {
            "id": "sick",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": self.model,
        }

    def _said(self) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": self.text * self.num_tokens}}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"delta": delta}

    def _chunk(
        self, delta: dict[str, Any], number: int | None, finish_reason: str | None = None
    ) -> bytes:
        choice = {"index": 0, "finish_reason": finish_reason, **self._delta(delta)}
        if self._names_ids:
            choice["token_ids"] = [] if number is None else [number]
        return _data(self._frame | {"choices": [choice]})


class Completion(Chat):
    """POST /v1/completions."""

    def begin(self) -> bytes:
        return b""

    def _said(self) -> dict[str, Any]:
        return {"text": self.text * self.num_tokens}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"text": delta.get("content", "")}


class Message(Chat):
    """POST /v1/messages."""

    def begin(self) -> bytes:
        message = self._message([], None)
        block = {"type": "text", "text": ""}
        return _named("message_start", message=message) + _named(
            "content_block_start", index=0, content_block=block
        )

    def token(self, number: int) -> bytes:
        delta = {"type": "text_delta", "text": self.text}
        return _named("content_block_delta", index=0, delta=delta)

    def end(self) -> bytes:
        delta = {"stop_reason": "end_turn", "stop_sequence": None}
        return (
            _named("content_block_stop", index=0)
            + _named("message_delta", delta=delta, usage=self.usage)
            + _named("message_stop")
        )

    def error(self) -> bytes:
        return _named("error", error=self.refusal(500)["error"])

    def whole(self) -> dict[str, Any]:
        return self._message([{"type": "text", "text": self.text * self.num_tokens}], "end_turn")

    @staticmethod
    def refusal(status: int) -> dict[str, Any]:
        kind = "api_error" if status >= 500 else "invalid_request_error"
        return {"type": "error", "error": {"type": kind, "message": FAULT}}

    @property
    def usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self.prompt_tokens - self.cached_tokens,
            "output_tokens": self.num_tokens,
            "cache_read_input_tokens": self.cached_tokens,
        }

    def _message(self, content: list[Any], stop_reason: str | None) -> dict[str, Any]:
        return {
            "id": "sick",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": None,
            "usage": self.usage,
        }


class Response(Chat):
    """POST /v1/responses."""

    def begin(self) -> bytes:
        response = self._response("in_progress", [])
        return _numbered(0, "created", response=response) + _numbered(
            1, "in_progress", response=response
        )

    def token(self, number: int) -> bytes:
        said = self._of_text(number + 4, "output_text.delta", delta=self.text, logprobs=[])
        return said if number else self._begin_text() + said

    def end(self) -> bytes:
        text, number = self.text * self.num_tokens, self.num_tokens + 4
        item = self._message(text)
        return (
            self._of_text(number, "output_text.done", text=text, logprobs=[])
            + self._of_text(number + 1, "content_part.done", part=_text_part(text))
            + _numbered(number + 2, "output_item.done", output_index=0, item=item)
            + _numbered(number + 3, "completed", response=self.whole())
        )

    def error(self) -> bytes:
        error = {"code": "server_error", "message": FAULT}
        return _numbered(4, "failed", response=self._response("failed", []) | {"error": error})

    def whole(self) -> dict[str, Any]:
        return self._response("completed", [self._message(self.text * self.num_tokens)])

    @property
    def usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self.prompt_tokens,
            "output_tokens": self.num_tokens,
            "total_tokens": self.prompt_tokens + self.num_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens_details": {"reasoning_tokens": 0},
        }

    def _begin_text(self) -> bytes:
        item = self._message("") | {"status": "in_progress", "content": []}
        return _numbered(2, "output_item.added", output_index=0, item=item) + self._of_text(
            3, "content_part.added", part=_text_part("")
        )

    @staticmethod
    def _of_text(number: int, kind: str, **fields: Any) -> bytes:
        return _numbered(number, kind, item_id="msg", output_index=0, content_index=0, **fields)

    @staticmethod
    def _message(text: str) -> dict[str, Any]:
        about = {"id": "msg", "type": "message", "role": "assistant", "status": "completed"}
        return about | {"content": [_text_part(text)]}

    def _response(self, status: str, output: list[Any]) -> dict[str, Any]:
        return {
            "id": "sick",
            "object": "response",
            "created_at": 1,
            "model": self.model,
            "status": status,
            "output": output,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "usage": self.usage if output else None,
        }


class Numbers(Chat):
    """Paths whose answers are no text."""

    def whole(self) -> dict[str, Any]:
        data = [{"index": 0, "object": "embedding", "embedding": [0.0], "score": 0.0}]
        usage = {"prompt_tokens": self.prompt_tokens, "total_tokens": self.prompt_tokens}
        return {"object": "list", "model": self.model, "data": data, "results": [], "usage": usage}


DIALECTS: Mapping[str, type[Chat]] = {
    "/v1/chat/completions": Chat,
    "/v1/completions": Completion,
    "/v1/messages": Message,
    "/v1/responses": Response,
    **dict.fromkeys(("/v1/embeddings", "/v1/rerank", "/v1/score"), Numbers),
}
"""By path."""


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}


def _numbered(number: int, kind: str, **fields: Any) -> bytes:
    """An event of a response."""
    return _named(f"response.{kind}", sequence_number=number, **fields)


def _data(fields: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(fields) + b"\n\n"


def _named(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\n" + _data({"type": kind, **fields})
