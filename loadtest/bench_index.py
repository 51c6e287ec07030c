"""The costs of an index of a given size: lookups, changes, memory.

    python -m loadtest.bench_index --json out/bench_index.json

Server time is Redis's own (INFO commandstats). Each lookup is made by a router that has looked up
one other prompt before, with the same system prompt; in one column it has looked up none. The
router shares a core with Redis.

The same run also measures the access pattern that others use: one hash per block, and a pipeline of
one HKEYS for each block of a prompt. The benchmark fills namespaces of its own and deletes them at
the end.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from copy import deepcopy
from statistics import median
from typing import Any, NamedTuple

import click
import numpy as np
from rich.console import Console

from app.core.chains import GROUP_BLOCKS
from app.core.keys import Keyspace
from app.core.settings.kinds import MOST
from app.core.types import SequenceHash, Tier
from app.http.server import collect_seldom
from app.ops.namespaces import delete_namespace
from app.state.client import RedisClient
from app.state.connect import connect
from app.state.overlap import Boundaries, match
from app.state.scripts import Call, ScriptRunner
from loadtest.command import option, table
from loadtest.harness import bench, medians
from loadtest.holders import BATCH, Holders, check_found, hashes

KEYS = Keyspace("bench-index")
LENGTHS = (16, 64, 512, 2048, 4096, 8192)
CHAIN = 8192
SYSTEM_PROMPT = 64
FIRST = "mixed, first"
HALF = "half of that"
PARTS_OF_MIXED = ("one owner", "three owners", HALF)
KINDS = (*PARTS_OF_MIXED, "mixed", FIRST)
PEER_LENGTHS = (512, 2048)
PEER_PREFIX = "bench-index-peer:"
PEER_QUERIES = 200
CHANGE_BATCHES = 200
MIN_WORKERS = 3
"""One chain is stored on up to this many workers."""

Chains = Sequence[Sequence[SequenceHash]]


def num_unique(chains: Chains) -> int:
    return len(chains) * (CHAIN - SYSTEM_PROMPT) + SYSTEM_PROMPT


async def fill(holders: Holders, rng: np.random.Generator, blocks: int) -> Chains:
    """Store chains; each starts with the system prompt, which every worker holds, and lies whole
    on one worker.

    The first half of every second chain also lies on another worker, and the first quarter on
    a third, in host memory. So its owners change at four depths instead of two.
    """
    system = hashes(rng, SYSTEM_PROMPT)
    workers = len(holders.incarnations)
    for worker in range(workers):
        await holders.store(worker, system)
    chains = [system + hashes(rng, CHAIN - SYSTEM_PROMPT) for _ in range(max(4, blocks // CHAIN))]
    for n, chain in enumerate(chains):
        await holders.store(n % workers, chain, start=SYSTEM_PROMPT)
        if n % 2:
            half, quarter = chain[: CHAIN // 2], chain[: CHAIN // 4]
            await holders.store((n + 1) % workers, half, start=SYSTEM_PROMPT)
            await holders.store((n + 2) % workers, quarter, Tier.HOST, start=SYSTEM_PROMPT)
    return chains


async def evalsha(redis: RedisClient) -> dict[str, float]:
    stats: dict[str, float] = (await redis.info("commandstats"))["cmdstat_evalsha"]
    return stats


async def look_up_us(redis: RedisClient) -> float:
    """Redis's time in lookups, µs, where nothing else was asked since the statistics were reset."""
    stats = await redis.info("commandstats")
    # The script itself runs no HMGET.
    both = [stats.get(f"cmdstat_{name}", {"usec": 0}) for name in ("evalsha", "hmget")]
    return float(sum(of_command["usec"] for of_command in both))


class LookUpCost(NamedTuple):
    """The mean cost of one lookup."""

    match_us: float
    round_trips: float


class CountingRunner(ScriptRunner):
    """Counts its round trips."""

    round_trips = 0

    async def run_each(self, calls: Sequence[Call[Any]]) -> list[Any]:
        self.round_trips += 1
        return await super().run_each(calls)


