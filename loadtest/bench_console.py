"""What open consoles cost: decisions per second with and without them, and Redis's time.

    python -m loadtest.bench_console --json out/bench_console.json

One router and one Redis, as in bench_decision. Each viewer asks what the page asks, as often, over
a connection of its own. Rounds with and without viewers take turns; a ratio is of two that follow
each other. Redis's time is that of the commands which no decision calls, as Redis counts it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.console import Console

from app.http.server import run
from app.state.connect import connect
from loadtest.bench_decision import PER_REPLICA, register, route_forever, shapes
from loadtest.command import option
from loadtest.harness import bench, in_turn
from loadtest.servers import Connection, Server, Shape, load, server, server_core

VIEWERS = 5
NUM_WORKERS = 64
POLL_S = 1.5
QUESTIONS = ("overview", "workers", "decisions", "history", "events", "funnel")
"""More than one view of the page asks at a time."""
OF_VIEWERS = ("xrevrange", "hgetall", "info", "ping", "hscan")
"""Commands that answers are made of, and that no decision's script calls."""
REQUEST = b"GET /console/api/%s HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def view(port: int) -> None:
    """Look at the console until cancelled."""
    connection = await Connection.open(port)
    try:
        while True:
            for question in QUESTIONS:
                await connection.ask(REQUEST % question.encode())
            await asyncio.sleep(POLL_S)
    finally:
        connection.close()


@dataclass(frozen=True, slots=True)
class Round:
    """per_s: decisions. redis_share: of Redis's time, in OF_VIEWERS."""

    per_s: float
    redis_share: float


async def play(router: Server, url: str, shape: Shape, requests: int, viewers: int) -> Round:
    """Decide requests while so many look."""
    looking = [asyncio.ensure_future(view(router.port)) for _ in range(viewers)]
    async with connect(url) as redis:

        async def reading_s() -> float:
            calls: Any = await redis.info("commandstats")
            of = [calls.get(f"cmdstat_{n}", {"usec": 0})["usec"] for n in OF_VIEWERS]
            return float(sum(of)) / 1e6

        before = await reading_s()
        try:
            made = await load([router], url, shape, PER_REPLICA, requests)
        finally:
            await _stop(looking)
        spent_s = await reading_s() - before
    return Round(len(made.latencies) / made.wall_s, spent_s / made.wall_s)


async def _stop(tasks: Sequence[asyncio.Future[None]]) -> None:
    for task in tasks:
        if task.done():
            task.result()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def measure(
    url: str, requests: int, rounds: int, viewers: int = VIEWERS, workers: int = NUM_WORKERS
) -> dict[str, Any]:
    """rounds: pairs without and with viewers. ratio: of their rates. redis_share: what viewers add
    to Redis's time, 0-1. Both are medians."""
    run(register(url, workers))
    [shape] = [one for one in shapes() if one.name == "hashes"]
    with server(route_forever, url, server_core(0)) as router:
        ways = {n: lambda n=n: run(play(router, url, shape, requests, n)) for n in (0, viewers)}
        pairs = list(zip(*in_turn(ways, rounds).values(), strict=True))
    return {
        "workers": workers,
        "viewers": viewers,
        "rounds": pairs,
        "ratio": median(after.per_s / before.per_s for before, after in pairs),
        "redis_share": median(after.redis_share - before.redis_share for before, after in pairs),
    }


def show(result: dict[str, Any], console: Console) -> None:
    for before, after in result["rounds"]:
        console.print(
            f"{before.per_s:,.0f} decisions/s without, {after.per_s:,.0f} with; Redis read "
            f"{before.redis_share:.2%} and {after.redis_share:.2%} of the time"
        )
    console.print(
        f"{result['viewers']} consoles, {result['workers']} workers: {result['ratio']:.3f} times "
        f"the decisions per second, {result['redis_share']:.2%} of Redis's time"
    )


main = bench(
    measure, show, option("--requests", 15_000, "In each round."), option("--rounds", 7), redis=True
)

if __name__ == "__main__":
    main()
