"""Asks engines over HTTP, on connections that are kept for the next request."""

from __future__ import annotations

import asyncio
import ssl
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache, lru_cache, partial
from typing import NamedTuple
from urllib.parse import urlsplit

from app.door.engine.connection import (
    STALE_S,
    ConnectFailed,
    Connection,
    EngineAnswer,
    Lost,
    NoAnswer,
    Pulse,
)
from app.door.engine.waits import Deadlines

CONNECT_S = 5.0
MAX_WHOLE_BYTES = 1024 * 1024
"""An answer that is not streamed is held back until it is complete, so that another worker can
still take its request; a larger one is passed on as it comes."""
KEEP_ALIVE_S = 4.0
"""vLLM closes a connection that has been idle for five seconds."""
MAX_PULSES = 4096
"""Engines of which it is kept when they were last heard."""


class _Place(NamedTuple):
    """The place of an engine. begin, end: of a request's head, around the path."""

    host: str
    port: int
    is_tls: bool
    begin: bytes
    end: bytes


@lru_cache(maxsize=4096)
def _place(base_url: str) -> _Place:
    parts = urlsplit(base_url)
    is_tls = parts.scheme == "https"
    return _Place(
        parts.hostname or "",
        parts.port or (443 if is_tls else 80),
        is_tls,
        b" " + parts.path.rstrip("/").encode(),
        b" HTTP/1.1\r\nhost: " + parts.netloc.rpartition("@")[2].encode(),
    )


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


async def _from_kept(
    connection: Connection, head: bytes, body: bytes, until_s: float
) -> EngineAnswer | None:
    """Returns the answer; None if the connection ends just as it is used. Raises Lost,
    TimeoutError."""
    clock = asyncio.get_running_loop().time
    sent_s = clock()
    try:
        return await connection.ask(head, body, until_s)
    except Lost:
        if connection.has_answered or clock() - sent_s > STALE_S:
            raise
        return None


class Upstream:
    """Keeps connections to engines; `close` it."""

    def __init__(self) -> None:
        self._idle: dict[_Place, list[Connection]] = {}
        self._pulses: OrderedDict[_Place, Pulse] = OrderedDict()
        self._deadlines = Deadlines()
        self._sweeping: asyncio.TimerHandle | None = None

    async def close(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
        self._deadlines.close()
        for connections in self._idle.values():
            for connection in connections:
                connection.abort()
        self._idle.clear()

    async def send(
        self,
        base_url: str,
        path: str,
        headers: Sequence[tuple[bytes, bytes]],
        body: bytes,
        *,
        method: bytes = b"POST",
        connect_s: float,
        answer_s: float,
        kept: bool = True,
    ) -> EngineAnswer:
        """Sends `body`, and returns the beginning of the answer. kept: a connection that was used
        before will do; if the engine closes it just as it is used, all is sent again, once, on a
        new one. Raises ConnectFailed, NoAnswer."""
        try:
            place = _place(base_url)
        except ValueError as error:
            raise ConnectFailed(f"{base_url}: {error}") from None
        lines = [method + place.begin + path.encode() + place.end]
        lines += [name + b": " + value for name, value in headers]
        lines.append(b"content-length: %d\r\n\r\n" % len(body))
        head = b"\r\n".join(lines)
        until_s = asyncio.get_running_loop().time() + answer_s
        # What is looked at besides may be answered by whatever has the engine's address now.
        pulse = self._pulse(place) if method == b"POST" else None
        used = self._kept(place) if kept else None
        if used is not None:
            used.pulse = pulse
        try:
            answer = await _from_kept(used, head, body, until_s) if used is not None else None
            if answer is None:
                connection = await self._connected(place, connect_s, until_s)
                connection.pulse = pulse
                answer = await connection.ask(head, body, until_s)
        except ConnectFailed as error:
            if used is None:
                raise
            # It may have reached the engine, and have been what that ended of.
            raise NoAnswer(f"no answer on a connection that was kept; then {error}") from None
        except Lost as error:
            raise NoAnswer(f"no answer: {error}") from None
        except TimeoutError:
            raise NoAnswer(f"no answer in {answer_s:g} s", cause="late", is_late=True) from None
        return answer

    def heard_s(self, base_url: str) -> float:
        """Returns when the last piece of an answer came from there, monotonic seconds."""
        try:
            pulse = self._pulses.get(_place(base_url))
        except ValueError:
            pulse = None
        return Pulse().at_s if pulse is None else pulse.at_s

    def _pulse(self, place: _Place) -> Pulse:
        pulse = self._pulses.get(place)
        if pulse is None:
            pulse = self._pulses[place] = Pulse()
            if len(self._pulses) > MAX_PULSES:
                self._pulses.popitem(last=False)
        return pulse

    async def _connected(self, place: _Place, connect_s: float, until_s: float) -> Connection:
        """Raises ConnectFailed; TimeoutError if `until_s` comes before `connect_s` are over."""
        loop = asyncio.get_running_loop()
        left_s = until_s - loop.time()
        try:
            async with asyncio.timeout(min(connect_s, left_s)):
                _, connection = await loop.create_connection(
                    lambda: Connection(partial(self._keep, place), self._deadlines),
                    place.host,
                    place.port,
                    ssl=_tls() if place.is_tls else None,
                )
        except TimeoutError:
            if left_s < connect_s:
                raise
            raise ConnectFailed(f"no connection in {connect_s:g} s", is_late=True) from None
        except (OSError, UnicodeError) as error:
            raise ConnectFailed(f"no connection: {error}") from None
        return connection

    def _kept(self, place: _Place) -> Connection | None:
        idle = self._idle.get(place)
        oldest_s = asyncio.get_running_loop().time() - KEEP_ALIVE_S
        while idle:
            connection = idle.pop()
            if connection.is_open and connection.idle_since_s > oldest_s:
                return connection
            connection.abort()
        return None

    def _keep(self, place: _Place, connection: Connection) -> None:
        loop = asyncio.get_running_loop()
        connection.idle_since_s = loop.time()
        self._idle.setdefault(place, []).append(connection)
        if self._sweeping is None:
            self._sweeping = loop.call_later(KEEP_ALIVE_S / 4, self._sweep)

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        oldest_s = loop.time() - KEEP_ALIVE_S
        for place, connections in list(self._idle.items()):
            while connections and connections[0].idle_since_s <= oldest_s:
                connections.pop(0).abort()
            if not connections:
                del self._idle[place]
        self._sweeping = None
        if self._idle:
            self._sweeping = loop.call_later(KEEP_ALIVE_S / 4, self._sweep)