async def look_up_cost(
    redis: RedisClient,
    chains: Chains,
    held: Sequence[int],
    learnt: Boundaries,
) -> LookUpCost:
    """match_us: Redis's time over all round trips.

    held: how many blocks of each chain are to be found. learnt: what the router knows before each.
    """
    runner = CountingRunner(redis, timeout_s=60)
    await redis.config_resetstat()
    for chain, due in zip(chains, held, strict=True):
        # Made afresh, and so as near in the caches as hashing leaves it.
        fresh = np.array(chain, np.uint64).tolist()
        boundaries = deepcopy(learnt)
        overlaps, _ = await match(runner, KEYS, [fresh], boundaries=boundaries)
        check_found(overlaps, [due])
    in_all = (await look_up_us(redis), runner.round_trips)
    return LookUpCost(*(figure / len(chains) for figure in in_all))


def stretch(
    chain: Sequence[SequenceHash], length: int, within: int, rng: np.random.Generator
) -> list[SequenceHash]:
    """The system prompt and then some of the first `within` blocks of `chain`; `length` in all.

    As it begins with a group, the index holds it as it would a chain that begins so. Thus there are
    many prompts of each length, and what is looked up is rarely in the processor's caches already.
    """
    start = SYSTEM_PROMPT + GROUP_BLOCKS * int(rng.integers(1 + (within - length) // GROUP_BLOCKS))
    system = chain[: min(length, SYSTEM_PROMPT)]
    return [*system, *chain[start : start + length - len(system)]]


def prompt(
    kind: str, chains: Chains, length: int, rng: np.random.Generator
) -> Sequence[SequenceHash]:
    """One of PARTS_OF_MIXED, of none of the first two chains."""
    n = 2 * int(rng.integers(1, len(chains) // 2))
    if kind == "one owner":
        return stretch(chains[n], length, CHAIN, rng)
    # Up to a quarter of the chain, three workers hold it.
    held = stretch(chains[n + 1], length, max(length, CHAIN // 4), rng)
    if kind == "three owners":
        return held
    return [*held[: length // 2], *hashes(rng, length - length // 2)]


async def look_ups(runner: ScriptRunner, chains: Chains, queries: int, repeats: int) -> Any:
    """Medians over `repeats`, by figure, by kind and by length of the prompt."""
    rng = np.random.default_rng(2)
    costs: dict[tuple[str, int], list[LookUpCost]] = {}
    for _ in range(repeats):
        for length in LENGTHS:
            learnt = Boundaries()
            await match(runner, KEYS, [chains[0][:length]], boundaries=learnt)
            for kind in KINDS:
                alike = [kind] * queries if kind in PARTS_OF_MIXED else PARTS_OF_MIXED * queries
                kinds = rng.permutation(alike)
                prompts = [prompt(of, chains, length, rng) for of in kinds]
                held = [length // 2 if of == HALF else length for of in kinds]
                known = Boundaries() if kind == FIRST else learnt
                cost = await look_up_cost(runner.redis, prompts, held, known)
                costs.setdefault((kind, length), []).append(cost)
    middle = {of: medians([cost._asdict() for cost in made]) for of, made in costs.items()}
    return {
        name: {
            kind: {str(length): middle[kind, length][name] for length in LENGTHS} for kind in KINDS
        }
        for name in LookUpCost._fields
    }


async def change_us(redis: RedisClient, holders: Holders, repeats: int) -> dict[str, float]:
    """Redis's mean time per block, µs, for batches of one worker's chain that are stored, then
    removed. The median over `repeats`."""
    us: defaultdict[str, list[float]] = defaultdict(list)
    rng = np.random.default_rng(5)
    for _ in range(repeats):
        chains = [hashes(rng, BATCH) for _ in range(CHANGE_BATCHES)]
        for name, tier in (("stored", Tier.DEVICE), ("removed", None)):
            await redis.config_resetstat()
            for chain in chains:
                await holders.store(0, chain, tier)
            us[name].append((await evalsha(redis))["usec"] / CHANGE_BATCHES / BATCH)
    return {name: median(means) for name, means in us.items()}


async def version(redis: RedisClient) -> str:
    """Returns the server's version; Valkey also reports the version of Redis that it is compatible
    with."""
    info = await redis.info("server")
    valkey = info.get("valkey_version")
    return f"Valkey {valkey}" if valkey else f"Redis {info['redis_version']}"


async def used_memory(redis: RedisClient) -> float:
    """Bytes in use, seen by a new client, whose buffers are always of the same size."""
    # What servers say of a client's buffers may be a second old, so it cannot be subtracted.
    readings = []
    for _ in range(5):  # the last client's buffers may still be there
        await redis.connection_pool.disconnect()
        await asyncio.sleep(0.02)
        readings.append((await redis.info("memory"))["used_memory"])
    return float(min(readings))


async def peer_us(redis: RedisClient, chains: Chains, workers: int) -> dict[str, float]:
    """Redis's mean time per query, µs, for a pipeline of one HKEYS per block, by length. There are
    as many blocks as in the index; all but the system prompt are on one worker."""
    for chain in chains:
        async with redis.pipeline(transaction=False) as pipe:
            for at, block in enumerate(chain):
                owners = range(workers if at < SYSTEM_PROMPT else 1)
                pipe.hset(f"{PEER_PREFIX}{block:016x}", mapping={f"w{i}": 1 for i in owners})
            await pipe.execute()
    rng = np.random.default_rng(3)
    us: dict[str, float] = {}
    for length in PEER_LENGTHS:
        await redis.config_resetstat()
        for pick in rng.integers(0, len(chains), PEER_QUERIES):
            async with redis.pipeline(transaction=False) as pipe:
                for block in chains[pick][:length]:
                    pipe.hkeys(f"{PEER_PREFIX}{block:016x}")
                await pipe.execute()
        stats = (await redis.info("commandstats"))["cmdstat_hkeys"]
        us[str(length)] = float(stats["usec"]) / PEER_QUERIES
    return us


async def measure(
    url: str, blocks: int, workers: int, queries: int, repeats: int
) -> dict[str, Any]:
    redis = connect(url)
    runner = ScriptRunner(redis, timeout_s=60)
    try:
        await _delete(redis)
        before = await used_memory(redis)
        holders = Holders(runner, KEYS, index_blocks=blocks)
        await holders.register(workers)
        chains = await fill(holders, np.random.default_rng(1), blocks)
        memory = await used_memory(redis) - before
        collect_seldom()  # as routers do
        return {
            "server": await version(redis),
            "workers": workers,
            "unique_blocks": num_unique(chains),
            "bytes_per_block": memory / num_unique(chains),
            **await look_ups(runner, chains, queries, repeats),
            "change_us_per_block": await change_us(redis, holders, repeats),
            "peer_us": await peer_us(redis, chains, workers),
        }
    finally:
        await _delete(redis)
        await redis.aclose()


async def _delete(redis: RedisClient) -> None:
    await delete_namespace(redis, KEYS)
    async for key in redis.scan_iter(match=f"{PEER_PREFIX}*", count=1000):
        await redis.unlink(key)


def show(result: dict[str, Any], console: Console) -> None:
    console.print(
        f"{result['server']}, {result['workers']} workers, {result['unique_blocks']:,} unique "
        f"blocks: {result['bytes_per_block']:.1f} bytes a block"
    )
    for name, figure in result["change_us_per_block"].items():
        console.print(f"  {figure:.1f} µs of Redis a block {name}, in batches of {BATCH}")
    us, round_trips = (result[name] for name in LookUpCost._fields)
    cells = table("blocks", *KINDS, "HKEYS per block", title="A lookup: µs of Redis")
    for length in map(str, LENGTHS):
        peer = result["peer_us"].get(length)
        cells.add_row(
            length,
            *(f"{us[kind][length]:.0f}" for kind in KINDS),
            f"{peer:.0f}, {peer / us['mixed'][length]:.0f}x" if peer else "",
        )
    console.print(cells)
    cells = table("blocks", *KINDS, title="A lookup: its round trips")
    for length in map(str, LENGTHS):
        cells.add_row(length, *(f"{round_trips[kind][length]:.1f}" for kind in KINDS))
    console.print(cells)


main = bench(
    measure,
    show,
    option("--blocks", 1_000_000, "Unique blocks."),
    option("--workers", 64, kind=click.IntRange(MIN_WORKERS, MOST)),
    option("--queries", 667, "Queries per kind, length and round; three times as many of the mix."),
    option("--repeats", 5, "Rounds, of which the median is taken."),
    redis=True,
)

if __name__ == "__main__":
    main()
