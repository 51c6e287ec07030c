"""How long decisions are degraded when Redis's master is killed.

    python -m loadtest.bench_failover --json out/bench_failover.json

The servers are a master with a replica and three sentinels, which consider the master dead after
half a second, or a Cluster of three masters with a replica each (--cluster). In the Cluster, the
master that holds the namespace's loads is killed. Two agents and a router run as they do in their
own processes, and requests come one after another. A decision is degraded while the router cannot
ask Redis: the router then goes by what it last knew. Overlap is whole again once every prompt is
found where it is held.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np

from app.core.config import POSITIVE, RouterSettings
from app.core.embedded import EmbeddedRedis, redis_binary
from app.core.events import Stored
from app.core.keys import Keyspace
from app.core.metrics import DEFAULT_SPEED, ForwardPassMetrics
from app.core.redis import connect
from app.core.scripts import ScriptRunner
from app.core.types import SequenceHash, WorkerInfo, WorkerKey
from app.decision import RouteRequest
from app.fleet import Fleet
from app.router import Router
from app.telemetry import Telemetry
from loadtest.command import Command, json_option, save
from loadtest.holders import BLOCK_SIZE, hashes
from loadtest.topologies import ClusterServers, SentinelServers
from workers.agent import Agent, AgentSettings

KEYS = Keyspace("bench-failover")
CHAINS = 60
CHAIN = 32
SHARDS = 6
PAUSE_S = 0.01
BEFORE_S = 2.0
WHOLE_WITHIN_S = 60.0


@dataclass(frozen=True)
class Sample:
    """One decision: when it was requested and how long it took, in seconds."""

    at: float
    took: float
    degraded: bool
    found: int
    """Blocks of overlap on the chosen worker."""


async def run(url: str, kill: Callable[[], None]) -> dict[str, float]:
    """What went wrong after `kill`: durations in seconds, and counts of decisions."""
    settings = RouterSettings(namespace=KEYS.namespace, seed=1)
    timeout_s = settings.redis_timeout_ms / 1000
    rng = np.random.default_rng(1)
    chains = [hashes(rng, CHAIN) for _ in range(CHAINS)]
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        running: list[asyncio.Future[None]] = []
        for n in range(2):
            agent = Agent(
                ScriptRunner(await stack.enter_async_context(connect(url)), 1.0),
                KEYS,
                WorkerInfo(WorkerKey(f"w{n}"), f"http://w{n}:80", BLOCK_SIZE, 10_000, 256),
                AgentSettings(lease_ttl_s=3.0, index_blocks=10_000, shards=SHARDS),
                lambda: (ForwardPassMetrics(), DEFAULT_SPEED),
            )
            await agent.start()
            agent.notify(Stored(tuple(chain), None) for chain in chains[n::2])
            running.append(asyncio.ensure_future(agent.run()))
        redis = await stack.enter_async_context(connect(url, timeout_s=timeout_s))
        fleet = Fleet(redis, KEYS, timeout_s)
        router = Router(ScriptRunner(redis, timeout_s), KEYS, settings, fleet, Telemetry())
        running.append(asyncio.ensure_future(router.run()))
        samples: list[Sample] = []

        async def ask(number: int, chain: list[SequenceHash]) -> Sample:
            at = loop.time()
            made = await router.route(
                RouteRequest(f"r{number}", chain, CHAIN * BLOCK_SIZE, settings.policy)
            )
            took = loop.time() - at
            asyncio.ensure_future(router.release(made.request_id)).add_done_callback(
                lambda done: done.exception()
            )
            return Sample(at, took, made.degraded, made.overlap.total)

        async def whole_since(at: float) -> float:
            """Ask until all chains, one after another, have been found whole."""
            good = 0
            while good < CHAINS:
                sample = await ask(len(samples), chains[len(samples) % CHAINS])
                samples.append(sample)
                good = good + 1 if sample.found == CHAIN else 0
                await asyncio.sleep(PAUSE_S)
            return samples[-CHAINS].at - at

        await whole_since(0)
        end = loop.time() + BEFORE_S
        while loop.time() < end:
            samples.append(await ask(len(samples), chains[len(samples) % CHAINS]))
            await asyncio.sleep(PAUSE_S)
        samples.clear()
        killed = loop.time()
        kill()
        async with asyncio.timeout(WHOLE_WITHIN_S):
            while not any(sample.degraded or sample.found < CHAIN for sample in samples):
                samples.append(await ask(len(samples), chains[len(samples) % CHAINS]))
                await asyncio.sleep(PAUSE_S)
            whole = await whole_since(killed)
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        degraded = [sample for sample in samples if sample.degraded]
        return {
            "degraded_s": degraded[-1].at + degraded[-1].took - degraded[0].at if degraded else 0.0,
            "whole_after_s": whole,
            "slowest_s": max(sample.took for sample in samples),
            "decisions": float(len(samples)),
            "degraded": float(len(degraded)),
        }


def killed_master(servers: ClusterServers | SentinelServers) -> EmbeddedRedis:
    if isinstance(servers, SentinelServers):
        return servers.master
    return servers.masters[servers.shard_of(KEYS["load"])]


@click.command(cls=Command)
@click.option("--cluster", is_flag=True, help="Use a Cluster instead of sentinels.")
@click.option("--runs", default=5, show_default=True, type=POSITIVE)
@json_option
def main(cluster: bool, runs: int, json_file: Path | None) -> None:
    """Kill the master under load, and time what happens to decisions."""
    logging.disable(logging.WARNING)
    binary = redis_binary()
    if binary is None:
        raise click.ClickException("no redis-server found")
    results: list[dict[str, float]] = []
    for _ in range(runs):
        with ExitStack() as stack:
            kind = ClusterServers if cluster else SentinelServers
            servers: Any = stack.enter_context(kind(binary))
            results.append(asyncio.run(run(servers.url, killed_master(servers).kill)))
    click.echo(f"median of {runs}, and the worst:")
    for name, what in (
        ("degraded_s", "s in which decisions were degraded"),
        ("whole_after_s", "s after the kill all overlap was found again"),
        ("slowest_s", "s that the slowest decision took"),
    ):
        figures = [result[name] for result in results]
        click.echo(f"  {median(figures):.2f}, {max(figures):.2f}  {what}")
    save(results, json_file)


if __name__ == "__main__":
    main()
