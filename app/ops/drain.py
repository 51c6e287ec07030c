"""`kvroute drain`: takes a worker out of service without losing a request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import click

from app.core.errors import RedisUnavailable
from app.core.keys import Keyspace
from app.core.types import WorkerKey
from app.ops.terminal import COMMON, TIMEOUT_S, counted, on_redis, say
from app.options import SECONDS, Command
from app.state import leases
from app.state.client import RedisClient
from app.state.reading import read_control
from app.state.reservations import CARRIED_MS
from app.state.scripts import ScriptRunner

T = TypeVar("T")
POLL_S = 0.25


@click.command(cls=Command)
@click.argument("name", metavar="WORKER")
@COMMON
@click.option(
    "--deadline-s",
    type=SECONDS,
    default=600.0,
    show_default=True,
    help="How long to wait for the requests on the worker to end; 0: do not wait.",
)
@click.option("--undo", is_flag=True, help="Route requests to the worker again.")
@on_redis
async def drain(
    redis: RedisClient, keyspace: Keyspace, name: str, deadline_s: float, undo: bool
) -> None:
    """Route no more requests to a worker, and wait until those on it have ended.

    WORKER is a worker's id, for all of its ranks, or <id>:<dp_rank>. It stays out of service until
    it is started again, or until --undo. The exit status is 1 if requests are left at the deadline.
    """
    loop = asyncio.get_running_loop()
    ends_s = loop.time() + deadline_s
    keys = await _patiently(lambda: named(redis, keyspace, name), ends_s)
    if not keys:
        raise click.ClickException(
            f"worker {name!r} does not exist in namespace {keyspace.namespace!r}"
        )
    runner = ScriptRunner(redis, TIMEOUT_S)
    calls = [leases.drain(keyspace, key, undo=undo) for key in keys]
    shown, was_known, counts_from_s = -1, True, 0.0
    while True:
        # Each time, as Redis may have lost it.
        replies = await _patiently(lambda: runner.run(calls), ends_s)
        if undo:
            say(f"{name} gets requests again")
            return
        left, is_known = sum(filter(None, replies)), None not in replies
        if is_known != was_known:
            # It has ended; or Redis lost its data, and those who carry requests have yet to say so.
            was_known, counts_from_s = is_known, loop.time() + CARRIED_MS / 1000
        if left == 0 and loop.time() >= counts_from_s:
            say(f"{name} is drained: stop it, or `kvroute drain {name} --undo`")
            return
        if left != shown and is_known:
            say(f"{name} gets no more requests; {counted(left, 'request')} left on it")
            shown = left
        if deadline_s == 0:
            return
        if loop.time() >= ends_s:
            raise click.ClickException(f"after {deadline_s:g} s, {counted(left, 'request')} left")
        await asyncio.sleep(min(POLL_S, max(0.0, ends_s - loop.time())))


async def _patiently(ask: Callable[[], Awaitable[T]], ends_s: float) -> T:
    """Returns what `ask` returns once Redis answers. Raises RedisUnavailable if Redis does not by
    `ends_s`."""
    is_told = False
    while True:
        try:
            return await ask()
        except RedisUnavailable as error:
            if asyncio.get_running_loop().time() >= ends_s:
                raise
            if not is_told:
                say(f"waiting for Redis: {error}", err=True)
                is_told = True
        await asyncio.sleep(POLL_S)


async def named(redis: RedisClient, keyspace: Keyspace, name: str) -> list[WorkerKey]:
    """Returns the workers of an id or key that are routed to, or drain. Raises WrongVersion,
    RedisUnavailable."""
    keys = []
    for text in (await read_control(redis, keyspace)).current:
        try:
            key = WorkerKey.parse(text.decode(errors="replace"))
        except ValueError:
            continue
        if name in (key.worker_id, str(key)):
            keys.append(key)
    return sorted(keys)
