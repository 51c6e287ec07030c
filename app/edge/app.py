"""A router replica as one application, in which every path is a route."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from typing import Any, Protocol

from fastapi import FastAPI
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from fastapi.openapi.utils import get_openapi
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from app.console import page
from app.console import routes as console_routes
from app.console.console import Console
from app.core.keys import Keyspace
from app.core.settings.kinds import base_url, parse_origins
from app.core.settings.router import RouterSettings
from app.core.types import random_hex
from app.door.answer_request import is_of_door
from app.door.door import Door
from app.door.engine.signs import EngineSigns
from app.door.engine.upstream import Upstream
from app.door.told.tracing import Tracing, provider_named
from app.edge import front_page, models, operators
from app.edge.client import Client, comment_each
from app.edge.large import BodyReader
from app.edge.origins import check_origin, may_be_shared
from app.edge.reload import LiveSettings, WatchedFiles, written
from app.edge.routes import BARE_ROUTES
from app.edge.services import RULES, Services, check
from app.edge.tls import certificate_of
from app.http.held import HeldBodies
from app.http.keys import CONSOLE_DATA, Keys, check_open
from app.http.paths import Paths
from app.http.server import serve
from app.http.supervisor import supervised
from app.router.fleet import Fleet
from app.router.limiter import Limiter
from app.router.metrics import Pulse, Telemetry
from app.router.replica import UsageTally
from app.router.router import Router
from app.router.routers import Routers
from app.router.vouching import Signs
from app.state.client import RedisClient
from app.state.connect import connect, connected
from app.state.scripts import ScriptRunner

log = logging.getLogger(__name__)

CHECK_TIMEOUT_S = 2.0
EXPOSED = (
    *("x-request-id", "retry-after", "x-should-retry"),
    *("x-kvroute-worker", "x-kvroute-overlap", "x-kvroute-trust", "x-kvroute-source"),
    "x-kvroute-tokens",
)
"""Headers of answers that pages of other origins may read."""
READS_OF_THE_INDEX = ("match", "predicted")


class Beside(Protocol):
    """Server of a replica beside HTTP."""

    async def run(self) -> None:
        """Run until cancelled."""

    async def stop(self) -> None:
        """Take nothing more; returns once what is under way has ended."""


async def serve_router(
    settings: RouterSettings,
    *sockets: socket.socket,
    file: str = "",
    read: Callable[[], RouterSettings] | None = None,
    beside: Callable[[Application], Beside] | None = None,
) -> None:
    """Runs a replica until it is told to stop. OTEL_* variables are read from the environment.

    file: with settings, that may change while it runs. read: see LiveSettings. beside: makes what
    else it serves. Raises ConfigError for bad settings, or a Redis that would drop keys when its
    memory is full.
    """
    await written(settings.api_key_file)
    app = create_app(settings, Tracing(provider_named(os.environ)))
    certificate = certificate_of(settings.tls_cert, settings.tls_key)
    async with connected(settings.redis_url, CHECK_TIMEOUT_S):
        pass
    replica = app.replica
    also = beside(app) if beside is not None else None
    if also is not None:
        replica.beside.append(also.run)
    for listening in sockets:
        check_open(listening.getsockname()[0], replica.keys, no_auth=settings.no_auth)
    if file and read is not None:
        live = LiveSettings(replica, file, read)
        replica.watched.append(WatchedFiles("settings", lambda: [file], live.reload))
    if certificate is not None:
        files = WatchedFiles("certificates", lambda: certificate.files, certificate.reload)
        replica.watched.append(files)
    # SIGHUP has the files looked at: else it would end the process, and with it all streams.
    look = partial(_look_at, replica.watched)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, look)
    routers = replica.routers
    url = base_url(*sockets[0].getsockname()[:2])
    log.info("router listening on %s", url.replace("http:", "https:", 1) if certificate else url)

    await serve(
        app,
        *sockets,
        on_stop=partial(_stop, replica, also),
        on_late=replica.cut_short,
        drain_s=settings.drain_s,
        on_refused=lambda code: routers.own.telemetry.refusals.labels(code).inc(),
        held=HeldBodies(settings.max_held_bytes),
        tls=certificate.context if certificate else None,
    )


async def _stop(replica: Services, also: Beside | None) -> None:
    replica.is_stopping = True
    if also is not None:
        await also.stop()
    await replica.routers.stop()


def _look_at(watched: Iterable[WatchedFiles]) -> None:
    for files in watched:
        files.look()


def create_app(settings: RouterSettings, tracing: Tracing | None = None) -> Application:
    """Returns a router replica, which starts even without Redis, and says in /readiness what is
    missing. Raises ConfigError for a bad Redis URL, namespace or file of keys."""
    keys = check(settings)
    timeout_s = settings.redis_timeout_ms / 1000
    redis = partial(connect, settings.redis_url, timeout_s=timeout_s)
    upstream = Upstream()
    signs = Signs(EngineSigns(upstream, settings.worker_key).answers, upstream.heard_s)
    tally = UsageTally(
        Keyspace(settings.namespace), settings.usage_days, lambda: routers.own.fleet.redis_now_ms
    )
    limiter = Limiter(Keyspace(settings.namespace))
    make = partial(_router, settings, signs, tally, limiter)
    routers = Routers(settings.namespace, redis, make, timeout_s)
    door = Door(settings, routers, tracing or Tracing(None), upstream)
    bodies = BodyReader(settings.max_prompt_tokens)
    console = _console(settings, routers, door, keys) if settings.console else None
    watched = [WatchedFiles("keys", lambda: [keys.path] if keys.path else [], keys.reload)]
    operators.show_files(routers.own.telemetry.registry, watched, keys)
    readiness = operators.ReadinessCheck(routers, door)
    return Application(Services(settings, routers, door, keys, bodies, readiness, console, watched))


def _console(settings: RouterSettings, routers: Routers, door: Door, keys: Keys) -> Console:
    address = f"{socket.gethostname()}:{settings.port}"
    return Console(
        routers.own,
        random_hex(4),
        address,
        version("kvroute"),
        lambda: door.settings.namespace_weights,
        door.apart,
        lambda: keys.rules,
    )


def _router(
    settings: RouterSettings,
    signs: Signs,
    tally: UsageTally,
    limiter: Limiter,
    namespace: str,
    redis: RedisClient,
) -> Router:
    keyspace = Keyspace(namespace)
    timeout_s = settings.redis_timeout_ms / 1000
    fleet = Fleet(redis, keyspace, timeout_s)
    on_replicas = READS_OF_THE_INDEX if settings.read_from == "replica" else ()
    runner = ScriptRunner(redis, timeout_s, on_replicas=on_replicas)
    return Router(runner, keyspace, settings, fleet, Telemetry(), signs, tally, limiter)


@asynccontextmanager
async def _running(replica: Services, _: FastAPI) -> AsyncIterator[None]:
    """Runs what goes on beside requests."""
    telemetry = replica.router.telemetry
    failures = telemetry.task_failures
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(replica.door.run()),
            tasks.create_task(replica.routers.run()),
            tasks.create_task(supervised("pulse", Pulse(telemetry).run, failures)),
            *(tasks.create_task(run()) for run in replica.beside),
            *(
                tasks.create_task(supervised(watched.what, watched.run, failures))
                for watched in replica.watched
            ),
        ]
        every_s = replica.settings.comment_every_s
        if every_s:
            comments = supervised(
                "comments", partial(comment_each, replica.clients, every_s), failures
            )
            running.append(tasks.create_task(comments))
        shown = replica.console and tasks.create_task(
            supervised("console", replica.console.run, failures)
        )
        yield
        if shown:
            # It says that the replica is gone, over connections that the routers close.
            shown.cancel()
            await asyncio.wait([shown])
        for task in running:
            task.cancel()


READS = (models, operators, console_routes, page, front_page)
"""Modules with FastAPI routes."""


class Application(FastAPI):
    """A check of keys, then the path's route, and one answer to whatever that raises. The only
    middleware is for pages of other origins, around all of it: a framework's took a fifth of a
    decision's CPU."""

    def __init__(self, replica: Services) -> None:
        super().__init__(
            title="kvroute router",
            version=version("kvroute"),
            lifespan=partial(_running, replica),
            openapi_url=None,
        )
        self.replica = replica
        reads = [one for module in READS for one in module.ROUTER.routes]
        self._paths = Paths(*BARE_ROUTES, *reads)
        self.router.routes += self._paths.routes
        self._reads = AsyncExitStackMiddleware(self.router)
        self._at = {(bare.method, bare.path): bare.answer for bare in BARE_ROUTES}
        """Routes are tried one after another, which takes a µs each, unless the path is plain."""
        origins = parse_origins(replica.settings.cors_origin)
        self._shared: ASGIApp | None = None
        if origins:
            self._shared = CORSMiddleware(
                self._answer,
                allow_origins=origins,
                allow_methods=("GET", "POST"),
                allow_headers=("*",),
                expose_headers=EXPOSED,
            )

    def openapi(self) -> dict[str, Any]:
        """Returns all paths in OpenAPI."""
        if self.openapi_schema is None:
            routes = [*(bare.documented() for bare in BARE_ROUTES), *self.routes]
            self.openapi_schema = get_openapi(title=self.title, version=self.version, routes=routes)
        return self.openapi_schema

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self
        if scope["type"] != "http":
            await self.router(scope, receive, send)
            return
        if self._shared is not None and may_be_shared(scope["path"]):
            await self._shared(scope, receive, send)
        else:
            await self._answer(scope, receive, send)

    async def _answer_else(self, client: Client) -> None:
        """Answers at a path with parameters, or to OPTIONS. Raises HTTPException, which names the
        path that was meant."""
        if await self._paths.answered(client):
            return
        scope = client.scope
        if scope["method"] == "HEAD":  # the server leaves out the body
            scope = {**scope, "method": "GET"}
        await self._reads(scope, client.receive, client.say)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        replica, path = self.replica, scope["path"]
        client = Client(scope, receive, send, replica)
        replica.clients.add(client)
        is_reported = is_of_door(path)
        ended_by: BaseException | None = None
        try:
            client.key_name = replica.keys.check(path, scope["headers"])
            scope[RULES] = client.rules = replica.keys.rules.get(client.key_name)
            if path.startswith(CONSOLE_DATA):
                asks_for_keys = bool(replica.keys) or replica.settings.no_auth
                check_origin(scope["headers"], asks_for_keys=asks_for_keys)
            answer = self._at.get((scope["method"], path))
            if answer is not None:
                await answer(client)
            else:
                await self._answer_else(client)
        except ClientDisconnect as error:
            ended_by = error
        except Exception as error:
            ended_by = error
            await client.fail(error)
        except asyncio.CancelledError as error:
            ended_by = client.ended_by or error
            if client.ended_by is None:
                raise
            await client.fail(client.ended_by)
        except BaseException as error:
            ended_by = error
            raise
        finally:
            replica.clients.discard(client)
            if is_reported:
                client.report(ended_by)
            # It refers to this frame, and would keep the body until the next garbage collection.
            ended_by = None
