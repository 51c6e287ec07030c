"""Answers of an engine to HTTP requests, piece by piece, whatever form they are then given."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import orjson

from app.core.errors import InvalidRequest
from app.simulation.steps import Finished
from workers.engines.base import (
    CompletionRequest,
    Engine,
    EngineStoppedError,
    TextStream,
    Tokenizer,
)
from workers.server.members import KEEP_S, MAX_CHOICES, PARAMS, GenerationOptions, params_of

LONG_OUTPUT_TOKENS = 1024
"""Decoding this many tokens takes milliseconds, 100,000 most of a second."""
NATURAL_TOKENS = 128
"""Tokens after which an answer to a chat with made-up words ends, unless it is to go on."""
STOPPING = "stopping"
"""Code of the error of an engine that has stopped."""


@dataclass(frozen=True, slots=True)
class ServedEngine:
    """The engine behind an HTTP interface.

    names: of its model. invents: its words are made up, and have no end of their own.
    """

    engine: Engine
    names: Sequence[str]
    tokenizer: Tokenizer | None = None
    invents: bool = False


class StopStrings:
    """Text of which as much is held back as the longest stop string may begin with, as in vLLM.

    stop: the string that ended the text, or None.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._most_held = max(map(len, strings), default=1) - 1
        self._held = ""
        self.stop: str | None = None

    def push(self, text: str) -> str:
        """Returns the text that is certain to come before any stop string."""
        self._held += text
        matches = []
        for string in self._strings:
            # What was held has been searched, but for what may end in `text`.
            new = max(0, len(self._held) - len(text) - len(string) + 1)
            begin = self._held.find(string, new)
            if begin >= 0:
                matches.append((begin, string))
        at, self.stop = min(matches, default=(max(0, len(self._held) - self._most_held), None))
        said, self._held = self._held[:at], self._held[at:]
        return said

    def end(self) -> str:
        """Returns what was held back, as no more text is to come."""
        return "" if self.stop is not None else self._held


def now_s() -> int:
    """Returns the date of an answer."""
    return int(time.time())


@dataclass(frozen=True, slots=True)
class Piece:
    """The next part of one of the choices. finish_reason: `stop` or `length` with the last one."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class ServedTokens:
    """Numbers of tokens of an answer.

    cached_tokens: of the prompts, by tier; None: unknown, as a stop string ended the answer first.
    """

    prompt_tokens: int
    output_tokens: int
    cached_tokens: dict[str, int] | None


class Writer:
    """One choice of an answer, submitted on construction; `cancel` it in every case.

    ends: whether the last token that the request may have is the natural end of the answer.
    most_cached: tokens of the prompt that count as cached at most; None: all that are.
    """

    def __init__(
        self,
        engine: Engine,
        request: CompletionRequest,
        text: TextStream | None,
        *,
        stream_interval: int,
        stops: Sequence[str] = (),
        ends: bool = False,
        most_cached: int | None = None,
    ) -> None:
        self.generation = engine.complete(request, stream_interval=stream_interval)
        self._prompt_tokens = len(request.prompt) // 4
        self._text = text
        self._stops = StopStrings(stops)
        self._ends = ends
        self._most_cached = most_cached
        self.num_tokens = 0
        self.finished: Finished | None = None

    def cancel(self) -> None:
        self.generation.cancel()

    async def pieces(self, index: int) -> AsyncIterator[Piece]:
        """Raises EngineStoppedError if the engine stops before the request is complete."""
        async for output in self.generation:
            is_last = output.finished is not None
            if len(output.token_ids) < LONG_OUTPUT_TOKENS:
                text, num_tokens = self._read(output.token_ids, is_last)
            else:
                text, num_tokens = await asyncio.to_thread(self._read, output.token_ids, is_last)
            self.num_tokens += num_tokens
            self.finished = output.finished
            yield Piece(index, text, output.token_ids[:num_tokens], self._reason())
            if self._stops.stop is not None:
                self.cancel()
                break

    def usage(self) -> ServedTokens:
        cached = None if self.finished is None else _by_tier(self.finished, self._most_cached)
        return ServedTokens(self._prompt_tokens, self.num_tokens, cached)

    def _read(self, token_ids: list[int], is_last: bool) -> tuple[str, int]:
        """Returns the tokens' text, and how many of them were read until a stop string came."""
        if self._text is None:
            return "", len(token_ids)
        texts = []
        for number, token in enumerate(token_ids, start=1):
            texts.append(self._stops.push(self._text.push(token)))
            if self._stops.stop is not None:
                return "".join(texts), number
        if is_last:
            texts += [self._stops.push(self._text.end()), self._stops.end()]
        return "".join(texts), len(token_ids)

    def _reason(self) -> str | None:
        if self._stops.stop is not None or (self._ends and self.finished is not None):
            return "stop"
        return self.finished.finish_reason if self.finished is not None else None


class Form(Protocol):
    """The members and events in which an answer is written."""

    def whole(self, choices: Sequence[Piece], usage: ServedTokens) -> dict[str, object]: ...

    def piece(self, piece: Piece) -> bytes:
        """Returns the piece as events of a stream."""

    def end(self, usage: ServedTokens) -> bytes:
        """Returns the events that end a stream."""


def event(content: object) -> bytes:
    return b"data: %b\n\n" % orjson.dumps(content)


