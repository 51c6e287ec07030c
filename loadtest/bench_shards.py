"""Shards of the index on a Redis Cluster: how lookups spread, and what replicas take over.

    python -m loadtest.bench_shards --json out/bench_shards.json

The Cluster has three masters with a replica each, on this machine. Either each prompt begins in its
own way, or all begin with the same system prompt and so lie in the one shard of that prompt's first
block. With `--read-from replica`, a router looks up overlap on replicas. How far they lag is
measured too, from when a change is applied until a lookup sees it.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from typing import Any

import click
import numpy as np
from redis import Redis
from rich.console import Console

from app.core.keys import Keyspace
from app.core.types import SequenceHash
from app.local.redis_server import EmbeddedRedis, redis_binary
from app.state.connect import connect
from app.state.overlap import match
from app.state.scripts import ScriptRunner
from loadtest.command import option
from loadtest.harness import bench, grid, percentiles
from loadtest.holders import BATCH, Holders, check_found, hashes
from loadtest.topologies import ClusterServers

KEYS = Keyspace("bench-shards")
SHARDS = 12
WORKERS = 8
CHAINS = 96
SYSTEM_PROMPT = 64
DEPTH = 512


def look_up_us(servers: list[EmbeddedRedis]) -> list[float]:
    """Redis's time in scripts since the last reset, µs, by server."""
    spent: list[float] = []
    for server in servers:
        with Redis.from_url(server.url) as redis:
            stats: Any = redis.info("commandstats")
            spent.append(float(stats.get("cmdstat_evalsha", {}).get("usec", 0)))
    return spent


def reset_statistics(servers: list[EmbeddedRedis]) -> None:
    for server in servers:
        with Redis.from_url(server.url) as redis:
            redis.config_resetstat()


async def spread(
    servers: ClusterServers, runner: ScriptRunner, chains: list[list[SequenceHash]], queries: int
) -> dict[str, Any]:
    """Time of the masters and of the replicas per lookup, µs, and the busiest server's share."""
    rng = np.random.default_rng(2)
    reset_statistics(servers.servers)
    for n in rng.integers(0, len(chains), queries):
        overlaps, _ = await match(runner, KEYS, [chains[n]], SHARDS)
        check_found(overlaps, [DEPTH])
    masters, replicas = look_up_us(servers.masters), look_up_us(servers.replicas)
    spent = masters + replicas
    return {
        "masters_us": sum(masters) / queries,
        "replicas_us": sum(replicas) / queries,
        "busiest": max(spent) / sum(spent),
    }


async def behind_ms(
    holders: Holders, runner: ScriptRunner, rng: np.random.Generator, changes: int
) -> dict[str, float]:
    """Time from when a stored chain is applied until a lookup finds all of it, ms."""
    took: list[float] = []
    for _ in range(changes):
        chain = hashes(rng, BATCH)
        await holders.store(0, chain)
        applied = time.perf_counter()
        while True:
            (overlaps,), _ = await match(runner, KEYS, [chain], SHARDS)
            if any(overlap.total == len(chain) for overlap in (overlaps or {}).values()):
                break
        took.append((time.perf_counter() - applied) * 1000)
    return percentiles(took, 50, 99)


async def measure(queries: int, changes: int) -> dict[str, Any]:
    """Raises ClickException if there is no redis-server."""
    binary = redis_binary()
    if binary is None:
        raise click.ClickException("no redis-server found")
    with ClusterServers(binary) as servers:
        return await measure_on(servers, queries, changes)


async def measure_on(servers: ClusterServers, queries: int, changes: int) -> dict[str, Any]:
    async with AsyncExitStack() as stack:
        redis = await stack.enter_async_context(connect(servers.url))
        runners = {
            "master": ScriptRunner(redis, 10),
            "replica": ScriptRunner(redis, 10, on_replicas=["match"]),
        }
        index_blocks = CHAINS * DEPTH
        holders = Holders(runners["master"], KEYS, index_blocks=index_blocks, shards=SHARDS)
        await holders.register(WORKERS)
        rng = np.random.default_rng(1)
        own = [hashes(rng, DEPTH) for _ in range(CHAINS)]
        system = hashes(rng, SYSTEM_PROMPT)
        shared = [[*system, *hashes(rng, DEPTH - SYSTEM_PROMPT)] for _ in range(CHAINS)]
        for chains in (own, shared):
            for n, chain in enumerate(chains):
                await holders.store(n % WORKERS, chain)
        await asyncio.sleep(1)  # replicas catch up before lookups are counted
        return {
            "look_ups": {
                name: {
                    kind: await spread(servers, runner, chains, queries)
                    for kind, chains in (("own", own), ("same", shared))
                }
                for name, runner in runners.items()
            },
            "behind_ms": {
                name: await behind_ms(holders, runner, rng, changes)
                for name, runner in runners.items()
            },
        }


def show(result: dict[str, Any], console: Console) -> None:
    columns = {
        "µs of masters": "{masters_us:.0f}",
        "µs of replicas": "{replicas_us:.0f}",
        "busiest server": "{busiest:.0%}",
    }
    rows = (
        ([name, kind], numbers)
        for name, kinds in result["look_ups"].items()
        for kind, numbers in kinds.items()
    )
    title = f"Look-ups of {DEPTH} blocks in {SHARDS} shards on three masters"
    console.print(grid(["read from", "beginnings"], columns, rows, title=title))
    for name, behind in result["behind_ms"].items():
        shown = ", ".join(f"{q} {ms:.1f} ms" for q, ms in behind.items())
        console.print(f"From applied to found by a lookup, alone, read from {name}: {shown}")


main = bench(
    measure,
    show,
    option("--queries", 2000, "Queries of each kind."),
    option("--changes", 500, "Changes stored to measure the lag."),
)

if __name__ == "__main__":
    main()
