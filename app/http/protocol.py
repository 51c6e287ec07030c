"""Bounds on what one connection may cost the server: bytes of headers, time for them, and its
place.

uvicorn bounds neither. Every part below is tested from raw sockets.
"""

from __future__ import annotations

import asyncio
import logging
import re
import resource
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, cast

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from app.core.pace import Pace
from app.http.body import error_body
from app.http.held import HELD, HeldBodies, HeldBody


class LingeringTransport:
    """Transport that sends what is written in one turn of the event loop at once: a head with the
    piece behind it. Its `close` lets the client read the answer first, though it still sends."""

    def __init__(self, transport: asyncio.Transport, protocol: Protocol) -> None:
        self._transport = transport
        self._protocol = protocol
        self._ended = False
        self._loop = asyncio.get_running_loop()
        self._unsent: list[bytes] = []
        self.write: Callable[[bytes], object] = self._write

    def abort(self) -> None:
        self._unsent.clear()
        self._transport.abort()

    def _write(self, data: bytes) -> None:
        if not self._unsent:
            self._loop.call_soon(self.flush)
        self._unsent.append(data)
        if len(data) > MAX_JOINED_BYTES:
            self.flush()

    def flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        # uvloop raises if the connection was reset or aborted, of which uvicorn learns a moment
        # later.
        if unsent and not self._transport.is_closing():
            self._transport.write(unsent[0] if len(unsent) == 1 else b"".join(unsent))

    def close(self) -> None:
        self.flush()
        if self._protocol.is_receiving and not self._ended:
            self._protocol.linger()
        elif not self._ended:
            self._transport.close()

    def end(self) -> None:
        """Sends what is written and no more, and goes on reading."""
        self.flush()
        self._ended = True
        # The application may still answer a request that was refused half-way.
        self.write = lambda _: None
        if self._transport.is_closing():
            return
        self._transport.resume_reading()
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._transport.close()

    def is_closing(self) -> bool:
        return self._ended or self._transport.is_closing()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


log = logging.getLogger(__name__)

MAX_JOINED_BYTES = 16 * 1024
"""Bytes of a piece that is sent at once, with what was written before it."""
MAX_HEAD_BYTES = 64 * 1024
"""Bytes of a request's line and headers together; also of what frames its body: trailers, and
extensions of chunks."""
FRAMING_PER_BODY_BYTE = 8
"""Bytes that may frame one of a body: chunks of a single byte take five."""
MAX_URL_BYTES = 32 * 1024
HEAD_TIMEOUT_S = 10.0
"""Seconds for a connection's first headers to come, and for all of them once they begin."""
LINGER_S = 2.0
"""Seconds for which the rest of a refused body is read and dropped. Closing at once would reset the
connection, and the client would lose the answer."""
PROBE_S, MAX_PROBE_S = 0.02, 2.0
"""Seconds until a client that has ended its sending is first asked whether it is there, and the
longest between two times."""
NOTICED_S = 3.0
"""Seconds for which a server that stops still answers on idle connections. A balancer needs so long
to see that it stops (deploy/haproxy.cfg: two checks), and a request that meets the closing of its
connection is lost."""
MAX_CONNECTIONS = 16_384
SPARE_DESCRIPTORS = 128
COMPLAINTS_PER_S = 1
CUT = "kvroute.cut"
"""Key in a request's scope: ends its connection at once."""
UNTIL_TAKEN = "kvroute.until_taken"
"""Key in a request's scope: Protocol.until_taken."""
ON_GONE = "kvroute.on_gone"
"""Key in a request's scope: a function that takes what to call once the client is gone, perhaps at
once; None: nothing. A task that waits for http.disconnect would cost each request a twentieth more.
"""

_RESET = struct.pack("ii", 1, 0)
_STATUS = {
    400: b"Bad Request",
    414: b"URI Too Long",
    426: b"Upgrade Required\r\nupgrade: HTTP/1.1",  # which such an answer has to name
    431: b"Request Header Fields Too Large",
}


