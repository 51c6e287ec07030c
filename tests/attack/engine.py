"""An engine that answers as none should: each request says how by its `user`, and by its text where
it asks for tokens."""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import orjson

from app.core.keys import Keyspace
from app.core.worker_report import DEFAULT_SPEED, ForwardPassMetrics
from app.state.client import RedisClient
from app.state.scripts import ScriptRunner
from tests.eventually import eventually
from tests.fake_worker import running, worker_info
from workers.agent.agent import Agent, AgentSettings

Writer = asyncio.StreamWriter

MB = 2**20
LEASE_TTL_S = 20.0
MOST_BYTES = 256 * MB
"""That one answer sends; how many of them are taken is for the door to say."""
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER that resets a connection on closing."""
_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")
_HOW = {
    "/tokenize": re.compile(rb'"prompt" *: *"([^"]*)"'),
    "": re.compile(rb'"user" *: *"([^"]*)"'),
}


def _whole(usage: object, text: str = "hello") -> bytes:
    """An answer in one body."""
    choice = {"index": 0, "text": text, "finish_reason": "stop"}
    body = orjson.dumps({"id": "x", "object": "text_completion", "choices": [choice]})
    body = body[:-1] + b',"usage":' + (usage if isinstance(usage, bytes) else orjson.dumps(usage))
    length = b"content-length: %d" % (len(body) + 1)
    return _head(b"content-type: application/json", length) + body + b"}"


def _head(*lines: bytes, status: bytes = b"200") -> bytes:
    return b"\r\n".join((b"HTTP/1.1 %b X" % status, *lines, b"", b""))


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _events(*data: bytes) -> bytes:
    text = b"".join(b"data: %b\n\n" % one for one in (*data, b"[DONE]"))
    return _STREAM + _chunk(text) + b"0\r\n\r\n"


def _for_ever(begin: bytes, again: bytes) -> Callable[[], Iterator[bytes]]:
    def parts() -> Iterator[bytes]:
        yield begin
        for _ in range(MOST_BYTES // len(again)):
            yield again

    return parts


_CHUNKED = _head(b"transfer-encoding: chunked")
_STREAM = _head(b"content-type: text/event-stream", b"transfer-encoding: chunked")
_COUNTS = {"prompt_tokens": 3, "completion_tokens": 1}
_DEEP = b"[" * 1000 + b"]" * 1000
_KB64 = b"x" * 65536

ANSWERS: Mapping[str, bytes | Callable[[], Iterator[bytes]]] = {
    "good": _whole(_COUNTS),
    "good stream": _events(b'{"choices":[{"index":0,"text":"hello"}]}'),
    "usage negative": _whole({"prompt_tokens": -3, "completion_tokens": -1}),
    "usage text": _whole({"prompt_tokens": "3", "completion_tokens": "1"}),
    "usage huge": _whole({"prompt_tokens": 3, "completion_tokens": 10**18}),
    "usage huge cached": _whole(_COUNTS | {"cache_read_input_tokens": 10**18}),
    "usage text cached": _whole(
        _COUNTS | {"cache_read_input_tokens": 1, "cache_creation_input_tokens": "1"}
    ),
    "usage beyond integers": _whole(b'{"prompt_tokens":3,"completion_tokens":1e999}'),
    "usage array": _whole([1, 2]),
    "usage deep": _whole(b'{"prompt_tokens":%b}' % _DEEP),
    "usage nested": _whole({"prompt_tokens": {"prompt_tokens": 3}}),
    "events of no objects": _events(b"5", b"null", b"{", b'{"choices":5}', b'{"choices":[[]]}'),
    "events deep": _events(b'{"choices":%b,"usage":%b}' % (_DEEP, _DEEP)),
    "events with false ids": _events(
        b'{"choices":[{"text":"a","token_ids":[99999999999999999999]}]}',
        b'{"choices":[{"text":"a","token_ids":[1,,2 3]}],"usage":"none"}',
    ),
    "event without end": _for_ever(_STREAM + _chunk(b"data: "), _chunk(_KB64)),
    "lines without end": _for_ever(_STREAM, _chunk(b": x\n" * 16384)),
    "status 600": _head(b"content-length: 0", status=b"600"),
    "status 099": _head(b"content-length: 0", status=b"099"),
    "status 000": _head(b"content-length: 0", status=b"000"),
    "status 101": _head(b"upgrade: x", b"connection: upgrade", status=b"101"),
    "status 204 with a body": _head(b"content-length: 5", status=b"204") + b"hello",
    "trailers without end": _for_ever(
        _CHUNKED + _chunk(b"hello") + b"0\r\n", b"x-late: %b\r\n" % (b"y" * 1000)
    ),
    "extensions without end": _for_ever(_CHUNKED + b"5;", b"e" * 65536),
    "head without end": _for_ever(_head()[:-2], b"x: %b\r\n" % (b"y" * 1000)),
    "continues without end": _for_ever(b"", _head(status=b"100")),
    "body without end": _for_ever(_CHUNKED, _chunk(_KB64)),
    "two lengths": _head(b"content-length: 5", b"content-length: 6") + b"hello!",
    "length and chunks": _head(b"content-length: 5", b"transfer-encoding: chunked") + b"hello",
    "shorter than it says": _head(b"content-length: 50") + b"hello",
    "longer than it says": _whole(_COUNTS) + b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx",
    "no HTTP": b"SSH-2.0-OpenSSH_9.6\r\n",
    "header of another answer": _head(b"x: a\r\rcontent-length: 5", b"content-length: 0"),
    "nothing": b"",
}
"""Behind each, the connection is closed."""


@asynccontextmanager
async def hostile_worker(
    redis: RedisClient, keyspace: Keyspace, name: str, model: str
) -> AsyncIterator[HostileEngine]:
    """A worker of `model` with such an engine, until the context ends."""
    async with HostileEngine.listening() as engine:
        info = worker_info(name, kv_total_blocks=100_000)
        info = replace(info, address=engine.url, models=(model,), engine="vllm 0.32.0")
        measured = ForwardPassMetrics(kv_total_blocks=info.kv_total_blocks)
        agent = Agent(
            ScriptRunner(redis, 5.0),
            keyspace,
            replace(info, max_model_len=4096),
            AgentSettings(LEASE_TTL_S, info.kv_total_blocks, 1),
            lambda: (measured, DEFAULT_SPEED),
        )
        async with running(agent):
            yield engine
            await agent.stop()


class HostileEngine:
    """requests: how many came, by path and how they were answered. num_open: connections."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.url = ""
        self._writers: set[Writer] = set()

    @property
    def num_open(self) -> int:
        return len(self._writers)

    @classmethod
    @asynccontextmanager
    async def listening(cls) -> AsyncIterator[HostileEngine]:
        """Listens on a port of 127.0.0.1 of its own."""
        engine = cls()
        server = await asyncio.start_server(engine._serve, "127.0.0.1", 0)
        engine.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield engine
        finally:
            server.close()
            for writer in engine._writers:
                writer.transport.abort()

            async def num_open() -> int:
                return engine.num_open

            await eventually(num_open, lambda number: number == 0)

    async def _serve(self, reader: asyncio.StreamReader, writer: Writer) -> None:
        self._writers.add(writer)
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError, TimeoutError):
                while await self._answer(reader, writer):
                    pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: Writer) -> bool:
        """Whether the connection is kept."""
        head = await reader.readuntil(b"\r\n\r\n")
        length = _LENGTH.search(head)
        body = await reader.readexactly(int(length[1])) if length else b""
        path = head.split(b" ", 2)[1].decode()
        match = _HOW.get(path, _HOW[""]).search(body)
        how = match[1].decode() if match else "good"
        self.requests[f"{path} {how}"] += 1
        if how == "hangs":
            await reader.read()
        elif how == "resets":
            raw: socket.socket = writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        else:
            answer = ANSWERS.get(how, ANSWERS["good"])
            for part in (answer,) if isinstance(answer, bytes) else answer():
                writer.write(part)
                await writer.drain()
        return how.startswith("good")
