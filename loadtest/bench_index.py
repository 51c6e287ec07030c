"""What the index costs, on one of a given size: look-ups, changes, memory, the router's own time.

    python -m loadtest.bench_index --json out/bench_index.json

Server time is Redis's own (INFO commandstats). Beside it, in the same run, the access pattern of
others: one hash per block, and a pipeline of one HKEYS for each block of a prompt. Fills, and at
the end deletes, a namespace of its own; the statistics of the server are reset, so a Redis named
with --redis must be one that nobody else needs.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
import orjson

from app.core import index, leases
from app.core.embedded import EmbeddedRedis
from app.core.keys import Keyspace
from app.core.matching import match
from app.core.redis import connect
from app.core.scripts import Call, ScriptRunner
from app.core.topology import Client
from app.core.types import Incarnation, SequenceHash, Tier, WorkerInfo, WorkerKey
from app.dump import reset

LENGTHS = (16, 64, 512, 2048, 4096, 8192)
CHAIN = 8192
SYSTEM_PROMPT = 64
BATCH = 64
QUERIES = ("matched, one owner", "matched, three owners", "half of that matched")
PEER_LENGTHS = (512, 2048)
PEER_CHAINS = 16
PEER_PREFIX = "bench-index-peer:"
CHANGE_BATCHES = 200


class Fleet:
    """Workers that hold one system prompt together and long private chains each."""

    def __init__(self, runner: ScriptRunner, keyspace: Keyspace, workers: int, seed: int) -> None:
        self._runner = runner
        self._keyspace = keyspace
        self._workers = workers
        self._rng = np.random.default_rng(seed)
        self._seqs: dict[Incarnation, int] = {}
        self.chains: list[list[SequenceHash]] = []

    @property
    def incarnations(self) -> list[Incarnation]:
        return list(self._seqs)

    async def register(self, blocks: int) -> None:
        for i in range(self._workers):
            info = WorkerInfo(WorkerKey(f"w{i}"), "http://127.0.0.1:1", 16, blocks, 256)
            bits = index.bucket_bits_for(blocks)
            made = await self._runner.one(
                leases.register(self._keyspace, info, "bench", ttl_ms=3_600_000)
            )
            shard = self._keyspace.of_shard(0)
            assert await self._runner.one(index.open_shard(shard, made.incarnation, "bench", bits))
            assert await self._runner.one(
                leases.activate(self._keyspace, info.key, made.incarnation, "bench")
            )
            self._seqs[made.incarnation] = 0

    async def fill(self, blocks: int) -> None:
        """All chains start with the system prompt and lie on a worker of their own. Of every
        second one, half lies on another worker as well, and a quarter on a third, in host memory:
        its owners change at four depths instead of two."""
        system = self.hashes(SYSTEM_PROMPT)
        owners = list(self._seqs)
        for inc in owners:
            await self.store(inc, index.chain_changes(system, Tier.DEVICE))
        for n in range(max(2, blocks // CHAIN)):
            own = self.hashes(CHAIN - SYSTEM_PROMPT)
            chain = system + own
            await self.store(
                owners[n % len(owners)], index.chain_changes(chain, Tier.DEVICE, SYSTEM_PROMPT)
            )
            if n % 2:
                half, quarter = chain[: CHAIN // 2], chain[: CHAIN // 4]
                await self.store(
                    owners[(n + 1) % len(owners)],
                    index.chain_changes(half, Tier.DEVICE, SYSTEM_PROMPT),
                )
                await self.store(
                    owners[(n + 2) % len(owners)],
                    index.chain_changes(quarter, Tier.HOST, SYSTEM_PROMPT),
                )
            self.chains.append(chain)

    async def store(self, inc: Incarnation, every: list[index.Change]) -> None:
        calls: list[Call[bool]] = []
        for at in range(0, len(every), BATCH):
            self._seqs[inc] += 1
            changes = every[at : at + BATCH]
            calls.append(
                index.apply(self._keyspace.of_shard(0), inc, "bench", self._seqs[inc], changes)
            )
        assert all(await self._runner.run(calls))

    def hashes(self, count: int) -> list[SequenceHash]:
        return [SequenceHash(int(h)) for h in self._rng.integers(0, 2**64, count, np.uint64)]


async def server_us(
    runner: ScriptRunner, keyspace: Keyspace, chains: list[list[SequenceHash]], repeats: int
) -> float:
    """Median over `repeats` of Redis's mean time per query, all its round trips together, µs."""
    means: list[float] = []
    for _ in range(repeats):
        await runner.redis.config_resetstat()
        for chain in chains:
            await match(runner, keyspace, [chain])
        stats = (await runner.redis.info("commandstats"))["cmdstat_evalsha"]
        means.append(stats["usec"] / len(chains))
    return float(median(means))


