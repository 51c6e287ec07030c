from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import signal
import socket as sockets
import weakref
from contextlib import asynccontextmanager

import httpx
import pytest
from fastapi import FastAPI

from app.core.errors import ConfigError, KvrouteError
from app.http.server import collect_seldom, listen, serve


async def test_serving_ends_when_a_task_of_the_application_fails(caplog):
    @asynccontextmanager
    async def lifespan(_):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fail())
            yield

    async def fail():
        await asyncio.sleep(0)
        raise LookupError("nobody foresaw this")

    with listen("127.0.0.1", 0) as socket:
        async with asyncio.timeout(5.0):
            with pytest.raises(KvrouteError, match="the application failed"):
                await serve(FastAPI(lifespan=lifespan), socket)
    assert "nobody foresaw this" in caplog.text


@pytest.mark.skipif(not sockets.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_the_ipv6_wildcard_also_takes_ipv4_connections():
    with listen("::", 0) as socket:
        port = socket.getsockname()[1]
        for host in ("127.0.0.1", "::1"):
            sockets.create_connection((host, port), timeout=5.0).close()


def test_an_empty_host_is_not_taken_for_every_address_of_the_machine():
    with pytest.raises(ConfigError, match="cannot listen on :0: the host is empty"):
        listen("", 0)


def test_garbage_of_the_time_before_a_server_starts_is_not_kept():
    class Circle:
        itself: Circle

    circle = Circle()
    circle.itself, gone = circle, weakref.ref(circle)
    del circle
    collect_seldom()  # as each server does that starts in this process
    gc.collect()
    assert gone() is None


async def test_what_is_not_http_is_answered_in_the_shape_of_all_errors():
    with listen("127.0.0.1", 0) as socket:
        serving = asyncio.create_task(serve(FastAPI(), socket))
        async with asyncio.timeout(5.0):
            reader, writer = await asyncio.open_connection(*socket.getsockname())
            writer.write(b"\x16\x03\x01 is how TLS begins\r\n\r\n")
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            writer.close()
            os.kill(os.getpid(), signal.SIGTERM)
            await serving
    assert head.startswith(b"HTTP/1.1 400 ")
    message = "Invalid HTTP request received."
    assert json.loads(body) == {"error": {"code": "bad_request", "message": message, "field": None}}


async def test_on_stop_runs_while_requests_are_still_accepted():
    seen = []
    app = FastAPI()

    @app.get("/stop")
    async def stop():
        os.kill(os.getpid(), signal.SIGTERM)

    with listen("127.0.0.1", 0) as socket:
        url = f"http://127.0.0.1:{socket.getsockname()[1]}"

        async def leave():
            async with httpx.AsyncClient() as client:
                seen.append((await client.get(f"{url}/openapi.json")).status_code)

        async with asyncio.timeout(10.0), asyncio.TaskGroup() as tasks:
            tasks.create_task(serve(app, socket, on_stop=leave))
            async with httpx.AsyncClient() as client:
                await client.get(f"{url}/stop")
    assert seen == [200]


async def test_what_on_stop_waits_for_is_part_of_the_time_to_drain():
    late = asyncio.Event()

    async def stop():
        await late.wait()

    with listen("127.0.0.1", 0) as socket:
        url = f"http://127.0.0.1:{socket.getsockname()[1]}"
        async with asyncio.timeout(10.0), asyncio.TaskGroup() as tasks:
            served = serve(FastAPI(), socket, on_stop=stop, on_late=late.set, drain_s=0.1)
            tasks.create_task(served)
            async with httpx.AsyncClient() as client:
                assert (await client.get(f"{url}/openapi.json")).status_code == 200
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("drain_s", [10.0, 0.0])
async def test_a_request_that_meets_the_closing_of_its_idle_connection_is_answered(drain_s):
    stops = asyncio.Event()

    async def stop():
        stops.set()

    with listen("127.0.0.1", 0) as socket:
        host, port = socket.getsockname()
        asks = b"GET /openapi.json HTTP/1.1\r\nhost: a\r\n\r\n"
        async with asyncio.timeout(10.0):
            served = serve(FastAPI(), socket, drain_s=drain_s, on_stop=stop)
            serving = asyncio.create_task(served)
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(asks)
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(re.findall(rb"content-length: (\d+)", head)[0]))
            os.kill(os.getpid(), signal.SIGTERM)
            await stops.wait()
            await asyncio.sleep(0.05)  # by when idle connections have been told
            writer.write(asks)
            last = await reader.read()
            writer.close()
            await serving
    # Without time to drain there is none for that, either.
    assert last.startswith(b"HTTP/1.1 200 ") == (drain_s > 0)
    assert (b"connection: close" in last) == (drain_s > 0)


async def test_on_late_is_called_for_slow_responses_and_these_are_still_sent(caplog):
    late = asyncio.Event()
    app = FastAPI()

    @app.get("/stop")
    async def stop():
        os.kill(os.getpid(), signal.SIGTERM)
        await late.wait()
        return "told to end"

    with listen("127.0.0.1", 0) as socket:
        url = f"http://127.0.0.1:{socket.getsockname()[1]}"
        async with asyncio.timeout(10.0), asyncio.TaskGroup() as tasks:
            tasks.create_task(serve(app, socket, on_late=late.set, drain_s=0.1))
            async with httpx.AsyncClient() as client:
                response = await client.get(f"{url}/stop")
    assert (response.status_code, response.json()) == (200, "told to end")
    assert caplog.messages == []
