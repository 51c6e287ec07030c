"""One agent process beside an engine of another make, such as vLLM or SGLang."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
from platformdirs import user_cache_path
from prometheus_client import make_asgi_app
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route

from app.core.errors import ConfigError, EngineUnfit
from app.core.keys import Keyspace
from app.core.settings.agent import EngineAgentSettings
from app.core.settings.kinds import base_url
from app.core.types import WORKER_ID
from app.http.server import listen
from app.http.server import serve as serve_http
from app.http.supervisor import supervised
from app.state.connect import connected
from app.state.scripts import ScriptRunner
from workers.bridge.events.sources import reachable
from workers.bridge.facts import Overrides
from workers.bridge.follower import EngineFollower
from workers.bridge.metrics import registry_of
from workers.tasks import FAILURES

log = logging.getLogger(__name__)

REDIS_TIMEOUT_S = 1.0


async def serve(settings: EngineAgentSettings) -> None:
    """Run until SIGTERM or SIGINT. Raises ConfigError for a bad setting."""
    if not settings.engine_url:
        raise ConfigError("--engine-url: where does the engine listen? e.g. http://127.0.0.1:8000")
    if not WORKER_ID.fullmatch(settings.resolved_id()):
        raise ConfigError(
            f"worker id {settings.resolved_id()!r}: 1-253 letters, digits and . _ - are allowed"
        )
    settings.check_role(settings.kv_transfer)
    if settings.role == "both" and settings.kv_transfer == "sglang":
        raise ConfigError("--kv-transfer sglang: needs --role prefill or decode, as the engine has")
    for flag, endpoint in (
        ("--events-endpoint", settings.events_endpoint),
        ("--replay-endpoint", settings.replay_endpoint),
    ):
        _check_endpoint(flag, endpoint)
    keyspace = Keyspace(settings.namespace)
    async with AsyncExitStack() as opened:
        listening = opened.enter_context(listen(settings.host, settings.port))
        redis = await opened.enter_async_context(connected(settings.redis_url, REDIS_TIMEOUT_S))
        key = settings.engine_api_key
        session = await opened.enter_async_context(
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"} if key else None)
        )
        follower = EngineFollower(
            settings,
            keyspace,
            ScriptRunner(redis, REDIS_TIMEOUT_S),
            session,
            _overrides(settings),
            Path(settings.memory_folder or user_cache_path("kvroute")),
        )
        log.info("agent listening on %s", base_url(*listening.getsockname()[:2]))
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(supervised("engine", follower.run, FAILURES))

            async def leave() -> None:
                await follower.stop()
                running.cancel()
                await asyncio.wait([running])

            await serve_http(create_app(follower), listening, on_stop=leave)


def _check_endpoint(flag: str, endpoint: str) -> None:
    """Raises ConfigError."""
    try:
        if endpoint:
            reachable(endpoint, "localhost")
    except EngineUnfit as error:
        raise ConfigError(f"{flag}: {error}") from None


def create_app(follower: EngineFollower) -> Starlette:
    """GET /health: 200 while the engine serves, else 503; and why not. GET /metrics."""

    async def health(_: Request) -> JSONResponse:
        state, why = follower.state, follower.why
        told = {"engine": state} | ({"why": why} if why else {})
        return JSONResponse(told, 200 if state == "serving" else 503)

    metrics = make_asgi_app(registry_of(follower))
    return Starlette(routes=[Route("/health", health), Mount("/metrics", metrics)])


def _overrides(settings: EngineAgentSettings) -> Overrides:
    kind = settings.engine_kind
    return Overrides(
        engine_kind=None if kind == "auto" else kind,  # type: ignore[arg-type]
        events_endpoint=settings.events_endpoint or None,
        replay_endpoint=settings.replay_endpoint or None,
        engine_block_size=settings.engine_block_size,
        capacity_tokens=settings.capacity_tokens,
        data_parallel_size=settings.data_parallel_size,
        model=tuple(filter(None, settings.model.split(","))),
    )
