"""What a connection may cost, from raw sockets against a real server."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from app.http import protocol
from app.http.client import watched
from app.http.protocol import MAX_HEAD_BYTES, MAX_JOINED_BYTES, Connections, LingeringTransport
from app.http.server import listen, serve

Answer = tuple[int, Any]


@asynccontextmanager
async def serving(on_refused=lambda _: None):
    """Address of a server that answers with the size of a body, or refuses it unread."""
    app = FastAPI()

    @app.get("/health")
    async def health():
        return "ok"

    @app.post("/size")
    async def size(request: Request):
        return len(await request.body())

    @app.post("/refused")
    async def refused():
        return JSONResponse("refused", 413, {"connection": "close"})

    with listen("127.0.0.1", 0) as socket:
        task = asyncio.create_task(serve(app, socket, on_refused=on_refused))
        try:
            async with asyncio.timeout(30.0):
                yield socket.getsockname()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def ask(address, parts):
    """What a connection is answered that sends these parts, and then reads to the end."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        return int(head.split()[1]), json.loads(body)
    finally:
        writer.close()


def lines(count, size):
    """That many headers or trailers, of that many bytes each."""
    return b"".join([b"x-%05d: %s\r\n" % (n, b"v" * (size - 11)) for n in range(count)])


GET = b"GET /health HTTP/1.1\r\nhost: x\r\n"
CHUNKED = (
    b"POST /size HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
)


@pytest.mark.parametrize(
    "headers",
    [lines(1000, 100), lines(100_000, 12), b"x: " + b"v" * 10_000_000, b"x" * 10_000_000],
    ids=["many", "small", "one large value", "one large name"],
)
async def test_headers_over_64_kib_are_refused(headers):
    async with serving() as address:
        status, answer = await ask(address, [GET + headers + b"\r\n\r\n"])
        assert (status, answer["error"]["code"]) == (431, "headers_too_large")
        status, _ = await ask(address, [GET + lines(600, 100), b"connection: close\r\n\r\n"])
        assert status == 200


async def test_line_ends_before_any_request_are_counted_too():
    async with serving() as address:
        status, _ = await ask(address, [b"\r\n" * 20_000] * 2)
    assert status == 431


async def test_headers_that_trickle_in_are_counted_together():
    async with serving() as address:
        status, _ = await ask(address, [GET, *[lines(10, 100)] * 100, b"\r\n"])
    assert status == 431


async def test_requests_that_are_not_http_are_counted_and_seldom_logged(caplog):
    refused = []
    async with serving(refused.append) as address:
        for _ in range(30):
            assert (await ask(address, [b"nonsense\r\n\r\n"]))[0] == 400
        await ask(address, [GET + lines(1000, 100)])
        assert refused == ["bad_request"] * 30 + ["headers_too_large"]
        warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
        assert 1 <= len(warnings) <= 5


async def test_a_warning_says_how_many_before_it_went_unsaid(caplog):
    async with serving() as address:
        for _ in range(4):
            await ask(address, [b"nonsense\r\n\r\n"])
        await asyncio.sleep(1 / protocol.COMPLAINTS_PER_S)
        await ask(address, [b"nonsense\r\n\r\n"])
    assert caplog.records[-1].getMessage() == (
        "Invalid HTTP request received. (3 warnings before it went unsaid)"
    )


async def test_a_long_url_is_refused():
    async with serving() as address:
        for size in (protocol.MAX_URL_BYTES + 1, 1_000_000):
            request = b"GET /%b HTTP/1.1\r\nhost: x\r\n\r\n" % (b"a" * size)
            status, answer = await ask(address, [request])
            assert (status, answer["error"]["code"]) == (414, "url_too_long")


@pytest.mark.parametrize(
    "framing",
    [
        b"5\r\nhello\r\n0\r\n" + lines(20_000, 100) + b"\r\n",
        b"5;" + b"e" * 2_000_000 + b"\r\nhello\r\n0\r\n\r\n",
        b"".join([b"1;%b\r\nx\r\n" % (b"e" * 1000)] * 1000) + b"0\r\n\r\n",
    ],
    ids=["trailers", "one large extension", "many extensions"],
)
async def test_what_frames_a_body_counts_as_headers_do(framing):
    async with serving() as address:
        assert (await ask(address, [CHUNKED, framing]))[0] == 431


