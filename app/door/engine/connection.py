"""One connection to an engine, and the answer that comes by it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httptools

from app.core.errors import KvrouteError
from app.door.engine.waits import Deadlines

STALE_S = 0.05
"""A connection that the engine closed as too long idle ends as soon as it is used. Later, it is the
request that ended it."""
MAX_UNREAD_BYTES = 64 * 1024
"""Bytes of an answer that wait to be read; no more is taken from the connection meanwhile."""
MAX_FRAMING_BYTES = 64 * 1024
"""Bytes that come without one of the body: head, trailers, extensions of chunks, answers like 100
Continue."""
_TOO_LONG = f"over {MAX_FRAMING_BYTES} bytes frame it"

Headers = list[tuple[bytes, bytes]]


class UpstreamError(KvrouteError):
    """An engine did not answer, or not to the end. cause: for those who count them. is_late: it was
    waited for in vain."""

    cause = "broken"

    def __init__(self, message: str, *, cause: str = "", is_late: bool = False) -> None:
        super().__init__(message)
        self.cause = cause or type(self).cause
        self.is_late = is_late


class ConnectFailed(UpstreamError):
    """No connection: nothing of the request has reached the engine."""

    cause = "unreachable"


class NoAnswer(UpstreamError):
    """The connection ended, or the time, before an answer began."""

    cause = "no_answer"


class UpstreamBroken(UpstreamError):
    """The connection ended, or the time, in the middle of an answer."""


class EngineAnswer:
    """One answer that has begun."""

    def __init__(self, connection: Connection) -> None:
        self.status = 0
        self.headers: Headers = []
        """Names in lower case."""
        self.unread: list[bytes] = []
        self.unread_bytes = 0
        self._connection = connection
        self._has_ended = False
        self._failure = ""
        self._changed: asyncio.Future[None] | None = None
        self.take: Callable[[bytes], bool] | None = None
        """Gets each piece as it comes; None: pieces wait to be read."""
        self._error: Exception | None = None
        """The error that `take` raised."""
        self._piece_s = 0.0
        """Time of the latest piece that `take` got, by the event loop's clock."""

    async def read(self, between_s: float | None = None) -> bytes:
        """Returns what has come since the last call; b"" at the end. Raises UpstreamBroken; then,
        and when cancelled, the engine stops."""
        if not self.unread and not self._has_ended:
            now_s = asyncio.get_running_loop().time()
            try:
                await self._until_changed(None if between_s is None else now_s + between_s)
            except BaseException as error:
                self.abort()
                if isinstance(error, TimeoutError):
                    raise _stalled(between_s) from None
                raise
        if self.unread:
            return self._read_all()
        if self._failure:
            raise UpstreamBroken(f"broke off: {self._failure}")
        return b""

    async def give(self, take: Callable[[bytes], bool], between_s: float) -> bool:
        """Gives `take` each piece in the turn of the event loop in which it comes, without waking
        the task that waits here, until `take` returns False. Returns whether more may come. Raises
        UpstreamBroken, and what `take` raises; then, and when cancelled, the engine stops."""
        loop = asyncio.get_running_loop()
        self.take, self._piece_s = take, loop.time()
        try:
            if self.unread:
                self.deliver()
            while self.take is not None and not self._has_ended:
                try:
                    await self._until_changed(self._piece_s + between_s)
                except TimeoutError:
                    if self._piece_s + between_s <= loop.time():  # no piece has put it off
                        raise _stalled(between_s) from None
            if self._error is not None:
                raise self._error
            if self.take is None:
                return True
        except BaseException:
            self.abort()
            raise
        finally:
            self.take = self._error = None
        if self._failure:
            raise UpstreamBroken(f"broke off: {self._failure}")
        return False

    def deliver(self) -> None:
        """Gives what is unread to whoever takes each piece as it comes."""
        assert self.take is not None
        self._piece_s = asyncio.get_running_loop().time()
        try:
            if not self.take(self._read_all()):
                self.take = None
        except Exception as error:
            self.take, self._error = None, error
        if self.take is None:
            self.wake()

    def _read_all(self) -> bytes:
        """Returns what is unread, which then counts as read."""
        piece = self.unread[0] if len(self.unread) == 1 else b"".join(self.unread)
        if self.unread_bytes >= MAX_UNREAD_BYTES and not self._has_ended:
            self._connection.resume()
        self.unread, self.unread_bytes = [], 0
        return piece

    async def _until_changed(self, until_s: float | None) -> None:
        """Raises TimeoutError at `until_s`, of the event loop's clock."""
        changed = self._changed = asyncio.get_running_loop().create_future()
        try:
            if until_s is None:
                await changed
            else:
                await self._connection.deadlines.result(changed, until_s)
        finally:
            self._changed = None

    async def read_up_to(
        self, max_bytes: int, between_s: float | None = None
    ) -> tuple[bytes, bool]:
        """Returns the body, and whether that is all; else more than `max_bytes` of it. Raises
        UpstreamBroken."""
        pieces = []
        left = max_bytes
        while left >= 0 and (piece := await self.read(between_s)):
            pieces.append(piece)
            left -= len(piece)
        return b"".join(pieces), left >= 0

    def abort(self) -> None:
        """Closes the connection, unless the answer has ended: the engine then stops."""
        if not self._has_ended:
            self._connection.abort()

    def end(self, failure: str = "") -> None:
        """Notes, for the connection, that no more comes."""
        self._has_ended, self._failure = True, failure
        self.wake()

    def wake(self) -> None:
        """Notes, for the connection, that there is more to be read."""
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)


