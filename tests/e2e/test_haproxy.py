"""deploy/haproxy.cfg as `kvroute up` runs it: a copy with a server line for each replica."""

import asyncio
import json
import os
import re
import subprocess
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest

from app.door.answer_request import PATHS
from app.local.redis_server import LOOPBACK, free_port
from tests.eventually import eventually
from tests.redis_servers import require_binary

CONFIG = Path(__file__).parents[2] / "deploy" / "haproxy.cfg"

Balancer = Callable[..., Awaitable[httpx.AsyncClient]]


class Replica:
    """A stand-in for a router, which answers with its port and can die as if by SIGKILL.

    /hold answers once `go` is set, /hang never; /stream sends ten tokens, each once `go` is set.
    Everything else, health checks included, is answered at once.
    """

    def __init__(self):
        self.port = free_port()
        self.reached = asyncio.Event()
        self.go = asyncio.Event()
        self.client_gone = asyncio.Event()
        self.refuses = b""
        self.is_late = False
        """Whether requests with a body are never answered."""
        self.num_bodies = 0
        """Requests with a body so far."""
        self.held = 0
        """Requests to /hold so far."""
        self.balancer_ids = []
        self._connections = set()

    async def start(self):
        self._server = await asyncio.start_server(self._serve, LOOPBACK, self.port)

    async def die(self):
        self._server.close()
        for connection in self._connections:
            connection.transport.abort()
        self.go.set()
        await self._server.wait_closed()

    async def _serve(self, reader, writer):
        self._connections.add(writer)
        try:
            while True:
                await self._answer(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._connections.discard(writer)
            writer.close()

    async def _answer(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        status = b"200 OK"
        if "content-length: " in head:
            self.num_bodies += 1
            status = self.refuses or status
            if self.is_late:
                await self.go.wait()
            await reader.readexactly(int(head.partition("content-length: ")[2].split()[0]))
        self.balancer_ids += re.findall(r"^x-balancer-id: (\S+)\r$", head, re.MULTILINE)
        path = head.split()[1]
        if path in ("/hold", "/hang"):
            self.reached.set()
        if path == "/hang":
            try:
                await reader.readexactly(1)
            finally:
                self.client_gone.set()
        if path == "/hold":
            self.held += 1
            await self.go.wait()
        writer.write(b"HTTP/1.1 %s\r\nTransfer-Encoding: chunked\r\n\r\n" % status)
        if path == "/stream":
            for _ in range(10):
                await self.go.wait()
                self.go.clear()
                writer.write(b"5\r\ntoken\r\n")
        body = str(self.port).encode()
        writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))


@asynccontextmanager
async def haproxy(config, port):
    """The load balancer, listening on `port`."""
    program = str(require_binary("haproxy"))
    environment = os.environ | {"KVROUTE_BALANCER_PORT": str(port)}
    process = await asyncio.create_subprocess_exec(program, "-db", "-f", config, env=environment)
    try:
        async with asyncio.timeout(5):
            while True:
                try:
                    _, writer = await asyncio.open_connection(LOOPBACK, port)
                    break
                except ConnectionError:
                    await asyncio.sleep(0.01)
        writer.close()
        yield
    finally:
        process.kill()
        await process.wait()


@pytest.fixture
async def balancer(tmp_path):
    """Starts the given replicas and the load balancer; returns a client of the load balancer."""
    async with AsyncExitStack() as stack:

        async def start(*replicas):
            for replica in replicas:
                await replica.start()
                stack.push_async_callback(replica.die)
            lines = (f"    server r{r.port} {LOOPBACK}:{r.port}\n" for r in replicas)
            config = tmp_path / "haproxy.cfg"
            config.write_text(CONFIG.read_text() + "".join(lines))
            port = free_port()
            await stack.enter_async_context(haproxy(config, port))
            client = httpx.AsyncClient(base_url=f"http://{LOOPBACK}:{port}", timeout=10)
            return await stack.enter_async_context(client)

        yield start


