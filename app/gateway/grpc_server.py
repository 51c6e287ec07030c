"""A server of gRPC calls, over HTTP/2 by h2, in the event loop that decides.

grpc.aio polls in a thread of its own, and wakes the loop for each message: that took half of a
picker's CPU.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from enum import IntEnum
from functools import partial
from typing import Any
from urllib.parse import quote

from h2 import events
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings
from hyperframe.frame import GoAwayFrame

from app.gateway.messages import MAX_HEAD_BYTES
from app.http.protocol import SeldomWarning, max_connections

log = SeldomWarning(logging.getLogger(__name__))

MAX_BYTES = 4 * 1024 * 1024
"""Size of a message. Gateways pass bodies in far smaller pieces."""
PING_EVERY_S = 15.0
"""Seconds within which a peer answers a ping, or is gone: its machine may not have hung up."""
STALLED_S = 300.0
"""Seconds after which a call ends whose peer takes no more of its messages."""
LINGERS_S = ABORTED_S = 1.0
_CONNECTION_WINDOW = 2**31 - 1
"""Bytes of all calls of a connection; what a call may send ahead is bounded by its own window."""
_HEADERS = [(b":status", b"200"), (b"content-type", b"application/grpc")]


class Status(IntEnum):
    """How a call ends."""

    OK = 0
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12


class CallEndedError(Exception):
    """Ends a call with another status than OK."""

    def __init__(self, status: Status, words: str) -> None:
        super().__init__(words)
        self.status = status


class Call:
    """One call: messages as bytes, there and back. is_all: whether the peer says no more. is_over:
    whether nothing is sent any more."""

    def __init__(self, connection: _Connection, stream: int) -> None:
        self.stream = stream
        self.task: asyncio.Task[None]
        self.has_headers = self.is_all = self.is_over = False
        self._connection = connection
        self._messages: deque[bytes] = deque()
        self._part = bytearray()
        self._num_unread = 0
        self._has_begun = False
        """Whether the first message has come."""
        self._refusal: CallEndedError | None = None
        self._came = asyncio.Event()

    async def read(self) -> bytes | None:
        """Returns the next message; None if no more come. Raises CallEndedError."""
        while not self._messages:
            if self._refusal is not None:
                raise self._refusal
            if self.is_all:
                return None
            self._came.clear()
            await self._came.wait()
        message = self._messages.popleft()
        self.acknowledge()
        return message

    async def write(self, message: bytes) -> None:
        """Sends a message; drops it if the peer has ended the call."""
        await self._connection.send(self, b"\0%b%b" % (len(message).to_bytes(4, "big"), message))

    def came(self, data: bytes, length: int) -> None:
        """Takes what has come. length: with its padding."""
        self._num_unread += length
        self._part += data
        while len(self._part) >= 5 and self._refusal is None:
            size = int.from_bytes(self._part[1:5], "big")
            # Whoever says the first one has shown no key yet.
            most = MAX_BYTES if self._has_begun else MAX_HEAD_BYTES
            if self._part[0]:
                self._refusal = CallEndedError(Status.UNIMPLEMENTED, "compressed messages")
            elif size > most:
                words = f"a message of {size} bytes, over {most}"
                self._refusal = CallEndedError(Status.RESOURCE_EXHAUSTED, words)
            elif len(self._part) < 5 + size:
                break
            else:
                self._has_begun = True
                self._messages.append(bytes(self._part[5 : 5 + size]))
                del self._part[: 5 + size]
        self.acknowledge()
        self._came.set()

    def ends(self) -> None:
        self.is_all = True
        self._came.set()

    async def lingers(self) -> None:
        """Waits until the peer has said all, though nothing is done with it: some take what is
        told before that for an error. Raises CallEndedError."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGERS_S):
                while await self.read() is not None:
                    pass

    def acknowledge(self) -> None:
        """Lets the peer send more, unless messages wait to be read."""
        if not self._messages or self.is_over:
            self._connection.acknowledge(self._num_unread, self.stream)
            self._num_unread = 0


Handler = Callable[[Call], Awaitable[None]]


