"""How long decisions are degraded when Redis's master is killed.

    python -m loadtest.bench_failover --json out/bench_failover.json

The servers are a master with a replica and three sentinels, which consider the master dead after
half a second, and a Cluster of three masters with a replica each. In the Cluster, the master
that holds the namespace's loads is killed. Two agents and a router run as they do in their
own processes, and requests come one after another. A decision is degraded while the router cannot
ask Redis: the router then goes by what it last knew. Overlap is whole again once every prompt is
found where it is held.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median

import click
import numpy as np

from app.core.errors import NoWorkers
from app.core.events import Stored
from app.core.keys import Keyspace
from app.core.settings.router import RouterSettings
from app.core.types import SequenceHash, WorkerKey
from app.core.worker_report import DEFAULT_SPEED, ForwardPassMetrics, WorkerInfo
from app.local.redis_server import EmbeddedRedis, redis_binary
from app.policy.decision import RouteRequest
from app.router.fleet import Fleet
from app.router.metrics import Telemetry
from app.router.router import Router
from app.state.connect import connect
from app.state.scripts import ScriptRunner
from loadtest.experiment import Rows, experiment
from loadtest.holders import BLOCK_SIZE, hashes
from loadtest.topologies import ClusterServers, SentinelServers
from workers.agent.agent import Agent, AgentSettings

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
    overlap: int
    """Blocks of overlap on the chosen worker."""


@asynccontextmanager
async def running_router(
    url: str, chains: Sequence[Sequence[SequenceHash]]
) -> AsyncIterator[Router]:
    """A router, and two agents that take turns in holding `chains`."""
    settings = RouterSettings(namespace=KEYS.namespace, seed=1)
    timeout_s = settings.redis_timeout_ms / 1000
    running: list[asyncio.Future[None]] = []
    async with AsyncExitStack() as stack:
        for n in range(2):
            own = await stack.enter_async_context(connect(url))
            running.append(asyncio.ensure_future(own.follow()))
            agent = Agent(
                ScriptRunner(own, 1.0),
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
        running.append(asyncio.ensure_future(redis.follow()))
        try:
            yield router
        finally:
            for task in running:
                task.cancel()
            await asyncio.wait(running)


class Caller:
    """Requests chains in turn, one at a time. samples: the decisions so far."""

    def __init__(self, router: Router, chains: Sequence[list[SequenceHash]]) -> None:
        self.samples: list[Sample] = []
        self._router = router
        self._chains = chains

    async def ask(self) -> Sample:
        """Make one request, and pause."""
        number = len(self.samples)
        chain = self._chains[number % CHAINS]
        at = time.perf_counter()
        made = await self._router.route(
            RouteRequest(f"r{number}", chain, CHAIN * BLOCK_SIZE, "latency")
        )
        took = time.perf_counter() - at
        asyncio.ensure_future(self._router.release(made.request_id)).add_done_callback(
            lambda done: done.exception()
        )
        self.samples.append(Sample(at, took, made.degraded, made.overlap.total))
        await asyncio.sleep(PAUSE_S)
        return self.samples[-1]

    async def ask_until_whole(self) -> float:
        """Ask until CHAINS requests in a row find theirs whole; returns when the first was made."""
        good = 0
        while good < CHAINS:
            good = good + 1 if (await self.ask()).overlap == CHAIN else 0
        return self.samples[-CHAINS].at


async def _until_known(router: Router, chains: Sequence[list[SequenceHash]]) -> Caller:
    """Returns a caller once its router knows workers."""
    while True:
        caller = Caller(router, chains)
        try:
            await caller.ask()
        except NoWorkers:
            await asyncio.sleep(PAUSE_S)
        else:
            return caller


async def killed(url: str, kill: Callable[[], None]) -> dict[str, float]:
    """Returns what went wrong after `kill`: durations in seconds, and counts of decisions."""
    rng = np.random.default_rng(1)
    chains = [hashes(rng, CHAIN) for _ in range(CHAINS)]
    async with running_router(url, chains) as router:
        async with asyncio.timeout(WHOLE_WITHIN_S):
            caller = await _until_known(router, chains)
            await caller.ask_until_whole()
        end = time.perf_counter() + BEFORE_S
        while time.perf_counter() < end:
            await caller.ask()
        caller = Caller(router, chains)
        killed = time.perf_counter()
        kill()
        async with asyncio.timeout(WHOLE_WITHIN_S):
            sample = await caller.ask()
            while not sample.degraded and sample.overlap == CHAIN:
                sample = await caller.ask()
            whole = await caller.ask_until_whole()
    degraded = [sample for sample in caller.samples if sample.degraded]
    return {
        "degraded_s": degraded[-1].at + degraded[-1].took - degraded[0].at if degraded else 0.0,
        "whole_after_s": whole - killed,
        "slowest_s": max(sample.took for sample in caller.samples),
        "decisions": float(len(caller.samples)),
        "degraded": float(len(degraded)),
    }


def killed_master(servers: ClusterServers | SentinelServers) -> EmbeddedRedis:
    if isinstance(servers, SentinelServers):
        return servers.master
    return servers.masters[servers.shard_of(KEYS["load"])]


def play(kind: type[ClusterServers | SentinelServers], _: int) -> dict[str, float]:
    """Figures of `killed` on fresh servers."""
    logging.disable(logging.WARNING)
    binary = redis_binary()
    if binary is None:
        raise click.ClickException("no redis-server found")
    with kind(binary) as servers:
        return asyncio.run(killed(servers.url, killed_master(servers).kill))


def rows() -> Rows:
    return {
        "": {"Sentinel": partial(play, SentinelServers), "Cluster": partial(play, ClusterServers)}
    }


main = experiment(
    rows,
    (
        ("degraded, s", "degraded_s", "{:.2f}"),
        ("whole after, s", "whole_after_s", "{:.2f}"),
        ("slowest decision, s", "slowest_s", "{:.2f}"),
    ),
    labels="servers",
    seeds=5,
    middle=median,
    one_by_one=True,
)

if __name__ == "__main__":
    main()