async def change_us(redis: Client, fleet: Fleet) -> dict[str, float]:
    """Median of Redis's time per block, µs, of batches of a chain of one worker: stored where
    nobody holds them, stored where another does, removed."""
    us: dict[str, list[float]] = {"stored": [], "stored beside another": [], "removed": []}
    first, second = fleet.incarnations[:2]
    for _ in range(CHANGE_BATCHES):
        chain = fleet.hashes(BATCH)
        stores = index.chain_changes(chain, Tier.DEVICE)
        for name, inc, changes in (
            ("stored", first, stores),
            ("stored beside another", second, stores),
            ("removed", first, index.chain_changes(chain, None)),
            ("removed", second, index.chain_changes(chain, None)),
        ):
            await redis.config_resetstat()
            await fleet.store(inc, changes)
            us[name].append(await _evalsha_us(redis) / BATCH)
    return {name: float(median(times)) for name, times in us.items()}


async def peer_us(redis: Client, chains: list[list[SequenceHash]], workers: int) -> float:
    """Redis's mean time per query, µs, of a pipeline of one HKEYS per block. All but the system
    prompt lies on one worker."""
    for chain in chains:
        async with redis.pipeline(transaction=False) as pipe:
            for at, block in enumerate(chain):
                holders = workers if at < SYSTEM_PROMPT else 1
                pipe.hset(
                    f"{PEER_PREFIX}{block:016x}", mapping={f"w{i}": 1 for i in range(holders)}
                )
            await pipe.execute()
    await redis.config_resetstat()
    for chain in chains:
        async with redis.pipeline(transaction=False) as pipe:
            for block in chain:
                pipe.hkeys(f"{PEER_PREFIX}{block:016x}")
            await pipe.execute()
    stats = (await redis.info("commandstats"))["cmdstat_hkeys"]
    return float(stats["usec"]) / len(chains)


async def router_cost(
    runner: ScriptRunner, keyspace: Keyspace, chains: list[list[SequenceHash]]
) -> tuple[float, float]:
    """CPU of the router per look-up, µs, hashing apart, and round trips: alone, one at a time."""
    await runner.redis.config_resetstat()
    begin = time.process_time()
    for chain in chains:
        await match(runner, keyspace, [chain])
    cpu_us = (time.process_time() - begin) / len(chains) * 1e6
    calls = (await runner.redis.info("commandstats"))["cmdstat_evalsha"]["calls"]
    return cpu_us, calls / len(chains)


async def _evalsha_us(redis: Client) -> float:
    return float((await redis.info("commandstats"))["cmdstat_evalsha"]["usec"])