class _Connection(asyncio.Protocol):
    _transport: asyncio.Transport

    def __init__(self, server: GrpcServer) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self.calls: dict[int, Call] = {}
        self._room = asyncio.Event()
        self._is_paused = self._is_flushing = self._is_pinged = False
        # Of what comes, the path alone is looked at; what goes is our own.
        self._h2 = H2Connection(
            H2Configuration(
                client_side=False,
                header_encoding=None,
                validate_inbound_headers=False,
                normalize_inbound_headers=False,
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
            )
        )
        most = {SettingCodes.MAX_CONCURRENT_STREAMS: server.max_calls}
        self._h2.local_settings = Settings(client=False, initial_values=most)

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._server.add(self)
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(
            _CONNECTION_WINDOW - self._h2.inbound_flow_control_window
        )
        self._ping()

    def connection_lost(self, _: Exception | None) -> None:
        self._server.connections.pop(self, None)
        self._timer.cancel()
        self._cut()

    def pause_writing(self) -> None:
        self._is_paused = True
        self._transport.pause_reading()  # what it asks for, such as pings, would pile up

    def resume_writing(self) -> None:
        self._is_paused = False
        self._transport.resume_reading()
        self._room.set()

    def data_received(self, data: bytes) -> None:
        try:
            for event in self._h2.receive_data(data):
                self._happens(event)
        except ProtocolError as error:
            log.warning("a connection is ended that does not speak HTTP/2: %s", error)
            self._flush()
            self._cut()
        else:
            self._flush_soon()

    def _happens(self, event: events.Event) -> None:
        call = self.calls.get(getattr(event, "stream_id", None) or 0)
        if isinstance(event, events.RequestReceived):
            # h2 does not look whether there is one: see __init__.
            path = dict(event.headers).get(b":path", b"")
            call = self.calls[event.stream_id] = Call(self, event.stream_id)
            call.task = self._loop.create_task(self._run(call, path))
        elif isinstance(event, events.DataReceived) and call is not None:
            call.came(event.data, event.flow_controlled_length)
        elif isinstance(event, events.DataReceived):
            self.acknowledge(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, events.StreamEnded) and call is not None:
            call.ends()
        elif isinstance(event, events.StreamReset) and call is not None:
            call.is_over = True
            call.task.cancel()
        elif isinstance(event, events.PingAckReceived):
            self._is_pinged = False
        elif isinstance(event, events.ConnectionTerminated):
            self._cut()
        elif isinstance(event, events.WindowUpdated | events.RemoteSettingsChanged):
            self._room.set()

    async def _run(self, call: Call, path: bytes) -> None:
        status, words = Status.OK, ""
        try:
            await self._server.handler_of(path)(call)
            await call.lingers()
        except CallEndedError as error:
            status, words = error.status, str(error)
        except Exception:
            log.exception("a call has failed")
            status = Status.UNKNOWN
        finally:
            del self.calls[call.stream]
            trailers = [(b"grpc-status", b"%d" % status), (b"grpc-message", quote(words).encode())]
            if not call.is_over:
                headers = trailers if call.has_headers else [*_HEADERS, *trailers]
                self._h2.send_headers(call.stream, headers, end_stream=True)
            call.is_over = True
            call.acknowledge()
            self._flush_soon()

    async def send(self, call: Call, data: bytes) -> None:
        """Sends all of it as the peer has room. Raises CancelledError if it takes none for
        STALLED_S."""
        if not call.has_headers and not call.is_over:
            call.has_headers = True
            self._h2.send_headers(call.stream, _HEADERS)
        while data and not call.is_over:
            window = self._h2.local_flow_control_window(call.stream)
            room = 0 if self._is_paused else min(window, self._h2.max_outbound_frame_size)
            if room > 0:
                self._h2.send_data(call.stream, data[:room])
                data = data[room:]
                self._flush_soon()
                continue
            self._room.clear()
            try:
                async with asyncio.timeout(STALLED_S):
                    await self._room.wait()
            except TimeoutError:
                raise asyncio.CancelledError("the peer takes no more") from None

    def acknowledge(self, length: int, stream: int) -> None:
        if length:
            self._h2.acknowledge_received_data(length, stream)
            self._flush_soon()

    def _flush_soon(self) -> None:
        """Sends, at once, what the tasks say that run now."""
        if not self._is_flushing:
            self._is_flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flushing = False
        if (data := self._h2.data_to_send()) and not self._transport.is_closing():
            self._transport.write(data)

    def _ping(self) -> None:
        if self._is_pinged:
            self.abort()
        else:
            self._is_pinged = True
            self._h2.ping(b"\0" * 8)
            self._flush()
        self._timer = self._loop.call_later(PING_EVERY_S, self._ping)

    def goes_away(self) -> None:
        """Tells the peer to open no more calls. h2 itself would end those that are open."""
        self._flush()
        self._transport.write(GoAwayFrame(0, last_stream_id=2**31 - 1).serialize())

    def abort(self) -> None:
        self._transport.abort()

    def _cut(self) -> None:
        self._transport.close()
        for call in self.calls.values():
            call.is_over = True
            call.task.cancel()


class GrpcServer:
    """Serves the methods of `handlers`, by their paths, to so many connections, and calls, at once
    as a process may have. listening: is closed with it."""

    def __init__(self, listening: socket.socket, handlers: Mapping[bytes, Handler]) -> None:
        self._listening = listening
        self._handlers = handlers
        self.max_calls = self.max_connections = max_connections()
        self.connections: dict[_Connection, None] = {}
        """Connections, the oldest first."""
        self._server: asyncio.Server | None = None

    def add(self, newest: _Connection) -> None:
        """Makes room for a connection, if there are too many: the oldest without a call goes."""
        self.connections[newest] = None
        if len(self.connections) > (most := self.max_connections):
            log.warning("over %d connections: closing the oldest without a call", most)
            next((one for one in self.connections if not one.calls), newest).abort()

    def handler_of(self, path: bytes) -> Handler:
        """Raises CallEndedError."""
        if sum(len(one.calls) for one in self.connections) > self.max_calls:
            raise CallEndedError(Status.RESOURCE_EXHAUSTED, f"over {self.max_calls} calls")
        if path not in self._handlers:
            raise CallEndedError(Status.UNIMPLEMENTED, "no such method")
        return self._handlers[path]

    async def start(self, tls: ssl.SSLContext | None) -> None:
        loop = asyncio.get_running_loop()
        make = partial(_Connection, self)
        self._server = await loop.create_server(make, sock=self._listening, ssl=tls)

    async def stop(self, within_s: float) -> None:
        """Takes no more connections and calls, waits for those there are, and then cuts them."""
        if self._server is not None:
            self._server.close()
        self._listening.close()
        for connection in self.connections:
            connection.goes_away()
        tasks = [call.task for one in self.connections for call in one.calls.values()]
        for wait_s in (within_s, ABORTED_S):
            if tasks:
                await asyncio.wait(tasks, timeout=wait_s)
            for connection in [*self.connections]:
                connection.abort()
