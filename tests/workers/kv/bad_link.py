"""A link between two workers that alters what the source sends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

Alter = Callable[[int, bytes], bytes]
"""(bytes that came before, bytes of the source) -> what the target gets; b"": the link is cut."""


def flipped(at: int) -> Alter:
    """The byte at `at` arrives with all of its bits changed."""

    def alter(before: int, data: bytes) -> bytes:
        if not before <= at < before + len(data):
            return data
        changed = bytearray(data)
        changed[at - before] ^= 0xFF
        return bytes(changed)

    return alter


def cut(at: int) -> Alter:
    """Nothing from that byte on."""
    return lambda before, data: data[: max(0, at - before)]


@asynccontextmanager
async def bad_link(port: int, alter: Alter) -> AsyncIterator[int]:
    """The port of a link to `port` of this host."""

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        source_reader, source_writer = await asyncio.open_connection("127.0.0.1", port)
        asked = asyncio.ensure_future(_carry(reader, source_writer, lambda _, data: data))
        await _carry(source_reader, writer, alter)
        asked.cancel()
        for each in (writer, source_writer):
            each.close()

    server = await asyncio.start_server(carry, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, alter: Alter) -> None:
    before = 0
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            altered = alter(before, data)
            writer.write(altered)
            await writer.drain()
            if not altered:
                return
            before += len(data)