def _stalled(between_s: float | None) -> UpstreamBroken:
    return UpstreamBroken(f"broke off: nothing in {between_s:g} s", cause="stalled", is_late=True)


@dataclass(slots=True)
class Pulse:
    """The time of the last piece of any answer from an engine, monotonic seconds."""

    at_s: float = float("-inf")


class Lost(Exception):
    """The connection ended before an answer began."""


class Connection(asyncio.Protocol):
    """Sends one request after another, and takes their answers.

    on_idle: called when it may take the next one. deadlines: of the waits for answers.
    """

    def __init__(self, on_idle: Callable[[Connection], None], deadlines: Deadlines) -> None:
        self.deadlines = deadlines
        self.idle_since_s = 0.0
        self.has_answered = False
        """Whether a byte of the latest answer has come."""
        self._on_idle = on_idle
        self._parser = httptools.HttpResponseParser(self)
        self._answer: EngineAnswer | None = None
        self._begun: asyncio.Future[EngineAnswer] | None = None
        self._framing_bytes = 0
        """Bytes since the last one of a body."""
        self._headers: Headers = []
        self._is_kept = self._ends_with_connection = False
        self.pulse: Pulse | None = None
        """The pulse of the engine, if the latest answer is one of a request."""

    @property
    def is_open(self) -> bool:
        return not self._transport.is_closing()

    async def ask(self, head: bytes, body: bytes, until_s: float) -> EngineAnswer:
        """Returns the answer once it begins. Raises Lost if the connection ends before;
        TimeoutError."""
        self._answer = EngineAnswer(self)
        begun = self._begun = asyncio.get_running_loop().create_future()
        self.has_answered = False
        self._framing_bytes = 0
        self._transport.writelines((head, body))
        try:
            return await self.deadlines.result(begun, until_s)
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        self._transport.abort()

    def resume(self) -> None:
        self._transport.resume_reading()

    # What asyncio calls.

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:  # nobody asked
            self.abort()
            return
        self.has_answered = True
        self._framing_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._lose(f"not HTTP: {error}")
            return
        if self._framing_bytes > MAX_FRAMING_BYTES and self._answer is not None:
            self._lose(_TOO_LONG)
        if not self._framing_bytes:  # some of a body has come
            if self.pulse is not None and answer.status == 200:
                self.pulse.at_s = time.monotonic()
            if answer.take is not None and answer.unread:
                answer.deliver()
                return
            if self._answer is answer and answer.unread_bytes >= MAX_UNREAD_BYTES:
                self._transport.pause_reading()
            answer.wake()

    def eof_received(self) -> None:
        # Closing would wait until the engine has read what it was sent, which it may never do.
        self._end("" if self._ends_with_connection else "connection closed")
        self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._end(str(error) if error else "connection closed")

    # What the parser calls.

    def on_message_begin(self) -> None:
        self._headers = []
        if self._answer is None:
            self.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if 100 <= status < 200 or self._begun is None or self._answer is None:
            return
        if not 200 <= status < 600:
            self._lose(f"not HTTP: status {status:03}")
            return
        if sum(len(name) + len(value) for name, value in self._headers) > MAX_FRAMING_BYTES:
            self._lose(_TOO_LONG)
            return
        names = {name for name, _ in self._headers}
        self._is_kept = self._parser.should_keep_alive()
        self._ends_with_connection = names.isdisjoint((b"content-length", b"transfer-encoding"))
        self._answer.status, self._answer.headers = status, self._headers
        self._headers = []  # trailers are none of the answer's
        begun, self._begun = self._begun, None
        if not begun.done():  # else nobody waits for it any more
            begun.set_result(self._answer)

    def on_body(self, piece: bytes) -> None:
        self._framing_bytes = 0
        if self._answer is not None:
            self._answer.unread.append(piece)
            self._answer.unread_bytes += len(piece)

    def on_message_complete(self) -> None:
        if self._begun is not None or self._answer is None:  # 100 Continue and the like
            return
        answer, self._answer = self._answer, None
        # An engine that answers before it has read all would take the rest for the next request.
        if self._is_kept and not self._transport.get_write_buffer_size():
            self._transport.resume_reading()
            self._on_idle(self)
        else:
            self._transport.close()
        answer.end()

    def _lose(self, failure: str) -> None:
        self._end(failure)
        self.abort()

    def _end(self, failure: str) -> None:
        answer, self._answer = self._answer, None
        if self._begun is not None and not self._begun.done():
            self._begun.set_exception(Lost(failure))
        elif answer is not None:
            answer.end(failure)
