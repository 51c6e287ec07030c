"""A replica in this process, simulated workers, here or elsewhere, and a client of each kind."""

import asyncio
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import fields, replace

import httpx
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from app.core.settings.router import RouterSettings
from app.core.settings.worker import WorkerSettings
from app.core.worker_report import WorkerInfo
from app.edge.app import create_app
from app.http.server import listen, serve
from app.local.redis_server import free_port
from app.router import routers
from app.state.scripts import ScriptRunner
from tests.e2e.engines import Process
from tests.eventually import eventually
from tests.fake_worker import KEYS, NAMESPACE, FakeWorker, worker_info
from tests.fakes.engine import fake_engine
from workers.main import serve as serve_worker

MODEL = "sim-model"


def options_of(redis_url, name):
    """Of a simulated worker of MODEL, a hundred times as fast as a real one."""
    return {
        "redis_url": redis_url,
        "namespace": NAMESPACE,
        "worker_id": name,
        "port": 0,
        "model_name": MODEL,
        "speedup": 100,
    }


@pytest.fixture(autouse=True)
def _often(monkeypatch):
    """Replicas look at the directory of models more often than they do as a rule."""
    monkeypatch.setattr(routers, "DIRECTORY_INTERVAL_S", 0.1)


@contextmanager
def worker(redis_url, name, **options):
    """A simulated worker as a process of its own, to be killed or stopped."""
    chosen = options_of(redis_url, name) | options
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in chosen.items()]
    process = Process("worker", *flags)
    try:
        yield process
    finally:
        process.end()


@asynccontextmanager
async def worker_here(redis_url, name, **options):
    """The URL of a simulated worker in this process, which costs a second of CPU less."""
    here = {"port": free_port(), "drain_s": 0.0, "lease_ttl_s": 60.0}
    chosen = options_of(redis_url, name) | here | options
    serving = asyncio.create_task(serve_worker(WorkerSettings(**chosen)))
    try:
        yield f"http://127.0.0.1:{chosen['port']}"
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


@asynccontextmanager
async def replica(redis_url, tracing=None, **settings):
    """A client of a replica that listens on a port."""
    async with changing_replica(redis_url, tracing, **settings) as (client, _):
        yield client


@asynccontextmanager
async def changing_replica(redis_url, tracing=None, **settings):
    """The same, and what changes some of its settings while it runs."""
    chosen = {"seed": 7, "redis_timeout_ms": 5000, "show_decision": True} | settings
    given = {"redis_url": redis_url, "namespace": NAMESPACE} | chosen
    app = create_app(RouterSettings(**given), tracing)

    def change(**changed):
        app.replica.adopt(replace(app.replica.settings, **changed))

    with listen("127.0.0.1", 0) as listening:
        serving = asyncio.create_task(serve(app, listening))
        url = f"http://127.0.0.1:{port_of(listening)}"
        key = settings.get("api_key")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        try:
            async with httpx.AsyncClient(base_url=url, timeout=60, headers=headers) as client:
                yield client, change
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)


@asynccontextmanager
async def completing(
    redis, name, complete, engine="", path="/v1/completions", more=(), keys=KEYS, **about
):
    """A worker of model `m` in a namespace, whose engine answers POST `path` by `complete`.

    more: that the engine answers. about: more of WorkerInfo.
    """
    app = web.Application(client_max_size=2**22)
    app.add_routes([web.post(path, complete), *more])
    async with TestServer(app) as server:
        address = str(server.make_url(""))
        yield await registered(redis, name, address, keys, engine=engine, **about)


@asynccontextmanager
async def sick_worker(redis, name, **about):
    """A worker of model `m`, without an agent, whose engine falls ill on demand.

    about: more of WorkerInfo, and options of FakeEngine.
    """
    of_info = {field.name for field in fields(WorkerInfo)}
    options = {key: about.pop(key) for key in list(about) if key not in of_info}
    async with fake_engine(**options) as engine:
        await registered(redis, name, engine.url, **about)
        yield engine


async def registered(redis, name, address, keys=KEYS, **about):
    info = worker_info(name, kv_total_blocks=100_000)
    if "kv_transfer" in about:
        about = {"kv_compatible": "fakes"} | about
    info = replace(info, **({"address": address, "models": ("m",)} | about))
    worker = FakeWorker(ScriptRunner(redis, 5.0), keys, info)
    await worker.register()
    await worker.activate()
    return worker


def port_of(listening):
    return listening.getsockname()[1]


async def models(client):
    return [card["id"] for card in (await client.get("/v1/models")).json()["data"]]


async def until_healthy(client):
    async def healthy():
        with suppress(httpx.TransportError):
            return (await client.get("/health")).is_success
        return False

    await eventually(healthy)


async def until_serving(client, num_workers):
    async def workers():
        return len((await client.get("/v1/workers")).json()["workers"])

    await eventually(workers, lambda found: found == num_workers, within_s=90.0)
    await eventually(lambda: models(client), bool)


@pytest.fixture
async def door(one_redis_server):
    """A client of a replica with two workers."""
    url = one_redis_server.url
    async with worker_here(url, "a"), worker_here(url, "b"), replica(url) as client:
        await until_serving(client, 2)
        yield client
