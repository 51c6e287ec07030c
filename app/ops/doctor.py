"""`kvroute doctor`: finds what makes cache-aware routing silently useless."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import asdict

import click

from app.core.check import Check
from app.core.errors import KvrouteError
from app.core.keys import Keyspace
from app.core.worker_report import WorkerInfo
from app.ops import checks, workers
from app.ops.terminal import COMMON, json_option, json_text, on_redis
from app.options import BASE_URL, Command
from app.state.client import RedisClient


@click.command(cls=Command)
@COMMON
@click.option(
    "--engine-url",
    "engine_urls",
    multiple=True,
    type=BASE_URL,
    help="Base URL of an engine to look at as well; may be given several times.",
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
    "--probe", is_flag=True, help="Send each engine a request of a few tokens, to see its events."
)
@json_option
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
    found: list[Check] = []
    async for check in _all(redis, keyspace, engine_urls, engine_api_key, router_urls, probe):
        found.append(check)
        if not as_json:
            click.echo(_line(check))
    if as_json:
        click.echo(json_text([asdict(check) for check in found]))
    if any(check.ok is False for check in found):
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
    for url in router_urls:
        yield await checks.of_router(url)
    if engine_urls:
        # Needs what agents need, which a plain install does not have.
        from workers.bridge.checks import of_engine

        live = await _live(redis, keyspace)
        for url in engine_urls:
            async for check in of_engine(url, api_key, live, probe=probe):
                yield check


async def _live(redis: RedisClient, keyspace: Keyspace) -> list[WorkerInfo]:
    """None where no worker has registered yet, as when an agent refuses its engine."""
    with suppress(KvrouteError):
        found = await workers.everyone(redis, keyspace)
        return [w.info for w in found if w.info and w.state == "live"]
    return []


def _line(check: Check) -> str:
    mark = {True: "✓", False: "✗", None: "?"}[check.ok]
    remedy = f"\n    {check.remedy}" if check.ok is False else ""
    return f"{mark} {check.about}: {check.found}{remedy}"
