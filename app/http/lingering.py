"""Closing of connections without losing the answer that is on its way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol


class Receiving(Protocol):
    """A connection's protocol, as far as it knows its request."""

    @property
    def is_receiving(self) -> bool: ...

    def linger(self) -> None: ...


class LingeringTransport:
    """Transport whose `close` lets the client read the answer first, though it still sends."""

    def __init__(self, transport: asyncio.Transport, protocol: Receiving) -> None:
        self._transport = transport
        self._protocol = protocol
        self._ended = False
        self.write: Callable[[bytes], object] = self._write
        self.abort = transport.abort

    def _write(self, data: bytes) -> None:
        # uvloop raises if the connection was reset or aborted, of which uvicorn learns a moment
        # later.
        if not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        if self._protocol.is_receiving and not self._ended:
            self._protocol.linger()
        elif not self._ended:
            self._transport.close()

    def end(self) -> None:
        """Sends what is written and no more, and goes on reading."""
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
