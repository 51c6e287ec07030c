"""The HTTP interface of a worker, with the path of completions, in the format of the OpenAI API.

The load test sends prompts as `application/octet-stream`: raw little-endian u32, with the other
fields in the query.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress

import numpy as np
import orjson
from numpy.typing import NDArray
from starlette.requests import ClientDisconnect

from app.core.errors import InvalidRequest, PromptTooLarge, Unauthorized, shown
from app.core.hashing import token_bytes
from app.core.types import new_id
from app.http.client import EVENTS, JSON, Exchange
from app.http.errors import OF_ALL_SERVERS, OVERLOADED, ErrorTable, Meaning
from app.http.json_body import JsonBody
from app.http.keys import HEALTH, Keys
from app.http.paths import Server
from app.simulation.steps import PromptTooLargeError
from app.tokens import Overloaded, TokenizerThreads
from workers.engines.base import EngineStoppedError, QueueFullError, Tokenizer
from workers.metrics import registry_of
from workers.server.answer import STOPPING, AnswerChoices, ServedEngine, check_travels, written
from workers.server.completions import CompletionForm
from workers.server.members import (
    GENERATION,
    KEEP_S,
    MAX_CHOICES,
    PARAMS,
    GenerationOptions,
    check_members,
    generated,
    params_of,
)

log = logging.getLogger(__name__)

DEFAULT_MAX_TOKENS = 16
"""Tokens that the OpenAI API assumes when a request does not say."""

RAW_TOKENS = b"application/octet-stream"
RAW_TOKEN_BYTES = 4
JSON_TOKEN_BYTES = 12
"""Ten digits, a comma and a space."""
TEXT_TOKEN_BYTES = 32
"""A word of five non-Latin letters, each escaped in six bytes."""
ROOM_BYTES = 65_536
"""Room in a body for everything but the prompt."""
_COMPLETION = GENERATION | {"prompt"}
ERRORS = ErrorTable(
    {
        **OF_ALL_SERVERS,
        Unauthorized: Meaning(401, "unauthorized", "authentication_error"),
        PromptTooLargeError: OF_ALL_SERVERS[PromptTooLarge],
        **dict.fromkeys((QueueFullError, Overloaded), Meaning(429, "queue_full", OVERLOADED)),
        EngineStoppedError: Meaning(503, STOPPING, OVERLOADED),
    },
    "worker",
    lasting=(EngineStoppedError,),
)


class WorkerApp(Server):
    """The HTTP interface of an engine; the caller runs the engine.

    key: that requests must carry, but for /health. metrics_key: that opens /metrics alone. "":
    none.
    """

    def __init__(self, served: ServedEngine, *, key: str = "", metrics_key: str = "") -> None:
        keys = Keys(key, metrics_key=metrics_key, open_paths=(HEALTH,))
        super().__init__(ERRORS, registry_of(served.engine), keys)
        self._served = served
        self.add("GET", HEALTH, self._health)
        self.add("POST", "/v1/completions", self._complete)

    async def _health(self, client: Exchange) -> None:
        if self._served.engine.running:
            await client.answer({"status": "ok"})
        else:
            await client.answer({"status": "the engine is not running"}, 503)

    async def _complete(self, client: Exchange) -> None:
        served = self._served
        fields, prompts = await _read(client, served)
        check_members(fields, _COMPLETION)
        asked = generated(fields)
        if asked.travels.held_only:
            await hand_on(client, served, prompts, asked)
        else:
            await respond(client, _completion(served, prompts, asked), streams=asked.stream)


async def respond(client: Exchange, answer: AnswerChoices, *, streams: bool) -> None:
    """Sends the answer, as a stream if that is asked for.

    Raises EngineStoppedError, and ClientDisconnect if the client does not wait for the answer.
    """
    try:
        async with client.watched():
            if streams:
                await client.start(200, [EVENTS])
                async for events in answer.events():
                    await client.send(events)
                await client.send(b"", last=True)
                return
            # Computed before anything is sent, so that the status reflects the outcome.
            body = await answer.whole()
    finally:
        answer.cancel()
    if client.is_gone:
        raise ClientDisconnect
    await client.answer_whole(body, 200, JSON)


async def hand_on(
    client: Exchange, served: ServedEngine, prompts: Sequence[bytes], asked: GenerationOptions
) -> None:
    """Keeps what is held of a prompt for another worker, and says where. Raises InvalidRequest."""
    check_travels(served, asked, len(prompts))
    kept = await served.engine.hand_on(prompts[0], KEEP_S, asked.salt)
    await client.answer({PARAMS: params_of(kept, kept.num_tokens)} if kept else {})


def _completion(
    served: ServedEngine, prompts: list[bytes], asked: GenerationOptions
) -> AnswerChoices:
    """Submits a completion. Raises InvalidRequest, and as Engine.complete."""
    request_id = asked.request_id or f"cmpl-{new_id()}"
    limit = asked.max_tokens or DEFAULT_MAX_TOKENS
    writers = written(served, prompts, asked, request_id, limit=limit)
    form = CompletionForm(request_id, served.names[0], choices=len(writers))
    return AnswerChoices(writers, form, per_prompt=asked.choices)


async def _read(client: Exchange, served: ServedEngine) -> tuple[Mapping[str, object], list[bytes]]:
    """Returns the members of a body, and the prompts in it."""
    is_raw = client.raw_headers.get(b"content-type", b"").lower().startswith(RAW_TOKENS)
    if is_raw:
        token_size = RAW_TOKEN_BYTES
    else:
        token_size = JSON_TOKEN_BYTES if served.tokenizer is None else TEXT_TOKEN_BYTES
    limit = served.engine.max_context_tokens * token_size + ROOM_BYTES
    body = await client.read(limit)
    if is_raw:
        if len(body) % 4:
            raise InvalidRequest("prompt", f"{len(body)} bytes are not a whole number of u32")
        return _query_fields(client.query_params), [_not_empty(body)]
    fields = dict((await JsonBody.read(body)).fields)
    return fields, [await _ids_of(each, served) for each in _prompts_in(fields.get("prompt"))]


def _prompts_in(given: object) -> list[object]:
    """Returns each of the texts or lists of token ids, be it one or several. Raises InvalidRequest
    if there are too many, before any is looked at."""
    is_batch = isinstance(given, list) and given and isinstance(given[0], list | str | np.ndarray)
    prompts = given if isinstance(given, list) and is_batch else [given]
    if len(prompts) > MAX_CHOICES:
        raise InvalidRequest("prompt", f"asks for {len(prompts)} choices, over {MAX_CHOICES}")
    return prompts


async def _ids_of(prompt: object, served: ServedEngine) -> bytes:
    """Returns a prompt's ids, little-endian u32. Raises InvalidRequest."""
    if isinstance(prompt, str):
        if served.tokenizer is None:
            raise InvalidRequest("prompt", "is text, but this worker has no tokenizer")
        prompt = await encoded(served.tokenizer, prompt)
    return _not_empty(_prompt_bytes(prompt))


