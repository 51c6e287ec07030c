"""`kvroute drain`: takes a worker out of service without losing a request."""

from __future__ import annotations

import asyncio
from typing import Any

import click

from app.core.keys import Keyspace
from app.core.types import WorkerKey
from app.ops.terminal import COMMON, TIMEOUT_S, counted, on_redis
from app.options import SECONDS, Command
from app.state import leases
from app.state.client import Client
from app.state.connect import deadline
from app.state.scripts import ScriptRunner

POLL_S = 0.25


@click.command(cls=Command)
@click.argument("name", metavar="WORKER")
@COMMON
@click.option(
    "--deadline-s",
    type=SECONDS,
    default=600.0,
    show_default=True,
    help="How long to wait for the requests on it to end; 0: do not wait.",
)
@click.option("--undo", is_flag=True, help="Route requests to it again.")
@on_redis
async def drain(
    redis: Client, keyspace: Keyspace, name: str, deadline_s: float, undo: bool
) -> None:
    """Route no more requests to a worker, and wait until those on it have ended.

    WORKER is a worker's id, for all of its ranks, or <id>:<dp_rank>. It stays out of service until
    it is started again, or until --undo. The exit status is 1 if requests are left at the deadline.
    """
    keys = await _named(redis, keyspace, name)
    runner = ScriptRunner(redis, TIMEOUT_S)
    calls = [leases.drain(keyspace, key, undo=undo) for key in keys]
    await runner.run(calls)
    if undo:
        click.echo(f"{name} gets requests again")
        return
    loop = asyncio.get_running_loop()
    ends_s, shown = loop.time() + deadline_s, -1
    while True:
        # Each time, as Redis may have lost it.
        left = sum(filter(None, await runner.run(calls)))
        if left == 0:
            click.echo(f"{name} is drained: stop it, or `kvroute drain {name} --undo`")
            return
        if left != shown:
            click.echo(f"{name} gets no more requests; {counted(left, 'request')} left on it")
            shown = left
        if deadline_s == 0:
            return
        if loop.time() >= ends_s:
            raise click.ClickException(f"after {deadline_s:g} s, {counted(left, 'request')} left")
        await asyncio.sleep(min(POLL_S, max(0.0, ends_s - loop.time())))


async def _named(redis: Client, keyspace: Keyspace, name: str) -> list[WorkerKey]:
    """The workers that are routed to, or drain, of that id or key."""
    async with deadline(TIMEOUT_S):
        current: Any = await redis.hkeys(keyspace["current"])
    keys = []
    for text in current:
        try:
            key = WorkerKey.parse(text.decode(errors="replace"))
        except ValueError:
            continue
        if name in (key.worker_id, str(key)):
            keys.append(key)
    if not keys:
        raise click.ClickException(
            f"worker {name!r} does not exist in namespace {keyspace.namespace!r}"
        )
    return sorted(keys)
