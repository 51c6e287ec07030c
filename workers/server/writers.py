"""Has an engine write what a request asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from app.core.errors import InvalidRequest
from workers.engines.base import CompletionRequest, Engine, TextStream, Tokenizer
from workers.server.answer import Writer
from workers.server.members import MAX_CHOICES, GenerationOptions
from workers.server.transfer import KEEP_S, PARAMS

NATURAL_TOKENS = 128
"""After so many an answer to a chat with made up words ends, unless it is to go on."""


@dataclass(frozen=True, slots=True)
class ServedEngine:
    """The engine behind an HTTP interface. names: of its model. invents: its words are made up, and
    have no end of their own."""

    engine: Engine
    names: Sequence[str]
    tokenizer: Tokenizer | None = None
    invents: bool = False


def written(
    served: ServedEngine,
    prompts: Sequence[bytes],
    asked: GenerationOptions,
    request_id: str,
    *,
    limit: int,
    natural: int | None = None,
) -> list[Writer]:
    """As many choices as are asked for of each prompt, one prompt after another.

    limit: of tokens, each. natural: after so many a choice ends by itself; None: only the engine
    knows. Raises InvalidRequest, and as Engine.complete.
    """
    num_choices = len(prompts) * asked.choices
    _check(served, asked, limit, num_choices)
    check_travels(served, asked, num_choices)
    if natural is not None:
        natural = max(natural, asked.min_tokens)
    num_tokens = limit if natural is None else min(limit, natural)
    writers: list[Writer] = []
    try:
        for number in range(num_choices):
            prompt = prompts[number // asked.choices]
            name = f"{request_id}-{number}" if number else request_id
            request = _request(name, prompt, num_tokens, asked)
            text = _text(served, prompt)
            writers.append(_writer(served, request, text, asked, ends=natural == num_tokens))
    except BaseException:
        for writer in writers:
            writer.cancel()
        raise
    return writers


def _request(
    name: str, prompt: bytes, num_tokens: int, asked: GenerationOptions
) -> CompletionRequest:
    return CompletionRequest(
        name,
        prompt,
        num_tokens,
        asked.sampling,
        asked.ignore_eos,
        asked.salt,
        asked.travels.source,
        KEEP_S if asked.travels.keeps else 0.0,
    )


def _writer(
    served: ServedEngine,
    request: CompletionRequest,
    text: TextStream | None,
    asked: GenerationOptions,
    *,
    ends: bool,
) -> Writer:
    return Writer(
        served.engine,
        request,
        text,
        stream_interval=asked.stream_interval if asked.stream else request.max_tokens,
        stops=asked.stops,
        ends=ends,
        most_cached=asked.travels.cached_tokens,
    )


def _check(served: ServedEngine, asked: GenerationOptions, limit: int, num_choices: int) -> None:
    """Raises InvalidRequest."""
    if num_choices > MAX_CHOICES:
        field = "prompt" if asked.choices == 1 else "n"
        raise InvalidRequest(field, f"asks for {num_choices} choices, over {MAX_CHOICES}")
    if asked.min_tokens > limit:
        raise InvalidRequest("min_tokens", f"is {asked.min_tokens}, over max_tokens {limit}")
    if asked.min_tokens and not served.invents:
        raise InvalidRequest("min_tokens", f"is not supported here, got {asked.min_tokens}")


def check_travels(served: ServedEngine, asked: GenerationOptions, num_choices: int) -> None:
    """Raises InvalidRequest."""
    if not asked.travels.keeps and asked.travels.source is None:
        return
    if not served.engine.transfers:
        raise InvalidRequest(PARAMS, "is not supported: this worker has no --kv-transfer")
    if num_choices != 1:
        raise InvalidRequest(PARAMS, f"is for one prompt and one choice, got {num_choices}")


def _text(served: ServedEngine, prompt: bytes) -> TextStream | None:
    if served.tokenizer is None:
        return None
    return served.tokenizer.stream(np.frombuffer(prompt, "<u4").tolist())
