"""Redis server time per overlap query and per applied block, on an index of a given size.

    python -m loadtest.bench_index --redis redis://127.0.0.1:6379 --json out/bench_index.json

Server time is Redis's own (INFO commandstats). Fills, and at the end deletes, a namespace of its
own; the statistics of the server are reset, so use one that nobody else needs.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
import orjson

from app.core import index, leases
from app.core.keys import Keyspace
from app.core.matching import match
from app.core.redis import connect
from app.core.scripts import Call, ScriptRunner
from app.core.types import Incarnation, SequenceHash, Tier, WorkerInfo, WorkerKey

LENGTHS = (16, 64, 512, 2048, 4096, 8192)
CHAIN = 8192
SYSTEM_PROMPT = 64
BATCH = 64
QUERIES = ("matched, one owner", "matched, three owners", "half of that matched")


class Fleet:
    """Workers that hold one system prompt together and long private chains each."""

    def __init__(self, runner: ScriptRunner, keyspace: Keyspace, workers: int, seed: int) -> None:
        self._runner = runner
        self._keyspace = keyspace
        self._workers = workers
        self._rng = np.random.default_rng(seed)
        self._seqs: dict[Incarnation, int] = {}
        self.chains: list[list[SequenceHash]] = []

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
        system = self._hashes(SYSTEM_PROMPT)
        owners = list(self._seqs)
        for inc in owners:
            await self._store(inc, index.chain_changes(system, Tier.DEVICE))
        for n in range(max(2, blocks // CHAIN)):
            own = self._hashes(CHAIN - SYSTEM_PROMPT)
            chain = system + own
            await self._store(
                owners[n % len(owners)], index.chain_changes(chain, Tier.DEVICE, SYSTEM_PROMPT)
            )
            if n % 2:
                half, quarter = chain[: CHAIN // 2], chain[: CHAIN // 4]
                await self._store(
                    owners[(n + 1) % len(owners)],
                    index.chain_changes(half, Tier.DEVICE, SYSTEM_PROMPT),
                )
                await self._store(
                    owners[(n + 2) % len(owners)],
                    index.chain_changes(quarter, Tier.HOST, SYSTEM_PROMPT),
                )
            self.chains.append(chain)

    async def _store(self, inc: Incarnation, every: list[index.Change]) -> None:
        calls: list[Call[bool]] = []
        for at in range(0, len(every), BATCH):
            self._seqs[inc] += 1
            changes = every[at : at + BATCH]
            calls.append(
                index.apply(self._keyspace.of_shard(0), inc, "bench", self._seqs[inc], changes)
            )
        assert all(await self._runner.run(calls))

    def _hashes(self, count: int) -> list[SequenceHash]:
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
        await redis.config_resetstat()
        await fleet.fill(blocks)
        applied = (await redis.info("commandstats"))["cmdstat_evalsha"]
        memory = (await redis.info("memory"))["used_memory"] - before
        unique = len(fleet.chains) * (CHAIN - SYSTEM_PROMPT) + SYSTEM_PROMPT
        rng = np.random.default_rng(2)
        unknown = [SequenceHash(int(h)) for h in rng.integers(0, 2**64, CHAIN, np.uint64)]
        us: dict[str, dict[str, float]] = {name: {} for name in QUERIES}
        for length in LENGTHS:
            picks = rng.integers(0, len(fleet.chains) // 2, queries)
            single = [fleet.chains[2 * i][:length] for i in picks]
            nested = [fleet.chains[2 * i + 1][:length] for i in picks]
            half = [c[: length // 2] + unknown[: length - length // 2] for c in nested]
            for name, chains in zip(QUERIES, (single, nested, half), strict=True):
                us[name][str(length)] = await server_us(runner, keyspace, chains, repeats)
        return {
            "redis": (await redis.info("server"))["redis_version"],
            "workers": workers,
            "unique_blocks": unique,
            "apply_us_per_block": applied["usec"] / applied["calls"] / BATCH,
            "bytes_per_block": memory / unique,
            "match_us": us,
        }
    finally:
        await _delete(runner, keyspace)
        await redis.aclose()


async def _delete(runner: ScriptRunner, keyspace: Keyspace) -> None:
    async for key in runner.redis.scan_iter(match=keyspace["*"].replace("{", "\\{"), count=1000):
        await runner.redis.unlink(key)


@click.command()
@click.option("--redis", "url", envvar="REDIS_URL", required=True, help="Redis to measure.")
@click.option("--blocks", default=1_000_000, show_default=True, help="Unique blocks.")
@click.option("--workers", default=64, show_default=True)
@click.option("--queries", default=200, show_default=True, help="Per length and round.")
@click.option("--repeats", default=5, show_default=True, help="Rounds; the median counts.")
@click.option("--json", "out", type=click.Path(path_type=Path), help="Write the figures there.")
def main(url: str, blocks: int, workers: int, queries: int, repeats: int, out: Path | None) -> None:
    """Measure the index in a real Redis."""
    result = asyncio.run(measure(url, blocks, workers, queries, repeats))
    click.echo(
        f"Redis {result['redis']}, {workers} workers, {result['unique_blocks']:,} unique blocks: "
        f"{result['bytes_per_block']:.0f} bytes per block, "
        f"{result['apply_us_per_block']:.1f} µs per applied block"
    )
    click.echo("\nserver time per query, µs")
    click.echo("  blocks" + "".join(f"{name:>22}" for name in QUERIES))
    for length in map(str, LENGTHS):
        figures = (result["match_us"][name][length] for name in QUERIES)
        click.echo(f"{length:>8}" + "".join(f"{figure:>22.1f}" for figure in figures))
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2))


if __name__ == "__main__":
    main()
