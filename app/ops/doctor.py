"""`kvroute doctor`: finds what makes cache-aware routing silently useless."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import asdict

import click

from app.core.check import Check
from app.core.errors import KvrouteError
from app.core.extras import extra
from app.core.keys import Keyspace
from app.core.worker_report import WorkerInfo
from app.ops import checks, conditions, workers
from app.ops.figures import Together
from app.ops.terminal import COMMON, json_text, on_redis, say
from app.options import BASE_URL, Command
from app.state import replicas
from app.state.client import RedisClient


@click.command(cls=Command)
@COMMON
@click.option(
    "--engine-url",
    "engine_urls",
    multiple=True,
    type=BASE_URL,
    help="Base URL of an engine to check as well; may be given several times.",
)
@click.option(
    "--engine-api-key",
    default="",
    envvar="KVROUTE_ENGINE_API_KEY",
    show_envvar=True,
    help="API key that the engines ask for, if they do.",
)
@click.option(
    "--router-url",
    "router_urls",
    multiple=True,
    type=BASE_URL,
    help="Base URL of a router to ask as well; may be given several times.",
)
@click.option(
    "--probe",
    is_flag=True,
    help="Send each engine a request of a few tokens, to see its events.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@on_redis
async def doctor(
    redis: RedisClient,
    keyspace: Keyspace,
    engine_urls: tuple[str, ...],
    engine_api_key: str,
    router_urls: tuple[str, ...],
    probe: bool,
    as_json: bool,
) -> None:
    """Check Redis, the workers of a namespace, engines and routers, a line for each check.

    A line that begins with ✗ says what is wrong and what to do; the exit status is then 1. One with
    ? says what is not known.
    """
    results: list[Check] = []
    async for check in _all(redis, keyspace, engine_urls, engine_api_key, router_urls, probe):
        results.append(check)
        if not as_json:
            mark = {True: "✓", False: "✗", None: "?"}[check.ok]
            remedy = [f"    {check.remedy}"] if check.ok is False else []
            say(f"{mark} {check.about}: {check.found}", *remedy)
    if as_json:
        say(json_text([asdict(check) for check in results]))
    if any(check.ok is False for check in results):
        raise click.exceptions.Exit(1)


async def _all(
    redis: RedisClient,
    keyspace: Keyspace,
    engine_urls: tuple[str, ...],
    api_key: str,
    router_urls: tuple[str, ...],
    probe: bool,
) -> AsyncIterator[Check]:
    is_there = True
    async for check in checks.of_server(redis):
        yield check
        is_there = check.about != "redis"
    if is_there:
        async for check in checks.of_namespace(redis, keyspace):
            yield check
        for check in await _of_routers(redis, keyspace):
            yield check
    for url in router_urls:
        yield await checks.of_router(url)
    if engine_urls:
        with extra("worker"):
            from workers.bridge.checks import of_engine

        live = await _live(redis, keyspace)
        for url in engine_urls:
            async for check in of_engine(url, api_key, live, probe=probe):
                yield check


async def _of_routers(redis: RedisClient, keyspace: Keyspace) -> list[Check]:
    try:
        said = await replicas.present(redis, keyspace)
        if not said:
            return [
                Check("routers", None, "not known: no router with a console tells how requests end")
            ]
        results = await checks.of_routers(redis, keyspace)
        wrong = list(conditions.holding(Together(said.values())))
    except KvrouteError as error:
        return [Check("routers", None, str(error))]
    fine = Check("requests", True, f"no alert's condition holds, of {len(conditions.CONDITIONS)}")
    return [*results, *(wrong or [fine])]


async def _live(redis: RedisClient, keyspace: Keyspace) -> list[WorkerInfo]:
    with suppress(KvrouteError):
        statuses = await workers.everyone(redis, keyspace)
        return [w.info for w in statuses if w.info and w.is_routed_to]
    return []
