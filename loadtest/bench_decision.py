"""How many decisions a replica makes, how fast and at what CPU cost; then several replicas.

    python -m loadtest.bench_decision --json out/bench_decision.json

Each server has a core to itself, as long as there are enough; the client and Redis share the first
one. The same run also measures a bare FastAPI endpoint that has pydantic check the same token ids
and decides nothing. Workers are registrations without engines that hold the beginnings of the
prompts. Each request makes a reservation. The balancer's ids repeat, which moves reservations, so
the number of reservations stays constant. No two requests in flight have the same one: the earlier
would be refused.

Which core is busy shows what limits several replicas. The CPU time that Redis takes for a decision
shows where one Redis reaches its limit.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import Any

import click
import numpy as np
import orjson
from redis.asyncio import Redis
from rich.console import Console
from rich.table import Table

from app.core.hashing import compute_hashes, compute_local_hashes
from app.core.keys import Keyspace
from app.core.loads import LOAD_FIELDS
from app.core.settings.router import RouterSettings
from app.http.server import listen, run, serve
from app.local.redis_server import LOOPBACK
from app.options import COUNT
from app.state.connect import connect
from app.state.scripts import ScriptRunner
from loadtest.command import option
from loadtest.harness import bench, grid, in_turn
from loadtest.holders import BLOCK_SIZE, Holders
from loadtest.servers import (
    NUM_PROMPTS,
    Load,
    Server,
    Shape,
    figures,
    load,
    server,
    server_core,
    until_serving,
)

KEYS = Keyspace("bench-decision")
NUM_WORKERS = 8
NUM_TOKENS = 2048
CONCURRENCY = (1, 8, 32)
REPLICAS = (1, 2, 4)
CURVE = ("token ids", "hashes")
"""The shapes that several replicas are measured with."""
PER_REPLICA = 32
"""Concurrent requests."""
EVERY_S = 0.01
"""Some two batches of 32 requests at once."""
CHANGE = """
local time = redis.call('TIME')
local version = string.format('%.0f', time[1] * 1e6 + time[2])
local as_before = '^(' .. string.rep('%d+ ', ARGV[1]) .. ')%d+'
for i = 2, #ARGV, 2 do
  local load = redis.call('HGET', KEYS[1], ARGV[i])
  redis.call('HSET', KEYS[1], ARGV[i], (string.gsub(load, as_before, '%1' .. ARGV[i + 1])))
  redis.call('ZADD', KEYS[2], version, ARGV[i])