async def test_a_body_in_chunks_of_one_byte_is_read():
    size = 3 * MAX_HEAD_BYTES
    async with serving() as address:
        assert await ask(address, [CHUNKED, b"1\r\nx\r\n" * size, b"0\r\n\r\n"]) == (200, size)


async def test_a_refusal_reaches_a_client_that_is_still_sending_its_body():
    size = 20_000_000
    head = b"POST /refused HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size
    async with serving() as address:
        for _ in range(5):
            assert await ask(address, [head, *[b"x" * 100_000] * (size // 100_000)]) == (
                413,
                "refused",
            )


async def test_a_body_that_is_not_read_may_come_later_but_not_never():
    head = b"POST /health HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n"
    async with serving() as address:
        reader, writer = await asyncio.open_connection(*address)
        for number in range(2):
            writer.write(head)
            assert b" 405 " in await reader.readuntil(b"\r\n\r\n")
            assert b"Not Allowed" in await reader.readuntil(b"}")
            if not number:
                writer.write(b"123456789")
        async with asyncio.timeout(protocol.HEAD_TIMEOUT_S + 10.0):
            assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize("begun", [b"", b"G", GET, b"POST /size HTTP/1.1\r\nhost: x\r\n"])
async def test_a_connection_without_complete_headers_is_closed_in_time(begun, monkeypatch):
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.1)
    async with serving() as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(begun)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        writer.close()


async def test_a_later_request_on_a_connection_has_the_same_time(monkeypatch):
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.2)
    async with serving() as address:
        reader, writer = await asyncio.open_connection(*address)
        for pause_s in (0.0, 0.4):
            await asyncio.sleep(pause_s)  # idle between requests, as keep-alive allows
            writer.write(GET + b"\r\n")
            assert (await reader.readuntil(b'"ok"')).startswith(b"HTTP/1.1 200")
        writer.write(GET)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        writer.close()


