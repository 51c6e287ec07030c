"""A link between two workers that alters what the source sends."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass


def flipped(at):
    """The byte at `at` arrives with all of its bits changed."""

    def alter(before, data):
        if not before <= at < before + len(data):
            return data
        changed = bytearray(data)
        changed[at - before] ^= 0xFF
        return bytes(changed)

    return alter


def cut(at):
    """Nothing from that byte on."""
    return lambda before, data: data[: max(0, at - before)]


@dataclass(frozen=True)
class HeldBytes:
    """From byte `at` on, nothing arrives before `may_go` is set."""

    at: int
    may_go: asyncio.Event


@asynccontextmanager
async def bad_link(port, alter):
    """The port of a link to `port` of this host."""

    carrying = set()

    async def carry(reader, writer):
        task = asyncio.current_task()
        assert task is not None
        carrying.add(task)
        # asyncio would call the end of the link an error.
        with suppress(asyncio.CancelledError), closing(writer):
            source_reader, source_writer = await asyncio.open_connection("127.0.0.1", port)
            with closing(source_writer):
                asked = asyncio.ensure_future(_carry(reader, source_writer, _as_it_is))
                try:
                    await _carry(source_reader, writer, alter)
                finally:
                    asked.cancel()

    server = await asyncio.start_server(carry, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
    for task in carrying:
        task.cancel()
    await asyncio.gather(*carrying, return_exceptions=True)


async def _carry(reader, writer, alter):
    before = 0
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            if isinstance(alter, HeldBytes):
                passed = max(0, alter.at - before)
                writer.write(data[:passed])
                if len(data) > passed:
                    await alter.may_go.wait()
                altered = data[passed:]
            else:
                altered = alter(before, data)
                if not altered:
                    return
            writer.write(altered)
            await writer.drain()
            before += len(data)


def _as_it_is(_, data):
    return data