@pytest.mark.parametrize("routers", [None, "router:8080"])
def test_the_config_is_valid_with_and_without_dns(routers):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KVROUTE_")}
    if routers is not None:
        environment["KVROUTE_ROUTERS_DNS"] = routers
    checked = subprocess.run(
        [require_binary("haproxy"), "-c", "-f", CONFIG],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stderr
    assert "WARNING" not in checked.stderr


async def test_the_answer_without_a_replica_is_logged_and_in_the_shape_of_router_errors(
    balancer, capfd
):
    client = await balancer()
    answer = await client.get("/v1/workers")
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["code"] == "no_router"
    log = ""

    async def logged():
        nonlocal log
        log += capfd.readouterr().out
        return log

    await eventually(logged, lambda text: "503" in text and '"GET /v1/workers HTTP/1.1"' in text)


async def test_the_answer_to_a_body_that_stalls_is_in_the_shape_of_router_errors(tmp_path):
    patient = CONFIG.read_text()
    hasty = tmp_path / "haproxy.cfg"
    hasty.write_text(patient.replace("timeout http-request 30s", "timeout http-request 100ms"))
    assert hasty.read_text() != patient
    port = free_port()
    async with haproxy(hasty, port), asyncio.timeout(5):
        reader, writer = await asyncio.open_connection(LOOPBACK, port)
        writer.write(b"POST /v1/route HTTP/1.1\r\nHost: kvroute\r\nContent-Length: 9\r\n\r\n{")
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
    assert head.startswith(b"HTTP/1.1 408 ")
    assert json.loads(body)["error"]["code"] == "body_timeout"


@pytest.mark.parametrize("body_bytes", [0, 100_000])
async def test_requests_held_by_a_killed_replica_are_answered_by_another(balancer, body_bytes):
    first, second = Replica(), Replica()
    client = await balancer(first, second)
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        requests = [
            group.create_task(client.post("/hold", content=bytes(body_bytes))) for _ in range(6)
        ]

        async def held():
            return first.held, second.held

        # All of them: `die` does not break the connection of a request that has yet to arrive.
        await eventually(held, lambda seen: sum(seen) == 6 and min(seen) > 0)
        await first.die()
        second.go.set()
    assert [(r.result().status_code, r.result().text) for r in requests] == [
        (200, str(second.port))
    ] * 6


def test_every_path_that_an_engine_computes_for_has_its_time():
    [paths] = re.findall(r"^ *acl answers path,url_dec (.+)$", CONFIG.read_text(), re.MULTILINE)
    assert {*paths.split()} == {*PATHS}


async def test_requests_held_by_a_frozen_replica_are_answered_by_another(balancer, monkeypatch):
    monkeypatch.setenv("KVROUTE_BALANCER_TIMEOUT", "200ms")
    frozen, other = Replica(), Replica()
    client = await balancer(frozen, other)
    other.go.set()
    async with asyncio.timeout(10):
        answers = [
            await client.post("/hold", content=b"prompt", headers={"X-Balancer-ID": "chosen"})
            for _ in range(2)
        ]
    assert [(a.status_code, a.text) for a in answers] == [(200, str(other.port))] * 2
    assert frozen.held > 0
    # A router thus knows that a request was sent before, and which; and no client can pretend to.
    assert len(set(other.balancer_ids)) == 2
    assert set(frozen.balancer_ids) <= set(other.balancer_ids) - {"chosen"}


async def test_a_replica_that_comes_back_is_used_again(balancer):
    replica = Replica()
    client = await balancer(replica)
    assert (await client.get("/")).text == str(replica.port)
    await replica.die()
    assert (await client.get("/")).status_code == 503
    await replica.start()
    async with asyncio.timeout(5):
        while True:
            answer = await client.get("/")
            if answer.status_code == 200:
                break
            await asyncio.sleep(0.05)


async def test_the_tokens_of_a_stream_are_forwarded_one_by_one_without_delay(balancer):
    replica = Replica()
    client = await balancer(replica)
    replica.go.set()
    # Held back to fill packets, ten tokens would take about two seconds.
    async with asyncio.timeout(1.8), client.stream("GET", "/stream") as answer:
        received = b""
        async for part in answer.aiter_raw():
            received += part
            replica.go.set()
    assert received == b"token" * 10 + str(replica.port).encode()


async def test_a_replica_notices_that_a_waiting_client_has_hung_up(balancer):
    replica = Replica()
    client = await balancer(replica)
    async with asyncio.timeout(5):
        request = asyncio.ensure_future(client.get("/hang"))
        await replica.reached.wait()
        request.cancel()
        await replica.client_gone.wait()


async def test_a_path_is_known_however_it_is_spelled(balancer, monkeypatch):
    monkeypatch.setenv("KVROUTE_BALANCER_TIMEOUT", "200ms")
    monkeypatch.setenv("KVROUTE_BALANCER_ANSWER_TIMEOUT", "1s")
    first, second = Replica(), Replica()
    client = await balancer(first, second)
    for cell in (first, second):
        cell.is_late = True
    answer = await client.post("/v1/chat/%63ompletions", content=b"prompt")
    assert answer.status_code == 504
    assert first.num_bodies + second.num_bodies == 1, "an engine may have it already"


async def test_one_address_never_has_all_connections(balancer, monkeypatch):
    monkeypatch.setenv("KVROUTE_BALANCER_MAXCONN_PER_CLIENT", "4")
    port = (await balancer(Replica())).base_url.port

    async def ask(host):
        try:
            reader, writer = await asyncio.open_connection(LOOPBACK, port, local_addr=(host, 0))
            writers.append(writer)
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            return await reader.read(12)
        except ConnectionError:
            return b""

    writers = []
    try:
        said = [await ask("127.0.0.2") for _ in range(6)]
        assert said == [b"HTTP/1.1 200"] * 4 + [b""] * 2
        assert await ask("127.0.0.3") == b"HTTP/1.1 200"
    finally:
        for writer in writers:
            writer.close()


async def test_without_a_replica_another_fleet_may_be_asked(balancer):
    replica = Replica()
    client = await balancer(replica)
    await replica.die()
    assert (await client.get("/")).status_code == 503
    answer = await client.get("/", headers={"X-Unserved-Status": "425"})
    assert (answer.status_code, answer.headers["x-status"]) == (425, "503")
    assert answer.json()["error"]["code"] == "no_router"