async def measure(
    url: str, blocks: int, workers: int, queries: int, repeats: int
) -> dict[str, Any]:
    redis = connect(url)
    keyspace = Keyspace("bench-index")
    runner = ScriptRunner(redis, timeout_s=60)
    try:
        await _delete(runner, keyspace)
        before = (await redis.info("memory"))["used_memory"]
        fleet = Fleet(runner, keyspace, workers, seed=1)
        await fleet.register(blocks)
        await fleet.fill(blocks)
        memory = (await redis.info("memory"))["used_memory"] - before
        unique = len(fleet.chains) * (CHAIN - SYSTEM_PROMPT) + SYSTEM_PROMPT
        rng = np.random.default_rng(2)
        unknown = [SequenceHash(int(h)) for h in rng.integers(0, 2**64, CHAIN, np.uint64)]
        us: dict[str, dict[str, float]] = {name: {} for name in QUERIES}
        cpu_us: dict[str, float] = {}
        trips: dict[str, float] = {}
        for length in LENGTHS:
            picks = rng.integers(0, len(fleet.chains) // 2, queries)
            single = [fleet.chains[2 * i][:length] for i in picks]
            nested = [fleet.chains[2 * i + 1][:length] for i in picks]
            half = [c[: length // 2] + unknown[: length - length // 2] for c in nested]
            for name, chains in zip(QUERIES, (single, nested, half), strict=True):
                us[name][str(length)] = await server_us(runner, keyspace, chains, repeats)
            cpu_us[str(length)], trips[str(length)] = await router_cost(runner, keyspace, single)
        changes = await change_us(redis, fleet)
        peer = {
            str(length): await peer_us(
                redis, [c[:length] for c in fleet.chains[: 2 * PEER_CHAINS : 2]], workers
            )
            for length in PEER_LENGTHS
        }
        return {
            "change_us_per_block": changes,
            "peer_us": peer,
            "router_cpu_us": cpu_us,
            "round_trips": trips,
            "redis": (await redis.info("server"))["redis_version"],
            "workers": workers,
            "unique_blocks": unique,
            "bytes_per_block": memory / unique,
            "match_us": us,
        }
    finally:
        await _delete(runner, keyspace)
        await redis.aclose()


async def _delete(runner: ScriptRunner, keyspace: Keyspace) -> None:
    await reset(runner.redis, keyspace)
    async for key in runner.redis.scan_iter(match=f"{PEER_PREFIX}*", count=1000):
        await runner.redis.unlink(key)


@click.command()
@click.option("--redis", "url", help="Redis to measure; none: one of its own.")
@click.option("--blocks", default=1_000_000, show_default=True, help="Unique blocks.")
@click.option("--workers", default=64, show_default=True)
@click.option("--queries", default=200, show_default=True, help="Per length and round.")
@click.option("--repeats", default=5, show_default=True, help="Rounds; the median counts.")
@click.option("--json", "out", type=click.Path(path_type=Path), help="Write the figures there.")
def main(
    url: str | None, blocks: int, workers: int, queries: int, repeats: int, out: Path | None
) -> None:
    """Measure the index in a real Redis."""
    with ExitStack() as stack:
        url = url or stack.enter_context(EmbeddedRedis()).url
        result = asyncio.run(measure(url, blocks, workers, queries, repeats))
    click.echo(
        f"Redis {result['redis']}, {workers} workers, {result['unique_blocks']:,} unique blocks: "
        f"{result['bytes_per_block']:.0f} bytes per block"
    )
    for name, figure in result["change_us_per_block"].items():
        click.echo(f"  {figure:.1f} µs of Redis per block {name}, in batches of {BATCH}")
    click.echo("\nserver time per query, µs")
    click.echo("  blocks" + "".join(f"{name:>22}" for name in QUERIES))
    for length in map(str, LENGTHS):
        figures = (result["match_us"][name][length] for name in QUERIES)
        click.echo(f"{length:>8}" + "".join(f"{figure:>22.1f}" for figure in figures))
    click.echo("\nbeside a pipeline of one HKEYS per block of a prompt with one owner")
    for length in map(str, PEER_LENGTHS):
        ours, theirs = result["match_us"][QUERIES[0]][length], result["peer_us"][length]
        click.echo(f"{length:>8}{theirs:>22.1f} µs, {theirs / ours:.0f} times as much")
    click.echo("\nrouter, per look-up that is alone: CPU in µs without hashing, round trips")
    for length in map(str, LENGTHS):
        cpu, trips = result["router_cpu_us"][length], result["round_trips"][length]
        click.echo(f"{length:>8}{cpu:>22.0f}{trips:>22.1f}")
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2))


if __name__ == "__main__":
    main()
