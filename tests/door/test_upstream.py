"""The client of engines, against a server that sends exactly the bytes it is told to."""

import asyncio
import ssl
import struct
import time
from contextlib import asynccontextmanager
from socket import SO_LINGER, SOL_SOCKET

import pytest
import trustme

from app.door.engine import upstream as upstream_module
from app.door.engine.connection import (
    MAX_FRAMING_BYTES,
    ConnectFailed,
    NoAnswer,
    UpstreamBroken,
    UpstreamError,
)
from app.door.engine.upstream import Upstream
from app.local.redis_server import free_port
from tests.eventually import eventually

BODY = b'{"a":"' + b"x" * 100 + b'"}'
LENGTH = b"HTTP/1.1 200 OK\r\nX-One: 1\r\ncontent-length: 11\r\n\r\nhello world"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    b"5\r\nhello\r\n1;ext=1\r\n \r\n5\r\nworld\r\n0\r\n\r\n"
)
CLOSED = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nhello world"
CONTINUED = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + LENGTH

Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter


class Server:
    """Has `talk` answer each connection. requests: what it read of them."""

    def __init__(self, talk):
        self.num_connections = 0
        self.requests = []
        self.url = ""
        self._talk = talk

    async def request(self, reader):
        """Raises IncompleteReadError at the end of the connection."""
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        read = head + await reader.readexactly(length)
        self.requests.append(read)
        return read

    async def talk(self, reader, writer):
        self.num_connections += 1
        try:
            await self._talk(self, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def serving(talk, tls=None):
    server = Server(talk)
    listening = await asyncio.start_server(server.talk, "127.0.0.1", 0, ssl=tls)
    scheme = "http" if tls is None else "https"
    server.url = f"{scheme}://127.0.0.1:{listening.sockets[0].getsockname()[1]}/base/"
    upstream = Upstream()
    try:
        yield server, upstream
    finally:
        await upstream.close()
        listening.close()


def saying(text):
    """Answers each request of a connection with `text`."""

    async def talk(server, reader, writer):
        while True:
            await server.request(reader)
            writer.write(text)
            await writer.drain()

    return talk


async def post(upstream, url, body=BODY, **more):
    times = {"connect_s": 5.0, "answer_s": 5.0} | more
    return await upstream.send(url, "/v1/x", [(b"x-id", b"7")], body, **times)


async def whole(answer):
    pieces = []
    while piece := await answer.read(5.0):
        pieces.append(piece)
    return b"".join(pieces)


async def given(answer):
    """What comes to one that takes each piece as it comes, and pauses at every second one."""
    pieces = []

    def take(piece):
        pieces.append(piece)
        return len(pieces) % 2 > 0

    more = True
    while more:
        more = await answer.give(take, 5.0)
        await asyncio.sleep(0)
    return b"".join(pieces)


IN_BOTH_WAYS = pytest.mark.parametrize("come", [whole, given])


@IN_BOTH_WAYS
@pytest.mark.parametrize(
    "text", [LENGTH, CHUNKED, CLOSED, CONTINUED], ids=["length", "chunked", "closed", "continued"]
)
@pytest.mark.parametrize("step", [1, 7, 1000])
async def test_an_answer_is_read_however_it_is_framed_and_cut(come, text, step):
    async def talk(server, reader, writer):
        while True:
            await server.request(reader)
            for at in range(0, len(text), step):
                writer.write(text[at : at + step])
                await asyncio.sleep(0)
            if text is CLOSED:
                return

    async with serving(talk) as (server, upstream):
        for _ in range(3):
            answer = await post(upstream, server.url)
            assert answer.status == 200
            assert await come(answer) == b"hello world"
            assert await answer.read() == b""
        if text in (LENGTH, CONTINUED):
            assert answer.headers == [(b"x-one", b"1"), (b"content-length", b"11")]
        assert server.num_connections == (3 if text is CLOSED else 1)
        host = server.url.split("/")[2].encode()
        assert server.requests[0] == (
            b"POST /base/v1/x HTTP/1.1\r\nhost: %b\r\nx-id: 7\r\ncontent-length: %d\r\n\r\n%b"
            % (host, len(BODY), BODY)
        )


@pytest.mark.parametrize(
    "text", [LENGTH, CHUNKED, CONTINUED], ids=["length", "chunked", "continued"]
)
@pytest.mark.parametrize("resets", [False, True])
@IN_BOTH_WAYS
async def test_an_answer_cut_off_at_any_byte_is_an_error(come, text, resets):
    async def talk(server, reader, writer):
        await server.request(reader)
        writer.write(text[: len(server.requests) - 1])
        await writer.drain()
        if resets:
            # What is on its way is not lost by it, as both are on one machine.
            await asyncio.sleep(0.002)
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, linger)

    head_bytes = text.index(b"\r\n\r\n", text.index(b"200 OK")) + 4
    async with serving(talk) as (server, upstream):
        for sent in range(len(text)):
            with pytest.raises(UpstreamError) as failure:
                await come(await post(upstream, server.url))
            assert failure.type is (NoAnswer if sent < head_bytes else UpstreamBroken), sent
        assert server.num_connections == len(text)