def max_connections() -> int:
    """Returns how many connections fit into the process's file descriptors, MAX_CONNECTIONS at
    most."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft < 0 else max(8, min(MAX_CONNECTIONS, soft - SPARE_DESCRIPTORS))


class Connections(ServerState):
    """Connections of one server, and those without a request, the longest idle first. on_refused:
    called with the code of the error for each request that is refused here."""

    def __init__(
        self, on_refused: Callable[[str], object] = lambda _: None, held: HeldBodies | None = None
    ) -> None:
        super().__init__()
        self.on_refused = on_refused
        self.held = held or HeldBodies()
        self.log: Any = SeldomWarning(logging.getLogger("uvicorn.error"))
        self.idle: dict[Protocol, None] = {}
        self.limit = max_connections()
        self.closes_in_s: float | None = None
        self._complaints = Pace(COMPLAINTS_PER_S)

    def make_room(self, newest: Protocol) -> None:
        """Closes the connection that has been idle for longest, if there are too many: the newest
        one only if all others are at work."""
        if len(self.connections) <= self.limit:
            return
        gone = next(iter(self.idle), newest)
        if self._complaints.allows(time.monotonic()):
            log.warning("over %d connections: closing the one idle for longest", self.limit)
        self.idle.pop(gone, None)
        gone.transport.abort()


class SeldomWarning(logging.LoggerAdapter[logging.Logger]):
    """Logger with COMPLAINTS_PER_S warnings at most; each says how many before it went unsaid."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logger)
        self._limit = Pace(COMPLAINTS_PER_S)
        self._unsaid = 0

    @property
    def level(self) -> int:
        return self.logger.level

    def log(self, level: int, msg: object, *args: object, **options: Any) -> None:
        if level == logging.WARNING:
            if not self._limit.allows(time.monotonic()):
                self._unsaid += 1
                return
            if self._unsaid:
                msg, self._unsaid = f"{msg} ({self._unsaid} warnings before it went unsaid)", 0
        self.logger.log(level, msg, *args, **options)


