"""Builds the router's HTTP application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from app.api import errors
from app.api.routes import routes
from app.core.config import RouterSettings
from app.core.keys import Keyspace
from app.core.redis import connect
from app.core.scripts import ScriptRunner
from app.fleet import Fleet
from app.router import Router
from app.telemetry import Telemetry


def create_app(settings: RouterSettings) -> FastAPI:
    """A router replica. It starts, and says in /readiness what is missing, even without Redis.

    Raises ConfigError for a bad Redis URL or namespace.
    """
    keyspace = Keyspace(settings.namespace)
    timeout_s = settings.redis_timeout_ms / 1000
    redis = connect(settings.redis_url, timeout_s=timeout_s)
    fleet = Fleet(redis, keyspace, timeout_s)
    runner = ScriptRunner(redis, timeout_s)
    router = Router(runner, keyspace, settings, fleet, Telemetry())

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(router.run())
                yield
                running.cancel()
        finally:
            await redis.aclose()

    app = FastAPI(title="kvroute router", lifespan=lifespan)
    app.state.router = router
    app.state.settings = settings
    errors.install(app)
    app.include_router(routes)
    return app
