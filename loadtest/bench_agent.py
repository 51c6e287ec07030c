"""How fast an agent publishes: blocks a second, and how soon others see them.

    python -m loadtest.bench_agent --json out/bench_agent.json

The agent is a worker's own, without an engine: it is notified of chains that are stored, then
removed. The benchmark has a namespace of its own, which it deletes at the end.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import numpy as np
from redis import Redis
from rich.console import Console

from app.core.chains import GROUP_BLOCKS, bucket_name
from app.core.events import CacheEvent, Removed, Stored
from app.core.keys import Keyspace
from app.core.types import SequenceHash, WorkerKey
from app.core.worker_report import DEFAULT_SPEED, ForwardPassMetrics, WorkerInfo
from app.http.server import collect_seldom
from app.ops.reset import delete_namespace
from app.state.connect import connect
from app.state.scripts import ScriptRunner
from loadtest.command import option
from loadtest.cores import CORES
from loadtest.harness import bench, percentiles
from loadtest.holders import BLOCK_SIZE, hashes
from loadtest.processes import child, received
from workers.agent.agent import Agent, AgentSettings

KEYS = Keyspace("bench-agent")
TOLD_CHAINS = 700
TOLD_BLOCKS = 64
VISIBLE_PER_S = 10_000
POLL_S = 0.0002


def told_chains(count: int) -> list[list[SequenceHash]]:
    rng = np.random.default_rng(4)
    return [hashes(rng, TOLD_BLOCKS) for _ in range(count)]


def watch(
    to: Connection, url: str, keys: Keyspace, chains: Sequence[Sequence[SequenceHash]]
) -> None:
    """In a process of its own: send the times at which each chain's last block was seen, in seconds
    on time.perf_counter, which counts alike in all processes."""
    shard = keys.of_shard(0)
    with Redis.from_url(url) as redis:
        bits = int(redis.hget(shard["shard"], "bucket_bits") or 0)
        seen: list[float] = []
        to.send(None)
        for chain in chains:
            last = len(chain) - 1
            leader = chain[last - last % GROUP_BLOCKS]
            bucket = bucket_name(leader >> (64 - bits), bits)
            key = shard[f"blocks:{bucket}"]
            while not redis.hexists(key, f"{chain[last]:016x}"):
                time.sleep(POLL_S)
            seen.append(time.perf_counter())
        to.send(seen)


@asynccontextmanager
async def running_agent(url: str, blocks: int) -> AsyncIterator[Agent]:
    """The agent of a worker that may hold `blocks`, the only one of its namespace."""
    redis = connect(url)
    agent = Agent(
        ScriptRunner(redis, timeout_s=10),
        KEYS,
        WorkerInfo(WorkerKey("w0"), "http://127.0.0.1:1", BLOCK_SIZE, blocks, 256),
        AgentSettings(lease_ttl_s=60, index_blocks=blocks),
        lambda: (ForwardPassMetrics(), DEFAULT_SPEED),
    )
    await agent.start()
    collect_seldom()  # as workers do
    running = asyncio.ensure_future(agent.run())
    try:
        yield agent
    finally:
        running.cancel()
        await asyncio.wait([running])
        await delete_namespace(redis, KEYS)
        await redis.aclose()


async def published_per_s(url: str, chunks: int, repeats: int) -> dict[str, float]:
    """Blocks that an agent publishes in a second, the median over `repeats`: stored, then removed.

    It is notified of TOLD_BLOCKS at a time, as fast as it can take them in, and is on one core:
    not the one that Redis is on, if there is another.
    """
    chains = [tuple(chain) for chain in told_chains(chunks)]
    events: dict[str, list[CacheEvent]] = {
        "stored": [Stored(chain, None) for chain in chains],
        "removed": [Removed(chain) for chain in chains],
    }
    per_s: dict[str, list[float]] = {name: [] for name in events}
    os.sched_setaffinity(0, CORES[-1:])
    async with running_agent(url, chunks * TOLD_BLOCKS) as agent:
        for _ in range(repeats):
            for name, told in events.items():
                begin = time.perf_counter()
                for event in told:
                    agent.notify([event])
                    await asyncio.sleep(0)
                assert await agent.published(), "Redis cannot be reached"
                took_s = time.perf_counter() - begin
                per_s[name].append(chunks * TOLD_BLOCKS / took_s)
    return {name: float(median(rates)) for name, rates in per_s.items()}


async def visible_ms(url: str, chunks: int) -> dict[str, float]:
    """Time from an engine's event until another process sees its last block in Redis, ms. An agent
    is notified of TOLD_BLOCKS at a time, at a rate of VISIBLE_PER_S blocks."""
    chains = told_chains(chunks)
    # The watcher must not wait for the core that this process is on.
    os.sched_setaffinity(0, CORES)
    async with running_agent(url, chunks * TOLD_BLOCKS) as agent:
        with child(watch, url, KEYS, chains) as watcher:
            await asyncio.to_thread(received, watcher)
            told: list[float] = []
            loop = asyncio.get_running_loop()
            due = loop.time()
            for chain in chains:
                await asyncio.sleep(due - loop.time())
                due += TOLD_BLOCKS / VISIBLE_PER_S
                told.append(time.perf_counter())
                agent.notify([Stored(tuple(chain), None)])
            seen = await asyncio.to_thread(received, watcher)
    return percentiles(np.subtract(seen, told) * 1000, 50, 90, 99)


async def measure(url: str, repeats: int, chains: int = TOLD_CHAINS) -> dict[str, Any]:
    """chains: how many the agent is notified of, of TOLD_BLOCKS each."""
    return {
        "blocks": chains * TOLD_BLOCKS,
        "published_per_s": await published_per_s(url, chains, repeats),
        "visible_ms": await visible_ms(url, chains),
    }


def show(result: dict[str, Any], console: Console) -> None:
    rates = (f"{per_s:,.0f} {name}" for name, per_s in result["published_per_s"].items())
    console.print(f"Blocks a second that an agent on one core publishes: {', '.join(rates)}")
    shown = ", ".join(f"{name} {ms:.1f}" for name, ms in result["visible_ms"].items())
    console.print(
        f"From an event until another process sees its blocks, at {VISIBLE_PER_S:,} blocks/s: "
        f"{shown} ms"
    )


main = bench(
    measure,
    show,
    option("--repeats", 9, "Rounds of the first figure, of which the median is taken."),
    redis=True,
)

if __name__ == "__main__":
    main()
