"""What servers that are no routers answer alike: docs/front-door.md has the table of routers."""

import asyncio
import socket
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry

from app.http.errors import OF_ALL_SERVERS, ErrorTable
from app.http.keys import HEALTH, Keys
from app.http.paths import Server
from app.http.server import serve


@asynccontextmanager
async def serving():
    async def health(client):
        await client.answer({"status": "ok"})

    async def complete(client):
        await client.answer({"read": (await client.read(100)).decode()})

    server = Server(ErrorTable(OF_ALL_SERVERS, "agent"), CollectorRegistry(), Keys(""))
    server.add("GET", HEALTH, health)
    server.add("POST", "/v1/completions", complete)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        task = asyncio.create_task(serve(server, listener))
        try:
            yield listener.getsockname()
        finally:
            task.cancel()
            await asyncio.wait([task])


async def asked(address, method, path, version="1.1"):
    """Returns the status, headers and body of an answer."""
    async with asyncio.timeout(20):
        reader, writer = await asyncio.open_connection(*address)
        head = f"{method} {path} HTTP/{version}\r\nHost: x\r\nConnection: close\r\n\r\n"
        writer.write(head.encode())
        head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
        writer.close()
    first, *lines = head.split("\r\n")
    return int(first.split()[1]), dict(line.lower().split(": ", 1) for line in lines), body


ANSWERS = {
    ("GET", "/health"): (200, None, '{"status":"ok"}'),
    ("HEAD", "/health"): (200, None, ""),
    ("GET", "/metrics"): (200, None, ""),
    ("OPTIONS", "/health"): (204, "get, head, options", ""),
    ("OPTIONS", "/v1/completions"): (204, "options, post", ""),
    ("PUT", "/health"): (405, "get, head, options", "method_not_allowed"),
    ("GET", "/v1/completions"): (405, "options, post", "method_not_allowed"),
    ("GET", "/metrics/"): (404, None, "There is no /metrics/: ask /metrics instead."),
    ("GET", "//health"): (404, None, "There is no //health: ask /health instead."),
    ("POST", "/completions"): (404, None, "ask /v1/completions instead."),
    ("OPTIONS", "/none"): (404, None, "not_found"),
}


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_all_servers_answer_alike(version):
    async with serving() as address:
        for (method, path), (status, allowed, said) in ANSWERS.items():
            answer = await asked(address, method, path, version)
            assert (answer[0], answer[1].get("allow")) == (status, allowed), (method, path)
            assert said in answer[2]
            assert "location" not in answer[1]
