"""The bodies of all callers together are bounded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request

from app.core.errors import BodiesTooLarge
from app.http.body import CLOSE, json_response, read_body
from app.http.held import SMALL_BYTES, HeldBodies
from app.http.server import listen, serve
from tests.eventually import eventually

LARGE = 4 * SMALL_BYTES
FEW = 3
HEAD = b"POST /size HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"


@asynccontextmanager
async def serving(held: HeldBodies) -> AsyncIterator[tuple[str, int]]:
    """Address of a server that answers with the size of a body."""
    app = FastAPI()

    @app.post("/size")
    async def size(request: Request) -> object:
        try:
            return len(await read_body(request, 10 * LARGE))
        except BodiesTooLarge as error:
            return json_response(str(error), 503, CLOSE)

    with listen("127.0.0.1", 0) as socket:
        task = asyncio.create_task(serve(app, socket, held=held))
        try:
            async with asyncio.timeout(30.0):
                yield socket.getsockname()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_uploads_that_never_end_keep_out_only_large_bodies_and_only_while_they_last() -> None:
    held = HeldBodies(FEW * LARGE)
    async with serving(held) as address:

        async def send(size: int, sent: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(HEAD % size + b"x" * sent)
            return reader, writer

        async def seen() -> int:
            return held.num_bytes

        unfinished = [await send(LARGE + 1, LARGE) for _ in range(FEW)]
        await eventually(seen, lambda size: size == FEW * LARGE)
        reader, writer = await send(SMALL_BYTES + 1, SMALL_BYTES + 1)
        assert b"503" in await reader.readline()
        writer.close()
        reader, writer = await send(SMALL_BYTES, SMALL_BYTES)
        assert b"200" in await reader.readline()
        writer.close()
        for _, writer in unfinished:
            writer.close()
        await eventually(seen, lambda size: size == 0)
        reader, writer = await send(LARGE, LARGE)
        assert b"200" in await reader.readline()
        await eventually(seen, lambda size: size == 0)
        writer.close()


async def test_one_body_alone_may_be_larger() -> None:
    async with serving(HeldBodies(LARGE)) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(HEAD % (2 * LARGE) + b"x" * 2 * LARGE)
        assert b"200" in await reader.readline()
        writer.close()