class AnswerChoices:
    """The choices of one answer; `cancel` it in every case.

    per_prompt: choices in a row that have one prompt, whose tokens count once.
    """

    def __init__(self, writers: Sequence[Writer], form: Form, per_prompt: int = 1) -> None:
        self._writers = writers
        self._form = form
        self._per_prompt = per_prompt

    def cancel(self) -> None:
        for writer in self._writers:
            writer.cancel()

    async def events(self) -> AsyncIterator[bytes]:
        try:
            async for piece in self._pieces():
                if events := self._form.piece(piece):
                    yield events
        except EngineStoppedError as error:  # the status is already sent
            told = {"code": STOPPING, "type": "api_error", "message": str(error), "param": None}
            yield event({"error": told})
        else:
            yield self._form.end(self._usage())

    async def whole(self) -> bytes:
        """Raises EngineStoppedError if the engine stops before it is complete."""
        choices: dict[int, Piece] = {}
        async for piece in self._pieces():
            before = choices.get(piece.index, Piece(piece.index, "", []))
            text, token_ids = before.text + piece.text, before.token_ids + piece.token_ids
            choices[piece.index] = Piece(piece.index, text, token_ids, piece.finish_reason)
        usage = self._usage()
        members = self._form.whole([choices[index] for index in sorted(choices)], usage)
        if kept := self._writers[0].generation.kept:
            members[PARAMS] = params_of(kept, sum((usage.cached_tokens or {}).values()))
        return orjson.dumps(members)

    async def _pieces(self) -> AsyncIterator[Piece]:
        """Yields the pieces of all choices, as they come."""
        if len(self._writers) == 1:
            async for piece in self._writers[0].pieces(0):
                yield piece
            return
        streams = [writer.pieces(index) for index, writer in enumerate(self._writers)]
        nexts = {asyncio.ensure_future(anext(stream, None)): stream for stream in streams}
        try:
            while nexts:
                done, _ = await asyncio.wait(nexts, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    stream = nexts.pop(task)
                    next_piece = task.result()
                    if next_piece is not None:
                        nexts[asyncio.ensure_future(anext(stream, None))] = stream
                        yield next_piece
        finally:
            for task in nexts:
                task.cancel()

    def _usage(self) -> ServedTokens:
        usages = [writer.usage() for writer in self._writers]
        prompts = usages[:: self._per_prompt]
        cached = [usage.cached_tokens for usage in prompts if usage.cached_tokens is not None]
        return ServedTokens(
            sum(usage.prompt_tokens for usage in prompts),
            sum(usage.output_tokens for usage in usages),
            {tier: sum(each[tier] for each in cached) for tier in cached[0]}
            if len(cached) == len(prompts)
            else None,
        )


def _by_tier(finished: Finished, most: int | None) -> dict[str, int]:
    if most is not None and most < finished.cached_tokens:
        return {"device": most, "host": 0, "disk": 0}
    return {
        "device": finished.cached_tokens - finished.host_tokens - finished.disk_tokens,
        "host": finished.host_tokens,
        "disk": finished.disk_tokens,
    }


def written(
    served: ServedEngine,
    prompts: Sequence[bytes],
    asked: GenerationOptions,
    request_id: str,
    *,
    limit: int,
    natural: int | None = None,
) -> list[Writer]:
    """Submits as many choices as are asked for of each prompt, one prompt after another.

    limit: of tokens, each. natural: tokens after which a choice ends by itself; None: only the
    engine knows. Raises InvalidRequest, and as Engine.complete.
    """
    num_choices = len(prompts) * asked.choices
    if num_choices > MAX_CHOICES:
        field = "prompt" if asked.choices == 1 else "n"
        raise InvalidRequest(field, f"asks for {num_choices} choices, over {MAX_CHOICES}")
    if asked.min_tokens > limit:
        raise InvalidRequest("min_tokens", f"is {asked.min_tokens}, over max_tokens {limit}")
    if asked.min_tokens and not served.invents:
        raise InvalidRequest("min_tokens", f"is not supported here, got {asked.min_tokens}")
    check_travels(served, asked, num_choices)
    if natural is not None:
        natural = max(natural, asked.min_tokens)
    num_tokens = limit if natural is None else min(limit, natural)
    writers: list[Writer] = []
    try:
        for number in range(num_choices):
            prompt, text = prompts[number // asked.choices], None
            if served.tokenizer is not None:
                text = served.tokenizer.stream(np.frombuffer(prompt, "<u4").tolist())
            request = CompletionRequest(
                f"{request_id}-{number}" if number else request_id,
                prompt,
                num_tokens,
                asked.sampling,
                asked.ignore_eos,
                asked.salt,
                asked.travels.source,
                KEEP_S if asked.travels.keeps else 0.0,
            )
            writers.append(
                Writer(
                    served.engine,
                    request,
                    text,
                    stream_interval=asked.stream_interval if asked.stream else num_tokens,
                    stops=asked.stops,
                    ends=natural == num_tokens,
                    most_cached=asked.travels.cached_tokens,
                )
            )
    except BaseException:
        for writer in writers:
            writer.cancel()
        raise
    return writers


def check_travels(served: ServedEngine, asked: GenerationOptions, num_choices: int) -> None:
    """Raises InvalidRequest if KV is to travel that cannot."""
    if not asked.travels.keeps and asked.travels.source is None:
        return
    if not served.engine.transfers:
        raise InvalidRequest(PARAMS, "is not supported: this worker has no --kv-transfer")
    if num_choices != 1:
        raise InvalidRequest(PARAMS, f"is for one prompt and one choice, got {num_choices}")
