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
from pathlib import Path
from typing import Any

import click
import numpy as np
from redis import Redis
from rich.console import Console

from app.core.keys import Keyspace
from app.core.types import SequenceHash
from app.local.redis_server import EmbeddedRedis, redis_binary
from app.options import POSITIVE
from app.state.connect import connect
from app.state.overlap import match
from app.state.scripts import ScriptRunner
from loadtest.command import Command, json_option, save, table
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
    return {f"p{q}": float(np.percentile(took, q)) for q in (50, 99)}


async def measure(servers: ClusterServers, queries: int, changes: int) -> dict[str, Any]:
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
    heads = ("read from", "beginnings", "µs of masters", "µs of replicas", "busiest server")
    title = f"Look-ups of {DEPTH} blocks in {SHARDS} shards on three masters"
    cells = table(*heads, title=title)
    for name, kinds in result["look_ups"].items():
        for kind, numbers in kinds.items():
            cells.add_row(
                name,
                kind,
                f"{numbers['masters_us']:.0f}",
                f"{numbers['replicas_us']:.0f}",
                f"{numbers['busiest']:.0%}",
            )
    console.print(cells)
    for name, behind in result["behind_ms"].items():
        shown = ", ".join(f"{q} {ms:.1f} ms" for q, ms in behind.items())
        console.print(f"From applied to found by a lookup, alone, read from {name}: {shown}")


@click.command(cls=Command)
@click.option(
    "--queries", default=2000, show_default=True, type=POSITIVE, help="Queries of each kind."
)
@click.option(
    "--changes",
    default=500,
    show_default=True,
    type=POSITIVE,
    help="Changes stored to measure the lag.",
)
@json_option
def main(queries: int, changes: int, json_file: Path | None) -> None:
    """Measure shards and replicas on a Redis Cluster on this machine."""
    binary = redis_binary()
    if binary is None:
        raise click.ClickException("no redis-server found")
    with ClusterServers(binary) as servers:
        result = asyncio.run(measure(servers, queries, changes))
    show(result, Console())
    save(result, json_file)


if __name__ == "__main__":
    main()
