"""Anthropic's Messages API over HTTP, as vLLM has it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import orjson

from app.simulation.steps import Finished
from workers.engines.base import Engine, EngineStoppedError, Tokenizer
from workers.http import Completion, CompletionCall

_STOP_REASONS = {"length": "max_tokens"}


class Message(Completion):
    """An answer under way: one block of text."""

    def __init__(
        self, engine: Engine, call: CompletionCall, model: str, tokenizer: Tokenizer | None
    ) -> None:
        super().__init__(engine, call, model, tokenizer)
        self._frame = {
            "id": f"msg_{call.completion.request_id}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }

    async def chunks(self) -> AsyncIterator[bytes]:
        has_begun = False
        try:
            async for output in self._generation:
                if not has_begun:
                    has_begun = True
                    yield self._beginning()
                text = self._next_text(output.token_ids, output.finished is not None)
                delta = {"type": "text_delta", "text": text}
                yield _event("content_block_delta", index=0, delta=delta)
                if output.finished is not None:
                    yield _event("content_block_stop", index=0)
                    ended = {"stop_reason": _stop_reason(output.finished), "stop_sequence": None}
                    yield _event("message_delta", delta=ended, usage=_usage(output.finished))
        except EngineStoppedError as error:
            # The status line is already sent, so only the stream can report the error.
            yield _event("error", error={"type": "api_error", "message": str(error)})
        else:
            yield _event("message_stop")

    def _beginning(self) -> bytes:
        nothing = {"input_tokens": 0, "output_tokens": 0}
        message = self._frame | {"content": [], "stop_reason": None, "stop_sequence": None}
        block = {"type": "text", "text": ""}
        return _event("message_start", message=message | {"usage": nothing}) + _event(
            "content_block_start", index=0, content_block=block
        )

    def _json_now(self, token_ids: list[int], finished: Finished | None) -> bytes:
        assert finished is not None  # only whole answers are made of it
        return orjson.dumps(
            {
                **self._frame,
                "content": [{"type": "text", "text": self._next_text(token_ids, True)}],
                "stop_reason": _stop_reason(finished),
                "stop_sequence": None,
                "usage": _usage(finished),
            }
        )


def _event(kind: str, **fields: object) -> bytes:
    return f"event: {kind}\n".encode() + b"data: %b\n\n" % orjson.dumps({"type": kind, **fields})


def _stop_reason(finished: Finished) -> str:
    return _STOP_REASONS.get(finished.finish_reason, "end_turn")


def _usage(finished: Finished) -> dict[str, int]:
    """Cached tokens count apart from the others of the prompt."""
    return {
        "input_tokens": finished.prompt_tokens - finished.cached_tokens,
        "cache_read_input_tokens": finished.cached_tokens,
        "output_tokens": finished.output_tokens,
    }
