"""The bodies of all callers together are bounded, and nobody's uploads keep out the others'."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from app.core.errors import BodiesTooLarge
from app.http.body import read_body
from app.http.held import HELD, MAX_HELD_BYTES, SMALL_BYTES, HeldBodies, HeldBody
from app.http.server import listen, serve
from tests.eventually import eventually

LARGE = 4 * SMALL_BYTES
PIECE = SMALL_BYTES
UPLOAD = 12 << 20
HEAD = b"POST /size HTTP/1.1\r\nhost: x\r\nx-key: %b\r\ncontent-length: %d\r\n\r\n"


def arrives(body, size, piece=PIECE):
    """A body comes, in pieces; False: it is refused, and what has come of it is let go."""
    try:
        body.check(size)
        for at in range(0, size, piece):
            body.add(min(piece, size - at))
            body.check(body.num_bytes)
    except BodiesTooLarge:
        body.clear()
        return False
    return True


def uploads(bodies, holder, number, size):
    """How many of so many bodies are taken, each over a connection of its own."""
    return sum(arrives(HeldBody(bodies, holder), size) for _ in range(number))


@pytest.mark.parametrize("number", [16, 1000])
def test_uploads_of_one_caller_leave_a_quarter_to_others(number):
    bodies = HeldBodies()
    assert uploads(bodies, "a", number, UPLOAD) > 5
    assert bodies.num_bytes <= 0.76 * MAX_HELD_BYTES
    assert arrives(HeldBody(bodies, "b"), UPLOAD)
    assert arrives(HeldBody(bodies, "c"), UPLOAD // 2)


@pytest.mark.parametrize("size", [UPLOAD, 1 << 20])
def test_uploads_over_some_connections_leave_room_for_the_same_callers_next(size):
    bodies = HeldBodies()
    uploads(bodies, "a", 1000, size)
    assert arrives(HeldBody(bodies, "a"), size // 4)


def test_however_many_callers_upload_the_next_one_finds_room():
    bodies = HeldBodies()
    for number in range(50):
        uploads(bodies, f"{number}", 20, UPLOAD)
    assert arrives(HeldBody(bodies, "next"), 200_000)
    assert bodies.num_bytes <= MAX_HELD_BYTES


def test_one_body_alone_may_be_larger():
    bodies = HeldBodies(LARGE)
    assert arrives(HeldBody(bodies, "a"), 20 * LARGE)
    assert not arrives(HeldBody(bodies, "b"), SMALL_BYTES + 1)
    assert arrives(HeldBody(bodies, "b"), SMALL_BYTES)


def test_what_has_come_belongs_to_the_key_once_it_is_known():
    bodies = HeldBodies()
    body = HeldBody(bodies, "127.0.0.1")
    body.add(100)
    body.belong_to("a")
    body.add(10)
    assert (bodies.shares.of("a"), bodies.shares.of("127.0.0.1")) == (110, 0)
    body.clear()
    body.clear()
    bodies.shares.check()
    assert bodies.num_bytes == 0


@asynccontextmanager
async def serving(held):
    """Address of a server that answers with the size of a body, which belongs to x-key."""
    app = FastAPI()

    @app.post("/size")
    async def size(request: Request):
        request.scope[HELD].belong_to(request.headers["x-key"])
        try:
            return len(await read_body(request, 10 * LARGE))
        except BodiesTooLarge as error:
            return JSONResponse(str(error), 503, {"connection": "close"})

    with listen("127.0.0.1", 0) as socket:
        task = asyncio.create_task(serve(app, socket, held=held))
        try:
            async with asyncio.timeout(30.0):
                yield socket.getsockname()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_uploads_that_never_end_keep_nobody_else_out_and_are_forgotten_with_them():
    held = HeldBodies(8 * LARGE)
    async with serving(held) as address:

        async def send(key, size, sent):
            reader, writer = await asyncio.open_connection(*address)
            writers.append(writer)
            writer.write(HEAD % (key.encode(), size) + b"x" * sent)
            return reader

        async def seen():
            return held.num_bytes

        writers = []
        for number in range(1, 5):
            await send("a", LARGE + 1, LARGE)
            await eventually(seen, lambda size, n=number: size == n * LARGE)
        assert b"503" in await (await send("a", 3 * LARGE, 0)).readline()
        assert b"200" in await (await send("b", LARGE, LARGE)).readline()
        assert b"200" in await (await send("a", SMALL_BYTES, SMALL_BYTES)).readline()
        for writer in writers:
            writer.close()
        await eventually(seen, lambda size: size == 0)
        held.shares.check()
        assert b"200" in await (await send("a", LARGE, LARGE)).readline()
        writers[-1].close()
        await eventually(seen, lambda size: size == 0)
