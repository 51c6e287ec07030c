"""Each listener of docs/front-door.md is opened, and asks for what the page says, and no more."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from redis.exceptions import RedisError

from app.http.protocol import MAX_HEAD_BYTES, MAX_URL_BYTES
from app.local.balancers import rendered
from app.local.redis_server import EmbeddedRedis, free_port
from app.state.connect import connect
from tests.attack.kv_port import KvPort
from tests.e2e.engines import Process
from tests.e2e.test_cells import CONFIG as CELLS
from tests.e2e.test_haproxy import CONFIG, Replica, haproxy
from tests.eventually import eventually
from tests.gateway.envoy import ENVOY
from tests.test_deploy import DEPLOY, REDIS_VARIABLES
from tests.test_deploy import started as started_redis
from tests.test_listeners import ROWS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

HERE = "127.0.0.1"
KEY, OPERATOR, READER = "client-key", "operator-key", "reader-key"
WORKER, WORKER_READER = "worker-key", "worker-reader-key"


@contextmanager
def running(*arguments):
    process = Process(*arguments)
    try:
        yield process
    finally:
        process.end()


async def statuses(url, *keys, path="/", **headers):
    async with httpx.AsyncClient(base_url=url, headers=headers) as http:
        return [
            (
                await http.get(path, headers={"authorization": f"Bearer {key}"} if key else {})
            ).status_code
            for key in keys
        ]


async def bounded(url):
    async with httpx.AsyncClient(base_url=url) as http:
        for method, status in (("OPTIONS", 204), ("PUT", 405)):
            answer = await http.request(method, "/health")
            assert (answer.status_code, answer.headers["allow"]) == (status, "GET, HEAD, OPTIONS")
        assert "ask /health instead" in (await http.get("/health/")).text
        assert (await http.get("/" + "a" * MAX_URL_BYTES)).status_code == 414
        assert (await http.get("/", headers={"x": "y" * MAX_HEAD_BYTES})).status_code == 431


ABUSES = {
    "nothing": b"",
    "a head without end": b"GET /health HTTP/1.1\r\nHost: a\r\nX: ",
    "a body that never comes": b"POST /metrics HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n",
    "headers without end": b"GET /health HTTP/1.1\r\nHost: a\r\n" + 400_000 * b"x: y\r\n",
    "no HTTP": b"\x16\x03\x01\xff\r\n\r\n",
}
ENDS_S = 45.0
"""Connections without an answer end by then. An idle one may stay for longer."""


async def abused(url, path="/health", *, ends_s=ENDS_S):
    """Each of ABUSES ends, and others are served meanwhile."""
    at = httpx.URL(url)

    async def others():
        async with httpx.AsyncClient(base_url=url, timeout=10) as http:
            assert (await http.get(path)).status_code < 504

    await each_ends(at.host, at.port, others, ends_s)


async def each_ends(host, port, others, ends_s=ENDS_S, abuses=tuple(ABUSES)):
    async def ended(abuse):
        reader, writer = await asyncio.open_connection(host, port)
        with suppress(OSError):
            writer.write(ABUSES[abuse])
            async with asyncio.timeout(ends_s):
                while await reader.read(65_536):
                    pass
        writer.transport.abort()

    async with asyncio.TaskGroup() as tasks:
        trying = [tasks.create_task(ended(abuse), name=abuse) for abuse in abuses]
        for _ in range(5):
            await others()
            await asyncio.wait(trying, timeout=0.5)


async def check_router(redis, folder):
    keys = folder / "keys"
    keys.write_text(f"app {KEY}\nops {OPERATOR} operator\nprometheus {READER} metrics\n")
    arguments = ("router", "--port=0", f"--redis-url={redis.url}", f"--api-key-file={keys}")
    with running(*arguments) as router:
        url = router.url
        everybody = ("", KEY, OPERATOR, READER)
        for path in ("/v1/models", "/v1/workers", "/openapi.json"):
            assert await statuses(url, *everybody, path=path) == [401, 200, 200, 401]
        assert await statuses(url, "", path="/health") == [200]
        assert (await statuses(url, "", path="/readiness"))[0] in (200, 503)
        assert await statuses(url, "", path="/console/") == [200]
        assert await statuses(url, "", path="/") == [200]
        assert await statuses(url, *everybody, path="/metrics") == [401, 200, 200, 200]
        overview = "/console/api/overview"
        assert await statuses(url, *everybody, path=overview) == [401, 401, 200, 401]
        assert await statuses(url, OPERATOR, path=overview, origin="https://a.example") == [403]
        await bounded(url)
        await abused(url)


async def check_worker(redis, folder):
    port = free_port()
    with running(
        *("worker", "--port=0", f"--redis-url={redis.url}", f"--kv-port={port}"),
        *("--kv-transfer=kvroute", f"--worker-key={WORKER}", f"--metrics-key={WORKER_READER}"),
    ) as worker:
        everybody = ("", WORKER, WORKER_READER, KEY)
        assert await statuses(worker.url, *everybody, path="/v1/models") == [401, 200, 401, 401]
        assert await statuses(worker.url, *everybody, path="/metrics") == [401, 200, 200, 401]
        assert (await statuses(worker.url, "", path="/health"))[0] in (200, 503)
        await bounded(worker.url)
        await abused(worker.url)
        assert b"proof" in await KvPort(HERE, port).asked()
        assert b"proof" in await KvPort(HERE, port, KEY).asked()
        assert b"was fetched" in await KvPort(HERE, port, WORKER).asked()
        attacked = KvPort(HERE, port, WORKER)
        await attacked.attack(100)
        assert attacked.problems == []


async def check_agent(redis, folder):
    with running(
        *("agent", "--engine-url=http://127.0.0.1:9", f"--redis-url={redis.url}"),
        *(f"--memory-folder={folder}", "--worker-id=e", "--port=0"),
    ) as agent:
        assert await statuses(agent.url, "", path="/metrics") == [200]
        assert await statuses(agent.url, "", path="/health") == [503]
        await bounded(agent.url)
        await abused(agent.url)


async def check_planner(redis, folder):
    with running("planner", f"--redis-url={redis.url}", "--port=0") as planner:
        assert await statuses(planner.url, "", path="/metrics") == [200]
        assert (await statuses(planner.url, "", path="/health"))[0] in (200, 503)
        await bounded(planner.url)
        await abused(planner.url)


async def check_balancer(redis, folder):
    for config in (CONFIG, CELLS):
        async with AsyncExitStack() as stack:
            replica, port = Replica(), free_port()
            await replica.start()
            stack.push_async_callback(replica.die)
            made = folder / config.name
            made.write_text(config.read_text() + f"    server a {HERE}:{replica.port}\n")
            await stack.enter_async_context(haproxy(made, port))
            assert await statuses(f"http://{HERE}:{port}", "", path="/v1/models") == [200]
            assert _listening(port) == [HERE]
            await abused(f"http://{HERE}:{port}")


async def check_picker(redis, folder):
    pytest.importorskip("h2")
    port = free_port()
    arguments = ("picker", "--port=0", f"--grpc-port={port}", f"--redis-url={redis.url}")
    with running(*arguments) as picker:
        await bounded(picker.url)
        await abused(picker.url)
        assert _listening(port) == [HERE]
        await each_ends(HERE, port, partial(statuses, picker.url, "", path="/health"))


async def check_envoy(redis, folder):
    if not ENVOY.exists():
        pytest.skip("Envoy is not installed: make test-gateway")
    front, made = free_port(), folder / "envoy.yaml"
    made.write_text(rendered((HERE, front), [(HERE, free_port())], [(HERE, free_port())]))
    command = (ENVOY, "-c", made, "-l", "off", "--disable-hot-restart")
    envoy = await asyncio.create_subprocess_exec(*command)
    try:
        await eventually(lambda: asyncio.to_thread(_listening, front))
        await abused(f"http://{HERE}:{front}", ends_s=100.0)  # its idle_timeout is 75 s
    finally:
        envoy.kill()
        await envoy.wait()


HTTP_ALONE = [name for name, sent in ABUSES.items() if b"Host:" in sent]
"""Redis takes these for attacks by browsers."""


async def check_redis(redis, folder):
    assert _listening(redis.port) == [HERE]
    async with connect(redis.url) as client:
        await each_ends(HERE, redis.port, client.ping, abuses=HTTP_ALONE)


async def check_deployed_redis(redis, folder):
    port, user = free_port(), quote(REDIS_VARIABLES["ROUTER_PASSWORD"])
    assert " --timeout 300 " in (DEPLOY / "redis.sh").read_text()
    options = ("--port", str(port), "--bind", HERE, "--save", "", "--timeout", "2")
    with started_redis(str(DEPLOY / "users.acl"), str(folder), *options) as process:
        try:
            await eventually(lambda: asyncio.to_thread(_listening, port))
            for path in ("", f"kvroute-router:{user}wrong@", "default:@"):
                async with connect(f"redis://{path}{HERE}:{port}") as client:
                    with pytest.raises(RedisError, match=r"(?i)auth|invalid username"):
                        await client.ping()
            async with connect(f"redis://kvroute-router:{user}@{HERE}:{port}") as client:
                await each_ends(HERE, port, client.ping)
        finally:
            process.terminate()


def _listening(port):
    """The addresses of this machine at which somebody listens on a port."""
    found = []
    for host in {HERE, "127.0.0.2", socket.gethostbyname(socket.gethostname())}:
        with socket.socket() as sock:
            sock.settimeout(2)
            if sock.connect_ex((host, port)) == 0:
                found.append(host)
    return found


Check = Callable[[EmbeddedRedis, Path], Awaitable[None]]
CHECKS = {
    "router": check_router,
    "router `/`, `/health`, `/readiness`, `/console/`": check_router,
    "router `/metrics`": check_router,
    "router `/console/api/`": check_router,
    "picker, gateways": check_picker,
    "worker": check_worker,
    "worker, KV": check_worker,
    "agent": check_agent,
    "planner": check_planner,
    "balancer": check_balancer,
    "cells' balancer": check_balancer,
    "Envoy of `envoy.yaml`": check_envoy,
    "Redis of `redis.sh`": check_deployed_redis,
    "Redis of `kvroute up`": check_redis,
}


@pytest.mark.parametrize("check", dict.fromkeys(CHECKS.values()), ids=lambda check: check.__name__)
async def test_a_listener_asks_for_what_the_page_says(one_redis_server, tmp_path, check):
    await check(one_redis_server, tmp_path)


def test_every_row_of_the_page_has_a_check():
    assert CHECKS.keys() == ROWS.keys()
