"""How long a body may take: so long between two pieces, and not below a least rate."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from app.core.errors import BodyTimeout
from app.http import body
from app.http.server import listen, serve


@asynccontextmanager
async def serving():
    app = FastAPI()

    @app.post("/size")
    async def size(request: Request):
        try:
            return JSONResponse(len(await body.read_body(request, 1 << 20)))
        except BodyTimeout:
            return JSONResponse("late", 408, {"connection": "close"})

    with listen("127.0.0.1", 0) as socket:
        task = asyncio.create_task(serve(app, socket))
        try:
            yield socket.getsockname()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(
    ("first", "piece", "status"),
    [
        (0, 200, 200),  # 2,000 bytes a second for a second and a half
        (0, 10, 408),
        (3000, 0, 408),  # which would earn three seconds at the least rate
    ],
)
async def test_a_slow_body_is_taken_and_one_that_stalls_or_trickles_is_not(
    first, piece, status, monkeypatch
):
    monkeypatch.setattr(body, "BODY_TIMEOUT_S", 0.5)
    monkeypatch.setattr(body, "LEAST_BYTES_PER_S", 1000)
    loop = asyncio.get_running_loop()
    async with serving() as address, asyncio.timeout(20):
        reader, writer = await asyncio.open_connection(*address)
        size = 30 * piece or 4000
        writer.write(b"POST /size HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size)
        writer.write(b" " * first)
        began_s = loop.time()
        reading = asyncio.create_task(reader.readuntil(b"\r\n\r\n"))
        for _ in range(30):
            writer.write(b" " * piece)
            await asyncio.sleep(0.1 if piece > 100 else 0.05)
        assert (await reading).split()[1] == b"%d" % status
        assert status == 200 or loop.time() - began_s < 2.5
        writer.close()
