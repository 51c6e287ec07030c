"""An engine that costs next to nothing: it answers each request at once, with the same words.
Streams of APART tokens come one by one."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httptools
import orjson
import tokenizers
from tokenizers import pre_tokenizers, trainers

from app.http.server import run
from app.local.redis_server import LOOPBACK
from app.tokens.renderer import Renderer, load
from workers.engines.sim.text import FOLDER, SPECIAL, WORDS

CHUNKS, APART = 16, 256
STEP_S = 0.002
"""Seconds between tokens that come one by one."""
_USAGE = (
    b'"usage":{"prompt_tokens":64,"completion_tokens":16,"total_tokens":80,'
    b'"prompt_tokens_details":{"cached_tokens":0}}'
)
_CHUNK = (
    b'data: {"id":"c","object":"text_completion","created":1,"model":"bench",'
    b'"choices":[{"index":0,"text":" word","finish_reason":null}]}\n\n'
)
_CHUNK_WITH_ID = _CHUNK.replace(b"null}", b'null,"token_ids":[300]}')
_LAST = _CHUNK.replace(b"null", b'"stop"') + (
    b'data: {"id":"c","object":"text_completion","choices":[],%s}\n\ndata: [DONE]\n\n' % _USAGE
)
_WHOLE = (
    b'{"id":"c","object":"text_completion","created":1,"model":"bench","choices":'
    b'[{"index":0,"text":"a word","finish_reason":"stop"}],%s}' % _USAGE
)


class _Engine(asyncio.Protocol):
    """Answers each request at once. renderer: of what it is asked to tokenize."""

    def __init__(self, renderer: Renderer | None) -> None:
        self._renderer = renderer
        self._parser = httptools.HttpRequestParser(self)
        self._path, self._body = b"", b""
        self._answering: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._path, self._body = url, b""

    def on_body(self, piece: bytes) -> None:
        self._body += piece

    def on_message_complete(self) -> None:
        if self._path == b"/tokenize":
            self._start(self._tokenize(self._body))
        else:
            self._answer(self._body)

    def connection_lost(self, _: Exception | None) -> None:
        for task in self._answering:
            task.cancel()

    def _start(self, answering: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(answering)
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    def _answer(self, body: bytes) -> None:
        if b'"stream":true' not in body:
            self._whole(_WHOLE)
            return
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
            b"\r\n"
        )
        chunk = _CHUNK_WITH_ID if b'"return_token_ids":true' in body else _CHUNK
        if b'"max_tokens":%d' % APART in body:
            self._start(self._apart(chunk))
            return
        for _ in range(CHUNKS):
            self._transport.write(_chunked(chunk))
        self._transport.write(_END)

    async def _apart(self, chunk: bytes) -> None:
        for _ in range(APART):
            self._transport.write(_chunked(chunk))
            await asyncio.sleep(STEP_S)
        self._transport.write(_END)

    def _whole(self, body: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self._transport.write(head % len(body) + body)

    async def _tokenize(self, body: bytes) -> None:
        assert self._renderer is not None
        asked = orjson.loads(body)
        if "messages" in asked:
            ids = await self._renderer.of_chat(asked)
        else:
            ids = await self._renderer.of_text(asked["prompt"])
        self._whole(orjson.dumps({"tokens": ids}, option=orjson.OPT_SERIALIZE_NUMPY))


def _chunked(piece: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(piece), piece)


_END = _chunked(_LAST) + b"0\r\n\r\n"


@contextmanager
def word_tokenizer() -> Iterator[str]:
    """The folder of a tokenizer in which each of the simulated engine's words is one token.

    Most words of a text are one token of a true tokenizer; of the engine's own, every byte is one.
    """
    tokenizer = tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        special_tokens=[*SPECIAL], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 2, trainer)
    with TemporaryDirectory() as folder:
        shutil.copytree(FOLDER, folder, dirs_exist_ok=True)
        tokenizer.save(str(Path(folder) / "tokenizer.json"))
        yield folder


def engine_forever(tokenizer: str, port: int) -> None:
    """tokenizer: its folder; "": nothing is tokenized."""
    renderer = load(tokenizer) if tokenizer else None

    async def answer() -> None:
        loop = asyncio.get_running_loop()
        listening = await loop.create_server(lambda: _Engine(renderer), LOOPBACK, port)
        await listening.serve_forever()

    run(answer())