end
"""
"""Changes what was routed to a worker lately: the one figure that nothing else rests on."""


def prompts(tokens: int = NUM_TOKENS) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, 128_000, tokens).tolist() for _ in range(NUM_PROMPTS)]


def shapes(tokens: int = NUM_TOKENS) -> list[Shape]:
    ids = prompts(tokens)
    as_json = [orjson.dumps({"token_ids": prompt}) for prompt in ids]
    raw = [np.array(prompt, "<u4").tobytes() for prompt in ids]
    hashes = [
        orjson.dumps(
            {"local_hashes": compute_local_hashes(prompt, BLOCK_SIZE), "num_tokens": tokens}
        )
        for prompt in ids
    ]
    return [
        Shape("bare endpoint, token ids", as_json, bare=True),
        Shape("token ids", as_json),
        Shape("raw u32", raw, "application/octet-stream"),
        Shape("hashes", hashes),
    ]


async def register(url: str, workers: int = NUM_WORKERS, tokens: int = NUM_TOKENS) -> None:
    """Each of the first NUM_WORKERS holds the first half of every NUM_WORKERS-th prompt."""
    async with connect(url) as redis:
        holders = Holders(ScriptRunner(redis, timeout_s=10), KEYS)
        await holders.register(workers, max_requests=1_000_000)
        for n, prompt in enumerate(prompts(tokens)):
            _, chain = compute_hashes(prompt[: tokens // 2], BLOCK_SIZE)
            await holders.store(n % min(workers, NUM_WORKERS), chain)


def route_forever(redis_url: str, port: int) -> None:
    from app.edge.app import serve_router

    settings = RouterSettings(
        redis_url=redis_url,
        namespace=KEYS.namespace,
        # A router that does not wait for Redis on a busy machine decides without it, at less cost.
        redis_timeout_ms=5000,
        log_level="error",
    )
    run(serve_router(settings, listen(LOOPBACK, port)))


def answer_forever(_: str, port: int) -> None:
    """The baseline: what FastAPI and pydantic alone make of a request."""
    from fastapi import FastAPI
    from pydantic import BaseModel

    class Prompt(BaseModel):
        token_ids: list[int]

    class Answer(BaseModel):
        worker_id: str
        num_tokens: int

    app = FastAPI()

    async def route(prompt: Prompt) -> Answer:
        return Answer(worker_id="w0", num_tokens=len(prompt.token_ids))

    # FastAPI would look up the names of annotations in the module's namespace.
    route.__annotations__.update({"prompt": Prompt, "return": Answer})
    app.post("/v1/route")(route)
    run(serve(app, listen(LOOPBACK, port)))


@asynccontextmanager
async def changing(redis: Redis, keyspace: Keyspace, first: int, count: int) -> AsyncIterator[None]:
    """Changes `count` loads every EVERY_S, of incarnations from `first` on.

    By a script that is sent each time, which counts for none of the time of the others.
    """
    task = asyncio.create_task(_change(redis, keyspace, first, count))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _change(redis: Redis, keyspace: Keyspace, first: int, count: int) -> None:
    rng = random.Random(1)
    others = [inc for inc in map(int, await redis.hkeys(keyspace["load"])) if inc >= first]
    while others and count:
        some = rng.sample(others, min(count, len(others)))
        args = [arg for inc in some for arg in (inc, rng.randrange(1_000_000))]
        keys = keyspace["load"], keyspace["versions"]
        await redis.eval(CHANGE, 2, *keys, LOAD_FIELDS.index("routed_tokens"), *args)
        await asyncio.sleep(EVERY_S)


def measure(
    url: str,
    requests: int,
    rounds: int,
    workers: int = NUM_WORKERS,
    changes: int = 0,
    tokens: int = NUM_TOKENS,
    replicas: Sequence[int] = REPLICAS,
) -> dict[str, Any]:
    """`one`: figures by shape and concurrency. `replicas`: by shape and number of replicas.

    changes: as for `changing`, of workers that hold none of the prompts.
    """
    asyncio.run(register(url, workers, tokens))
    with ExitStack() as stack:
        forms = shapes(tokens)

        def start(target: Callable[[str, int], None], n: int) -> Server:
            return stack.enter_context(server(target, url, server_core(n)))

        async def loaded(servers: Sequence[Server], shape: Shape, concurrency: int) -> Load:
            async with connect(url) as redis, changing(redis, KEYS, NUM_WORKERS + 1, changes):
                return await load(servers, url, shape, concurrency, requests)

        def wait(servers: Sequence[Server]) -> None:
            for one in servers:
                run(until_serving(one.port, forms[0]))

        def play(cases: Sequence[tuple[Shape, int, list[Server], int]]) -> dict[str, Any]:
            """cases: the shape, the column, the servers, and how many requests at once."""
            ways = {
                (shape.name, str(column)): lambda at=at, s=shape, n=n: run(loaded(at, s, n))
                for shape, column, at, n in cases
            }
            made: dict[str, Any] = {}
            for (name, column), loads in in_turn(ways, rounds).items():
                made.setdefault(name, {})[column] = figures(loads)
            return made

        bare, router = start(answer_forever, 0), start(route_forever, 0)
        wait([bare, router])
        one = play([(s, n, [bare if s.bare else router], n) for s in forms for n in CONCURRENCY])
        routers = [router, *(start(route_forever, n) for n in range(1, max(replicas)))]
        wait(routers)
        curve = [s for s in forms if s.name in CURVE]
        several = play([(s, n, routers[:n], PER_REPLICA * n) for s in curve for n in replicas])
    return {"one": one, "replicas": several}


def show(result: dict[str, Any], console: Console) -> None:
    console.print(_one(result["one"]))
    console.print(_curve(result["replicas"]))


def _one(results: dict[str, Any]) -> Table:
    yardstick = next(iter(results.values()))
    rows = (
        ([name, n], {**made, "ratio": _ratio(made["cpu_us"], yardstick[n]["cpu_us"])})
        for name, by_concurrency in results.items()
        for n, made in by_concurrency.items()
    )
    columns = {
        "per s": "{per_s:,.0f}",
        "CPU, µs": "{cpu_us:.0f}",
        "of the bare endpoint's": "{ratio}",
        "p50, ms": "{p50_ms:.2f}",
        "p99, ms": "{p99_ms:.2f}",
        "Redis: µs": "{redis_us:.0f}",
        "commands": "{commands:.0f}",
        "bytes": "{bytes:,.0f}",
    }
    return grid(["", "at once"], columns, rows, title="One replica")


def _ratio(measured: float, yardstick: float) -> str:
    """A ratio of CPU times. The kernel counts in steps, so a few requests may seem to take none."""
    return f"{measured / yardstick:.2f}" if yardstick else "-"


def _curve(results: dict[str, Any]) -> Table:
    cores = {server_core(n) for n in range(max(REPLICAS))}
    rows = (
        ([name, n], {**made, "ends": f"{1e6 / used:,.0f}" if (used := made["redis_us"]) else ""})
        for name, by_count in results.items()
        for n, made in by_count.items()
    )
    columns = {
        "per s": "{per_s:,.0f}",
        "CPU, µs": "{cpu_us:.0f}",
        "Redis, µs": "{redis_us:.0f}",
        "scripts, µs": "{scripts_us:.0f}",
        "commands": "{commands:.0f}",
        "bytes": "{bytes:,.0f}",
        "busy: replicas": "{servers_busy:.2f}",
        "client": "{client_busy:.2f}",
        "Redis": "{redis_busy:.2f}",
        "Redis ends at": "{ends}",
    }
    return grid(
        ["", "replicas"],
        columns,
        rows,
        title=f"{PER_REPLICA} at once a replica; client and Redis on one core, "
        f"replicas on {len(cores)}",
        caption="busy: so many cores. Where those on one core do not add up to it, other processes "
        "have the rest, or all wait. Redis ends where it would be busy all the time.",
    )


main = bench(
    measure,
    show,
    option("--requests", 4000, "Requests per round."),
    option("--rounds", 5),
    option("--workers", NUM_WORKERS),
    option(
        "--changes",
        0,
        "Loads that change 100 times a second, of workers beyond the first 8.",
        kind=COUNT,
    ),
    option(
        "--tokens",
        NUM_TOKENS,
        "Of each prompt, of which a worker holds the first half: from 8192 on, it lacks a prompt "
        "that is told of while it is in flight.",
        kind=click.IntRange(min=2 * BLOCK_SIZE),
    ),
    redis=True,
)

if __name__ == "__main__":
    main()
