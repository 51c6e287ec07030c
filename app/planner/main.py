"""One planner process."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from pathlib import Path

from platformdirs import user_state_path

from app.core.errors import ConfigError
from app.core.keys import Keyspace
from app.core.settings.kinds import base_url
from app.core.settings.planner import PlannerSettings
from app.http.client import Exchange
from app.http.errors import OF_ALL_SERVERS, ErrorTable
from app.http.keys import HEALTH, Keys
from app.http.paths import Server
from app.http.server import listen
from app.http.server import serve as serve_http
from app.http.supervisor import supervised
from app.planner.connectors.base import Advise, Connector, ExecConnector, Local
from app.planner.loop import Planner
from app.planner.metrics import PlannerMetrics
from app.planner.observe import Observer
from app.router.fleet import Fleet
from app.state.connect import connected
from app.state.scripts import ScriptRunner

log = logging.getLogger(__name__)

REDIS_TIMEOUT_S = 2.0


async def serve(settings: PlannerSettings) -> None:
    """Run until SIGTERM or SIGINT. Raises ConfigError for a bad setting."""
    keyspace = Keyspace(settings.namespace)
    if settings.max_workers < settings.min_workers:
        raise ConfigError(
            f"max_workers: must be at least min_workers, {settings.min_workers}, "
            f"got {settings.max_workers}"
        )
    if settings.roles and settings.max_workers < 2:
        raise ConfigError(
            f"max_workers: with roles it must be at least 2, got {settings.max_workers}"
        )
    connector = await connector_of(settings)
    async with AsyncExitStack() as opened:
        listening = opened.enter_context(listen(settings.host, settings.port))
        redis = await opened.enter_async_context(connected(settings.redis_url, REDIS_TIMEOUT_S))
        runner = ScriptRunner(redis, REDIS_TIMEOUT_S)
        fleet = Fleet(redis, keyspace, REDIS_TIMEOUT_S)
        metrics = PlannerMetrics(settings.namespace)
        observer = Observer(fleet, redis, runner, keyspace)
        planner = Planner(settings, observer, runner, connector, metrics)
        log.info("planner listening on %s", base_url(*listening.getsockname()[:2]))
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(supervised(task, run, metrics.task_failures))
                for task, run in (
                    ("measurements", fleet.measurements.follow),
                    ("planner", planner.run),
                )
            ]

            async def leave() -> None:
                for task in running:
                    task.cancel()
                await asyncio.wait(running)
                await planner.leave()

            await serve_http(create_app(planner, metrics), listening, on_stop=leave)


async def connector_of(settings: PlannerSettings) -> Connector:
    """Raises ConfigError."""
    match settings.connector:
        case "exec":
            return ExecConnector(settings.exec_command)
        case "local":
            folder = (
                settings.local_folder or user_state_path("kvroute") / "planner" / settings.namespace
            )
            return Local(
                settings.worker_flags,
                Path(folder),
                settings.redis_url,
                settings.namespace,
            )
        case "kubernetes":
            from app.http.kubernetes import load_configuration
            from app.planner.connectors.kubernetes import Kubernetes

            configuration = await load_configuration()
            return Kubernetes(
                settings.kubernetes_scale,
                settings.kubernetes_namespace,
                configuration,
                settings.kubernetes_prefill_scale,
            )
    return Advise()


def create_app(planner: Planner, metrics: PlannerMetrics) -> Server:
    """GET /health: 200 while it leads or stands by, else 503. GET /metrics."""

    async def health(client: Exchange) -> None:
        told = {"planner": "leads" if planner.leads else "stands by"}
        if planner.problem:
            await client.answer(told | {"problem": planner.problem}, 503)
        else:
            await client.answer(told)

    server = Server(ErrorTable(OF_ALL_SERVERS, "planner"), metrics.registry, Keys(""))
    server.add("GET", HEALTH, health)
    return server
