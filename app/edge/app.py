"""Builds the router's HTTP application."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from fastapi import FastAPI, Request
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from app.core.config import RouterSettings
from app.core.keys import Keyspace
from app.door.errors import Unauthorized
from app.door.tracing import Tracing, provider_named
from app.edge import errors
from app.edge.keys import check_open, load_keys
from app.edge.large import BodyReader
from app.edge.native import HOT_ROUTES, routes
from app.edge.openai import HttpDoor, refuse
from app.http.server import serve
from app.router.fleet import Fleet
from app.router.metrics import Telemetry
from app.router.router import Router
from app.router.routers import Routers
from app.state.connect import connect, connected
from app.state.scripts import ScriptRunner

log = logging.getLogger(__name__)

CHECK_TIMEOUT_S = 2.0
READS_OF_THE_INDEX = ("match", "predicted")


async def serve_router(settings: RouterSettings, *sockets: socket.socket) -> None:
    """Run a replica until it is told to stop.

    The environment is asked for OTEL_* variables, which OpenTelemetry's SDK reads itself, too.
    Raises ConfigError for bad settings, or a Redis that would drop keys when its memory is full.
    """
    app = create_app(settings, Tracing(provider_named(os.environ)))
    async with connected(settings.redis_url, CHECK_TIMEOUT_S):
        pass
    routers: Routers = app.state.routers
    await serve(
        app,
        *sockets,
        on_stop=routers.stop,
        on_refused=lambda code: routers.own.telemetry.refusals.labels(code).inc(),
    )


def create_app(settings: RouterSettings, tracing: Tracing | None = None) -> FastAPI:
    """A router replica. It starts even without Redis, and says in /readiness what is missing.

    Raises ConfigError for a bad Redis URL, namespace or file of keys.
    """
    keys = load_keys(settings.api_key, settings.api_key_file)
    check_open(settings.host, keys, no_auth=settings.no_auth)
    routers = Routers(settings.namespace, partial(_router, settings))
    door = HttpDoor(settings, routers, keys, tracing or Tracing(None))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(door.run()), tasks.create_task(routers.run())]
            yield
            for task in running:
                task.cancel()

    # A redirect to the path with or without a slash would repeat the caller's Host header.
    app = Application(title="kvroute router", lifespan=lifespan, redirect_slashes=False)
    app.state.routers = routers
    app.state.router = routers.own
    app.state.door = door
    app.state.settings = settings
    app.state.bodies = BodyReader(settings.max_prompt_tokens)
    errors.install(app)
    app.include_router(routes)
    return app


def _router(settings: RouterSettings, namespace: str) -> Router:
    keyspace = Keyspace(namespace)
    timeout_s = settings.redis_timeout_ms / 1000
    redis = connect(settings.redis_url, timeout_s=timeout_s)
    fleet = Fleet(redis, keyspace, timeout_s)
    on_replicas = READS_OF_THE_INDEX if settings.read_from == "replica" else ()
    runner = ScriptRunner(redis, timeout_s, on_replicas=on_replicas)
    return Router(runner, keyspace, settings, fleet, Telemetry())


class Application(FastAPI):
    """FastAPI, except that it only documents the endpoints of decisions: calls bypass all of it.

    These endpoints read their bodies and write their answers themselves. Whatever else FastAPI and
    its middleware do took a fifth of a decision's CPU.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = None
        if scope["type"] == "http":
            door: HttpDoor = self.state.door
            try:
                scope["kvroute.key"] = door.key_name(scope)
            except Unauthorized as error:
                await refuse(scope, send, error)
                return
            if door.takes(scope):
                await door(scope, receive, send)
                return
            if scope["method"] == "POST":
                endpoint = HOT_ROUTES.get(scope["path"])
        if endpoint is None:
            await super().__call__(scope, receive, send)
            return
        scope["app"] = self
        request = Request(scope, receive)
        try:
            response = await endpoint(request)
        except ClientDisconnect:
            return
        except Exception as error:
            response = await errors.answer(request, error)
        await response(scope, receive, send)