class Protocol(HttpToolsProtocol):
    """One connection. Refuses what is too large or too slow, in the shape of all other errors."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.url = b""  # uvicorn sets it only once a message begins
        self._state: Any = self.server_state
        # uvicorn logs each request that is not HTTP, and a caller can send any number.
        self.logger = cast(Any, self.server_state).log
        self._refusal = (400, "bad_request", "Invalid HTTP request received.")
        self._in_head = True
        self._framing = 0
        """Bytes of the message that have come and are not of its body."""
        self._body = 0
        self._held = HeldBody(cast(Any, self.server_state).held, "")
        self._late: asyncio.TimerHandle | None = None
        self._drops = False
        self._is_half_closed = False
        """Whether the client sends nothing more, and still reads, as far as is known."""
        self._watched: tuple[Any, Callable[[], object]] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        lingering: Any = LingeringTransport(transport, self)
        super().connection_made(lingering)
        self._held.belong_to(self.client[0] if self.client else "")
        self._late = self.loop.call_later(HEAD_TIMEOUT_S, self._end_late)
        self._state.idle[self] = None
        self._state.make_room(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._state.idle.pop(self, None)
        self._in_time()
        self._held.clear()
        super().connection_lost(exc)
        if self._watched is not None:
            cycle, on_gone = self._watched
            cycle.disconnected = True  # uvicorn tells only the newest of those that are pipelined
            on_gone()

    def data_received(self, data: bytes) -> None:
        if self._drops:
            return
        self._framing += len(data)
        self._unset_keepalive_if_required()
        self._parse(data)
        if self._drops or self.transport.is_closing():
            return
        if self._framing > MAX_HEAD_BYTES + FRAMING_PER_BODY_BYTE * self._body:
            if self._in_head and len(self.url) > MAX_URL_BYTES:
                self._refuse(414, "url_too_long", f"url: over {MAX_URL_BYTES} bytes")
            else:
                self._refuse(431, "headers_too_large", f"headers: over {MAX_HEAD_BYTES} bytes")
        elif self._in_head and self._framing and self._late is None:
            self._late = self.loop.call_later(HEAD_TIMEOUT_S, self._end_late)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Lets a client that ends its sending before its answer begins have it. True: the
        connection stays open.

        A client that is gone ends its sending in the same way, but resets the connection whatever
        it is sent. Once an answer has begun, nothing can be sent between its parts, so a client
        that ends its sending then counts as gone. Other servers (uvicorn, nginx, Envoy and Go's)
        always take it so.
        """
        cycle: Any = self.cycle
        if cycle is None or cycle.response_started or self.is_receiving:
            return False
        if cycle.scope["http_version"] == "1.0":
            return False
        self._is_half_closed = True
        self._probe(cycle, PROBE_S)
        return True

    def _probe(self, cycle: Any, next_s: float) -> None:
        """Sends an answer 100, any number of which clients read before the true one; after the
        answer's head, looks whether the client has reset the connection, as nothing is read any
        more that would tell."""
        if cycle.response_complete or self.transport.is_closing():
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        if not cycle.response_started:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.loop.call_later(next_s, self._probe, cycle, min(2 * next_s, MAX_PROBE_S))

    def _parse(self, data: bytes | memoryview) -> None:
        """Parses like uvicorn, but ignores wishes for another protocol (`Upgrade: h2c`), as HTTP
        allows: the parser would take the body for that protocol."""
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                if any(n == b"upgrade" and v.lower() == b"websocket" for n, v in self.headers):
                    # Clients that try one go on over HTTP at once.
                    self._refuse(426, "websocket_refused", "There are no WebSockets: ask by HTTP.")
                    return
                data = memoryview(data)[upgrade.args[0] :]
                head = self._head_without_upgrade()
                self.parser = httptools.HttpRequestParser(self)
                self.parser.feed_data(head)
            except httptools.HttpParserError:
                self.logger.warning("Invalid HTTP request received.")
                self.send_400_response("")
                return
            else:
                return

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                value = re.sub(rb"(?i)(upgrade|http2-settings)\s*,?", b"", value)
            if name not in (b"upgrade", b"http2-settings"):
                lines.append(b"%b: %b" % (name, value))
        return b"\r\n".join([*lines, b"", b""])

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise ValueError("there is nothing to connect to")
            return
        if len(self.url) > MAX_URL_BYTES:
            self._refusal = (414, "url_too_long", f"url: over {MAX_URL_BYTES} bytes")
            raise ValueError(self._refusal)
        # Only headers that came with more than they may be are worth counting.
        if self._framing > MAX_HEAD_BYTES:
            size = sum(len(name) + len(value) for name, value in self.headers)
            if size > MAX_HEAD_BYTES:
                self._refusal = (431, "headers_too_large", f"headers: over {MAX_HEAD_BYTES} bytes")
                raise ValueError(self._refusal)
        self._in_head = False
        self._in_time()
        self._state.idle.pop(self, None)
        super().on_headers_complete()
        cycle: Any = self.cycle
        cycle.keep_alive &= self._state.closes_in_s is None
        cycle.scope[CUT] = partial(self._cut, cycle)
        cycle.scope[UNTIL_TAKEN] = self.until_taken
        cycle.scope[HELD] = self._held
        cycle.scope[ON_GONE] = partial(self._watch, cycle)
        if cycle.scope["http_version"] == "1.0":
            cycle.send = partial(_send_unchunked, cycle, cycle.send)

    def shutdown(self) -> None:
        """Makes the answer under way, or else the next one, the last of this connection."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False
        else:
            self.loop.call_later(self._state.closes_in_s or 0.0, super().shutdown)

    def on_body(self, body: bytes) -> None:
        self._framing -= len(body)
        self._body += len(body)
        if not self._drops:
            self._held.add(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._in_head = True
        self._framing = self._body = 0
        self._in_time()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        # Of a request that is pipelined behind, a first piece may have come, and counts no more.
        self._held.clear()
        super().on_response_complete()
        if self.transport.is_closing() or not self.cycle.response_complete:
            return
        if self._is_half_closed:
            self.transport.close()
            return
        self._state.idle[self] = None
        if self.is_receiving and self._late is None:
            # Whoever answers without the body does not miss one that never comes.
            self._late = self.loop.call_later(HEAD_TIMEOUT_S, self._end_late)

    def _watch(self, cycle: Any, on_gone: Callable[[], object] | None) -> None:
        self._watched = None if on_gone is None else (cycle, on_gone)
        if on_gone is not None and cycle.disconnected:
            on_gone()

    async def until_taken(self, stalled_s: float) -> None:
        """Returns once the client has taken nearly all that was written, or is gone. Raises
        TimeoutError if it takes nothing for so long."""
        transport: Any = self.transport
        transport.flush()
        while self.flow.write_paused:
            left = transport.get_write_buffer_size()
            try:
                async with asyncio.timeout(stalled_s):
                    await self.flow.drain()
            except TimeoutError:
                if transport.get_write_buffer_size() >= left:
                    raise

    def _cut(self, cycle: Any) -> None:
        """Resets the connection: uvicorn, and the kernel, would wait until the client has read what
        is written, and uvicorn complain that the answer is not complete."""
        cycle.disconnected = True
        if not self.transport.is_closing():
            self.transport.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, _RESET
            )
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Refuses what uvicorn's parser, or a callback above, refuses."""
        self._refuse(*self._refusal)

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._state.on_refused(code)
        if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
            body = orjson.dumps(error_body(code, message))
            self.transport.write(
                b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\nconnection: close\r\n\r\n%b"
                % (status, _STATUS[status], len(body), body)
            )
        self.linger()

    def linger(self) -> None:
        """Closes once the client has, or after LINGER_S; drops what it sends until then."""
        if self._drops:
            return
        self._drops = True
        self._in_time()
        self._state.idle.pop(self, None)
        transport: Any = self.transport
        transport.end()
        self._late = self.loop.call_later(LINGER_S, transport.abort)

    @property
    def is_receiving(self) -> bool:
        """Whether a request has begun and has not come in whole."""
        return not self._in_head or self._framing > 0

    def _end_late(self) -> None:
        self._late = None
        self.transport.abort()

    def _in_time(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


async def _send_unchunked(cycle: Any, send: Callable[[Any], Awaitable[None]], message: Any) -> None:
    """Sends without chunks: to HTTP/1.0, an answer without a length ends with its connection."""
    if message["type"] == "http.response.start":
        if all(name.lower() != b"content-length" for name, _ in message["headers"]):
            cycle.chunked_encoding, cycle.is_unbounded = False, True
    elif hasattr(cycle, "is_unbounded"):
        cycle.expected_content_length = len(message.get("body", b""))
    await send(message)