def _not_empty(prompt: bytes) -> bytes:
    if not prompt:
        raise InvalidRequest("prompt", "is empty")
    return prompt


def _prompt_bytes(prompt: object) -> bytes:
    if isinstance(prompt, np.ndarray):
        with suppress(InvalidRequest):
            return token_bytes(prompt)
        prompt = prompt.tolist()
    if not isinstance(prompt, list):
        raise InvalidRequest("prompt", f"needs a list of token ids, got {type(prompt).__name__}")
    # In Python a boolean is an int, but it is not a token.
    if set(map(type, prompt)) <= {int}:
        with suppress(InvalidRequest):
            return token_bytes(prompt)
    bad = next(t for t in prompt if type(t) is not int or not 0 <= t < 1 << 32)
    raise InvalidRequest("prompt", f"{shown(bad)} is not a token id")


def _query_fields(query: Mapping[str, str]) -> dict[str, object]:
    """Returns query fields as JSON would have them, if they can be converted."""
    fields: dict[str, object] = dict(query)
    for name in query.keys() - {"request_id"}:
        with suppress(orjson.JSONDecodeError):
            fields[name] = orjson.loads(query[name])
    return fields


MAX_BYTES = 1 << 20
"""Bytes of a text, which takes two hundred times its size in memory, and two seconds that nobody
can cut short."""
_THREADS = TokenizerThreads()


async def encoded(tokenizer: Tokenizer, text: str) -> NDArray[np.uint32]:
    """Returns the ids of a prompt. Raises InvalidRequest, Overloaded."""
    if len(text) > MAX_BYTES or len(text.encode(errors="replace")) > MAX_BYTES:
        raise InvalidRequest("prompt", f"has over {MAX_BYTES} bytes: send token ids")
    return await _THREADS.run(len(text), lambda: np.array(tokenizer.encode(text), "<u4"))


async def decoded(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Returns the text of token ids. Raises Overloaded."""
    return await _THREADS.run(len(ids), lambda: tokenizer.decode(ids))