async def test_past_the_limit_the_connection_that_is_idle_for_longest_makes_room(monkeypatch):
    monkeypatch.setattr(protocol, "max_connections", lambda: 4)
    async with serving() as address:
        at_work = await asyncio.open_connection(*address)
        at_work[1].write(CHUNKED.replace(b"\r\n\r\n", b"\r\nexpect: 100-continue\r\n\r\n"))
        assert (await at_work[0].readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
        idle = [await asyncio.open_connection(*address) for _ in range(3)]
        assert (await ask(address, [GET + b"connection: close\r\n\r\n"]))[0] == 200
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await idle[0][0].readexactly(1)
        idle[1][1].write(GET + b"connection: close\r\n\r\n")
        assert (await idle[1][0].read()).startswith(b"HTTP/1.1 200")
        at_work[1].write(b"1\r\nx\r\n0\r\n\r\n")
        assert (await at_work[0].read()).endswith(b"\r\n\r\n1")
        for _, writer in (at_work, *idle):
            writer.close()


async def test_a_thousand_idle_connections_do_not_keep_health_from_answering(monkeypatch):
    monkeypatch.setattr(protocol, "max_connections", lambda: 100)
    async with serving() as address:
        crowd = [await asyncio.open_connection(*address) for _ in range(1000)]
        assert await ask(address, [GET + b"connection: close\r\n\r\n"]) == (200, "ok")
        for _, writer in crowd:
            writer.close()


def test_connections_leave_descriptors_for_the_rest_of_the_process(monkeypatch):
    for soft, expected in ((1024, 896), (64, 8), (1_000_000, 16_384), (-1, 16_384)):
        monkeypatch.setattr(protocol.resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert Connections().limit == expected


@pytest.mark.parametrize("upgrade", [b"h2c", b"TLS/1.2, h2c"])
@pytest.mark.parametrize(
    "framed",
    [
        b"content-length: 5\r\n\r\nhello",
        b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    ],
    ids=["whole", "chunked"],
)
async def test_a_wish_for_another_protocol_costs_no_body(upgrade, framed):
    head = b"POST /size HTTP/1.1\r\nhost: x\r\nhttp2-settings: AAMAAABk\r\n"
    wish = b"connection: HTTP2-Settings, Upgrade\r\nupgrade: %b\r\n" % upgrade
    last = b"POST /size HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 2\r\n\r\nyo"
    sent = head + wish + framed + last
    async with serving() as address:
        for parts in ([sent], [sent[:70], sent[70:]], [sent[n : n + 1] for n in range(len(sent))]):
            reader, writer = await asyncio.open_connection(*address)
            for part in parts:
                writer.write(part)
                await writer.drain()
            answers = (await reader.read()).split(b"HTTP/1.1 200 OK")
            assert [answer[-1:] for answer in answers[1:]] == [b"5", b"2"]
            writer.close()


async def test_connect_is_refused():
    async with serving() as address:
        status, _ = await ask(address, [b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\n"])
        assert status == 400


@dataclass
class Answering:
    """A server whose answers begin and go on when they are told to.

    asked, gone: it has a request; its client is known to be gone.
    """

    asked: asyncio.Event = field(default_factory=asyncio.Event)
    begin: asyncio.Event = field(default_factory=asyncio.Event)
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return
        self.asked.set()
        async with watched(scope) as watch:
            await self.begin.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"be", "more_body": True})
            self.begun.set()
            await self.go_on.wait()
            await send({"type": "http.response.body", "body": b"gun"})
        if watch.is_gone:
            self.gone.set()


@asynccontextmanager
async def asking():
    """A server that has a request, and the client that sent it."""
    app = Answering()
    with listen("127.0.0.1", 0) as socket:
        task = asyncio.create_task(serve(app, socket))
        async with asyncio.timeout(30.0):
            reader, writer = await asyncio.open_connection(*socket.getsockname())
            writer.write(GET + b"\r\n")
            await app.asked.wait()
            yield app, reader, writer
            writer.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


async def test_a_client_that_ends_its_sending_gets_its_answer():
    async with asking() as (app, reader, writer):
        writer.write_eof()
        await reader.readuntil(CONTINUE)
        app.begin.set()
        app.go_on.set()
        answer = (await reader.read()).replace(CONTINUE, b"")
        assert answer.startswith(b"HTTP/1.1 200 OK")
        assert answer.endswith(b"2\r\nbe\r\n3\r\ngun\r\n0\r\n\r\n")


async def test_a_client_that_is_gone_before_its_answer_begins_is_noticed():
    async with asking() as (app, _, writer):
        writer.close()
        await app.gone.wait()


@pytest.mark.parametrize("ends", ["write_eof", "close"])
async def test_a_client_that_ends_its_sending_once_its_answer_has_begun_is_gone(ends):
    async with asking() as (app, _, writer):
        app.begin.set()
        await app.begun.wait()
        getattr(writer, ends)()
        await app.gone.wait()


async def test_one_that_ended_its_sending_and_then_resets_the_connection_is_gone():
    async with asking() as (app, reader, writer):
        writer.write_eof()
        await reader.readuntil(CONTINUE)
        app.begin.set()
        await app.begun.wait()
        writer.transport.abort()
        await app.gone.wait()


async def test_what_is_written_in_one_turn_of_the_loop_is_sent_at_once():
    sent = []
    below = SimpleNamespace(write=sent.append, is_closing=lambda: False)
    transport = LingeringTransport(below, None)
    transport.write(b"head ")
    transport.write(b"piece")
    assert sent == []
    await asyncio.sleep(0)
    transport.write(b"end")
    transport.write(b"x" * (MAX_JOINED_BYTES + 1))
    assert sent == [b"head piece", b"end" + b"x" * (MAX_JOINED_BYTES + 1)]