async def hang_up_on_the_second(server, reader, writer):
    await server.request(reader)
    writer.write(LENGTH)
    await server.request(reader)  # and hangs up without a word


async def test_a_kept_connection_that_ends_as_it_is_used_is_replaced_once(monkeypatch):
    monkeypatch.setattr(upstream_module, "STALE_S", 60.0)
    async with serving(hang_up_on_the_second) as (server, upstream):
        assert await whole(await post(upstream, server.url)) == b"hello world"
        assert await whole(await post(upstream, server.url)) == b"hello world"
        assert server.num_connections == 2
        assert len(server.requests) == 3


async def test_what_an_engine_ended_with_may_have_reached_it(monkeypatch):
    monkeypatch.setattr(upstream_module, "STALE_S", 60.0)

    async def connected(*_):
        raise ConnectFailed("refused")

    async with serving(hang_up_on_the_second) as (server, upstream):
        assert await whole(await post(upstream, server.url)) == b"hello world"
        monkeypatch.setattr(upstream, "_connected", connected)
        with pytest.raises(NoAnswer, match="kept; then refused"):
            await post(upstream, server.url)
        with pytest.raises(ConnectFailed):
            await post(upstream, server.url)


async def test_what_ends_a_kept_connection_later_is_not_sent_again(monkeypatch):
    monkeypatch.setattr(upstream_module, "STALE_S", 0.0)
    async with serving(hang_up_on_the_second) as (server, upstream):
        assert await whole(await post(upstream, server.url)) == b"hello world"
        with pytest.raises(NoAnswer):
            await post(upstream, server.url)
        assert len(server.requests) == 2


async def test_a_new_connection_is_made_where_nothing_may_be_sent_again():
    async with serving(saying(LENGTH)) as (server, upstream):
        for _ in range(2):
            assert await whole(await post(upstream, server.url, kept=False)) == b"hello world"
        assert server.num_connections == 2


async def test_a_kept_connection_that_ends_in_an_answer_is_not_asked_again():
    async def talk(server, reader, writer):
        await server.request(reader)
        writer.write(LENGTH)
        await server.request(reader)
        writer.write(LENGTH[:5])

    async with serving(talk) as (server, upstream):
        assert await whole(await post(upstream, server.url)) == b"hello world"
        with pytest.raises(NoAnswer):
            await post(upstream, server.url)
        assert len(server.requests) == 2


