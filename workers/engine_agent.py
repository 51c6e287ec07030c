"""Process of an agent beside one engine of another make, such as vLLM, or beside many."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import aiohttp
import zmq.asyncio
from platformdirs import user_cache_path
from prometheus_client import CollectorRegistry

from app.core.errors import ConfigError
from app.core.keys import Keyspace
from app.core.limits import MAX_ENGINES
from app.core.settings.agent import EngineAgentSettings
from app.core.settings.kinds import base_url
from app.http.client import Exchange
from app.http.errors import OF_ALL_SERVERS, ErrorTable
from app.http.keys import HEALTH, Keys
from app.http.metrics import Family, Sampled, ScrapeCollector
from app.http.paths import Server
from app.http.server import listen
from app.http.server import serve as serve_http
from app.http.supervisor import supervised
from app.state.connect import connected
from app.state.scripts import ScriptRunner
from workers.bridge.follower import EngineFollower
from workers.bridge.metrics import registry_of
from workers.discovery.engine import check
from workers.discovery.fleet import EngineClaims, EngineFleet
from workers.discovery.source import SOURCES, source_of
from workers.tasks import FAILURES

log = logging.getLogger(__name__)

REDIS_TIMEOUT_S = 1.0
CONNECTIONS = 4


async def serve(settings: EngineAgentSettings) -> None:
    """Runs until SIGTERM or SIGINT. Raises ConfigError for a bad setting."""
    given = [name for name in SOURCES if getattr(settings, name)]
    if len(given) > 1:
        flags = (f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError(f"{' and '.join(flags)}: not together")
    if not given:
        raise ConfigError("--engine-url: where does the engine listen? e.g. http://127.0.0.1:8000")
    check(settings)
    source = None if settings.engine_url else await source_of(settings)
    keyspace = Keyspace(settings.namespace)
    async with AsyncExitStack() as opened:
        listening = opened.enter_context(listen(settings.host, settings.port))
        redis = await opened.enter_async_context(connected(settings.redis_url, REDIS_TIMEOUT_S))
        key = settings.engine_api_key
        session = await opened.enter_async_context(
            aiohttp.ClientSession(
                headers={"Authorization": f"Bearer {key}"} if key else None,
                connector=aiohttp.TCPConnector(limit=CONNECTIONS * MAX_ENGINES),
            )
        )
        context = opened.enter_context(zmq.asyncio.Context())
        runner, drain_s = ScriptRunner(redis, REDIS_TIMEOUT_S), settings.drain_s
        memory = Path(settings.memory_folder or user_cache_path("kvroute"))

        def begin(of_engine: EngineAgentSettings) -> EngineFollower:
            return EngineFollower(of_engine, keyspace, runner, session, context, memory)

        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(supervised("redis", redis.follow, FAILURES))
            if source is None:
                await _serve(follower := begin(settings), beside(follower), listening, drain_s)
            else:
                claims = EngineClaims(runner, keyspace, source.name, settings.lease_ttl_s)
                fleet = EngineFleet(source.follow, claims, begin, source.gone_s)
                await _serve(fleet, of_fleet(fleet), listening, drain_s)
            following.cancel()


async def _serve(
    followed: EngineFollower | EngineFleet, app: Server, listening: socket.socket, drain_s: float
) -> None:
    log.info("agent listening on %s", base_url(*listening.getsockname()[:2]))
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(supervised("engine", followed.run, FAILURES))

        async def leave() -> None:
            await followed.stop()
            running.cancel()
            await asyncio.wait([running])

        await serve_http(app, listening, on_stop=leave, drain_s=drain_s)


def beside(follower: EngineFollower) -> Server:
    """Returns GET /health, 200 while the engine serves, else 503, and why not; and GET /metrics."""

    async def health(client: Exchange) -> None:
        await client.answer(_told(follower), 200 if follower.state == "serving" else 503)

    return _server(health, registry_of(lambda: [follower]))


def of_fleet(fleet: EngineFleet) -> Server:
    """Returns GET /health, 200 once it is known which engines there are, else 503, and what each
    is; and GET /metrics."""

    async def health(client: Exchange) -> None:
        engines = {one.worker_id: _told(one) for one in fleet.followers.values()}
        told = {"engines": engines, "findings": fleet.findings()}
        await client.answer(told, 503 if fleet.engines is None else 200)

    return _server(health, registry_of_fleet(fleet))


def _told(follower: EngineFollower) -> dict[str, str]:
    return {"engine": follower.state} | ({"why": follower.why} if follower.why else {})


def _server(health: Callable[[Exchange], Awaitable[None]], registry: CollectorRegistry) -> Server:
    server = Server(ErrorTable(OF_ALL_SERVERS, "agent"), registry, Keys(""))
    server.add("GET", HEALTH, health)
    return server


ENGINES = Family(
    "kvroute_agent_engines",
    "gauge",
    "Engines that were discovered: seen, whoever is their agent; followed, by this one; "
    "without_agent, as it has as many as it takes.",
    ("what",),
)
AGE = Family(
    "kvroute_agent_discovery_age_seconds",
    "gauge",
    "How long ago the file, the name server or Kubernetes last said which engines there are.",
)
FAMILIES = (ENGINES, AGE)


def _samples(fleet: EngineFleet) -> Iterator[Sampled]:
    yield ENGINES, ("seen",), len(fleet.engines or ())
    yield ENGINES, ("followed",), len(fleet.followers)
    yield ENGINES, ("without_agent",), len(fleet.claims.free)
    yield AGE, (), fleet.age_s()


def registry_of_fleet(fleet: EngineFleet) -> CollectorRegistry:
    registry = registry_of(lambda: fleet.followers.values())
    registry.register(ScrapeCollector(FAMILIES, partial(_samples, fleet)))
    return registry