async def test_an_answer_before_the_body_was_read_ends_its_connection():
    async def talk(server, reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        server.requests.append(head)
        writer.write(LENGTH)
        await writer.drain()
        await asyncio.sleep(0.2)

    async with serving(talk) as (server, upstream):
        for _ in range(2):
            answer = await post(upstream, server.url, b"x" * 16 * 1024 * 1024)
            assert await whole(answer) == b"hello world"
        assert server.num_connections == 2


async def test_connections_are_not_used_when_they_have_long_been_idle(monkeypatch):
    monkeypatch.setattr(upstream_module, "KEEP_ALIVE_S", 0.1)
    ended = asyncio.Event()

    async def talk(server, reader, writer):
        await server.request(reader)
        writer.write(LENGTH)
        await reader.read()
        ended.set()

    async with serving(talk) as (server, upstream):
        await whole(await post(upstream, server.url))
        await asyncio.wait_for(ended.wait(), 5.0)
        await whole(await post(upstream, server.url))
        assert server.num_connections == 2


@IN_BOTH_WAYS
async def test_what_is_not_read_is_left_to_the_engine(come):
    sent = 0

    async def talk(server, reader, writer):
        nonlocal sent
        await server.request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.transport.set_write_buffer_limits(0)
        for _ in range(1000):
            writer.write(b"10000\r\n" + b"y" * 65536 + b"\r\n")
            await writer.drain()
            sent += 65536
        writer.write(b"0\r\n\r\n")

    async with serving(talk) as (server, upstream):
        answer = await post(upstream, server.url)

        async def until_still():
            before = sent
            await asyncio.sleep(0.1)
            return sent == before

        await eventually(until_still, bool)
        # What the kernel's own buffers took.
        assert sent < 32 * 1024 * 1024
        assert len(await answer.read()) < 1024 * 1024
        assert len(await come(answer)) > 60 * 1024 * 1024
        assert sent == 1000 * 65536


async def test_each_piece_puts_off_the_end_of_what_is_waited_for():
    pieces = []

    async def talk(server, reader, writer):
        await server.request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(8):
            writer.write(b"1\r\nx\r\n")
            await asyncio.sleep(0.1)
        await reader.read()

    async with serving(talk) as (server, upstream):
        answer = await post(upstream, server.url)
        with pytest.raises(UpstreamBroken, match=r"nothing in 0\.5 s") as failure:
            await answer.give(lambda piece: pieces.append(piece) or True, 0.5)
        assert failure.value.is_late
        assert b"".join(pieces) == b"x" * 8


async def test_what_goes_wrong_with_a_piece_ends_the_answer():
    left = asyncio.Event()

    async def talk(server, reader, writer):
        await server.request(reader)
        writer.write(CHUNKED[:60])
        await reader.read()
        left.set()

    def take(piece):
        raise ValueError(piece)

    async with serving(talk) as (server, upstream):
        answer = await post(upstream, server.url)
        with pytest.raises(ValueError, match="hello"):
            await answer.give(take, 5.0)
        await asyncio.wait_for(left.wait(), 5.0)


@pytest.mark.parametrize(
    ("text", "method", "is_heard"),
    [
        (LENGTH, b"POST", True),
        (CHUNKED, b"POST", True),
        (CONTINUED, b"POST", True),
        (LENGTH, b"GET", False),
        (LENGTH.replace(b"200 OK", b"503 Busy"), b"POST", False),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", b"POST", False),
    ],
)
async def test_an_engine_is_heard_in_what_it_answers_to_requests(text, method, is_heard):
    async with serving(saying(text)) as (server, upstream):
        for _ in range(2):  # on a new connection, and on one that was kept
            began_s = time.monotonic()
            await whole(await post(upstream, server.url, method=method))
            assert (upstream.heard_s(server.url) >= began_s) == is_heard


async def test_an_aborted_answer_ends_the_connection():
    left = asyncio.Event()

    async def talk(server, reader, writer):
        await server.request(reader)
        if len(server.requests) == 1:
            writer.write(CHUNKED[:60])
        await reader.read()
        left.set()

    async with serving(talk) as (server, upstream):
        (await post(upstream, server.url)).abort()
        await asyncio.wait_for(left.wait(), 5.0)
        left.clear()
        asking = asyncio.create_task(post(upstream, server.url))
        await eventually(_number_of(server), lambda number: number == 2)
        asking.cancel()
        await asyncio.wait_for(left.wait(), 5.0)


def _number_of(server):
    async def number():
        return len(server.requests)

    return number


async def test_an_answer_that_ends_with_its_connection_ends_though_the_body_was_not_read():
    async def talk(server, reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(CLOSED)
        writer.write_eof()
        await asyncio.sleep(10)

    async with serving(talk) as (server, upstream):
        answer = await post(upstream, server.url, b"x" * 32 * 1024 * 1024)
        assert await whole(answer) == b"hello world"


async def test_trailers_are_no_headers():
    text = CHUNKED.replace(b"0\r\n\r\n", b"0\r\nx-late: 1\r\n\r\n")
    async with serving(saying(text)) as (server, upstream):
        for _ in range(2):
            answer = await post(upstream, server.url)
            assert await whole(answer) == b"hello world"
            assert answer.headers == [(b"transfer-encoding", b"chunked")]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", "not HTTP"),
        (b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n", "HTTP"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * MAX_FRAMING_BYTES + b"\r\n\r\n", "bytes frame it"),
        (b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * MAX_FRAMING_BYTES, "bytes frame it"),
    ],
)
async def test_what_is_no_answer(text, why):
    async with serving(saying(text)) as (server, upstream):
        with pytest.raises(NoAnswer, match=why):
            await post(upstream, server.url)


@pytest.mark.parametrize(
    ("begin", "again"),
    [
        (CHUNKED[:-2], b"x-late: " + b"y" * 1000 + b"\r\n"),
        (CHUNKED[:48] + b"5;", b"e" * 1000),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    ],
    ids=["trailers", "extension", "continues"],
)
async def test_what_frames_an_answer_is_bounded(begin, again):
    sent = 0

    async def talk(server, reader, writer):
        nonlocal sent
        await server.request(reader)
        writer.write(begin)
        while sent < 512 * MAX_FRAMING_BYTES:
            writer.write(again * 64)
            await writer.drain()
            sent += 64 * len(again)

    async with serving(talk) as (server, upstream):
        with pytest.raises(UpstreamError, match="bytes frame it"):
            await whole(await post(upstream, server.url))
    assert sent < 512 * MAX_FRAMING_BYTES


@pytest.mark.parametrize("status", [b"600", b"099", b"000", b"999"])
async def test_a_status_that_no_client_could_be_told_is_no_answer(status):
    async with serving(saying(LENGTH.replace(b"200", status))) as (server, upstream):
        with pytest.raises(NoAnswer, match=f"status {status.decode()}"):
            await post(upstream, server.url)


async def test_bytes_that_nobody_asked_for_end_a_connection():
    async with serving(saying(LENGTH + LENGTH)) as (server, upstream):
        for _ in range(2):
            assert await whole(await post(upstream, server.url)) == b"hello world"
        assert server.num_connections == 2


async def test_a_body_that_is_not_chunked_as_it_says_is_broken_off():
    text = CHUNKED.replace(b"1;ext=1", b"zz")
    async with serving(saying(text)) as (server, upstream):
        with pytest.raises(UpstreamBroken, match="not HTTP"):
            await whole(await post(upstream, server.url))


async def test_deadlines():
    async def talk(server, reader, writer):
        await server.request(reader)
        if len(server.requests) == 2:
            writer.write(CHUNKED[:60])
        await reader.read()

    async with serving(talk) as (server, upstream):
        with pytest.raises(NoAnswer, match=r"no answer in 0\.1 s"):
            await post(upstream, server.url, answer_s=0.1)
        answer = await post(upstream, server.url)
        assert await answer.read(5.0) == b"hello"
        with pytest.raises(UpstreamBroken, match=r"nothing in 0\.1 s"):
            await answer.read(0.1)
        answer.abort()


async def test_an_engine_that_is_not_there():
    upstream = Upstream()
    with pytest.raises(ConnectFailed, match="no connection"):
        await post(upstream, f"http://127.0.0.1:{free_port()}")
    with pytest.raises(ConnectFailed):
        await post(upstream, "http://no-such-host.invalid:80")
    for url in ("http://127.0.0.1:99999", f"http://{'x' * 64}.invalid:80"):
        with pytest.raises(ConnectFailed):
            await post(upstream, url)
    await upstream.close()


async def test_engines_behind_tls_are_verified(monkeypatch):
    authority = trustme.CA()
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(theirs)
    async with serving(saying(LENGTH), theirs) as (server, upstream):
        with pytest.raises(ConnectFailed, match="certificate"):
            await post(upstream, server.url)
        ours = ssl.create_default_context()
        authority.configure_trust(ours)
        monkeypatch.setattr(upstream_module, "_tls", lambda: ours)
        for _ in range(2):
            assert await whole(await post(upstream, server.url)) == b"hello world"
        assert server.num_connections == 1
