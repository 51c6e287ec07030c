"""The index swept over depth, width, match length and share of a common prefix.

    python -m loadtest.bench_index_sweeps --json out/bench_index_sweeps.json

Next to it run two plain in-process indexes written for comparison: a radix tree, and a flat hash
map from block to owners. They are shared with nobody and cost no round trip, so they show what
finding an overlap takes by itself. kvroute's index is measured in Redis's own time (INFO
commandstats) and, for lookups, also in CPU time of this process; the other two in CPU time of this
process, which collects garbage as seldom as a router. The benchmark fills and deletes a namespace.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from rich.console import Console

from app.core.types import SequenceHash, Tier
from app.http.server import collect_seldom
from app.ops.reset import delete_namespace
from app.state.client import RedisClient
from app.state.connect import connect
from app.state.overlap import match
from app.state.scripts import ScriptRunner
from loadtest.bench_index import KEYS, evalsha, look_up_us, used_memory
from loadtest.command import table
from loadtest.harness import bench
from loadtest.holders import Holders, check_found, hashes

BLOCKS = 131_072
QUERIES = 300

Chain = Sequence[SequenceHash]


@dataclass(frozen=True)
class Point:
    """depth: blocks of a chain. width: workers; each holds every width-th chain.
    match: fraction of a query that is held. share: fraction of a chain that is common to all."""

    depth: int = 512
    width: int = 64
    match: float = 1.0
    share: float = 0.25


SWEEPS: dict[str, Sequence[float]] = {
    "depth": (32, 128, 512, 2048, 8192),
    "width": (4, 16, 64, 256),
    "match": (0.0, 0.25, 0.5, 1.0),
    "share": (0.0, 0.25, 0.5, 0.9),
}


class InProcess(Protocol):
    def store(self, worker: int, chain: Chain) -> None: ...

    def remove(self, worker: int, chain: Chain) -> None: ...

    def match(self, chain: Chain) -> dict[int, int]: ...


class FlatMap:
    """A hash map from block to owners."""

    def __init__(self) -> None:
        self._owners: dict[SequenceHash, set[int]] = {}

    def store(self, worker: int, chain: Chain) -> None:
        for block in chain:
            self._owners.setdefault(block, set()).add(worker)

    def remove(self, worker: int, chain: Chain) -> None:
        for block in chain:
            owners = self._owners.get(block)
            if owners is not None:
                owners.discard(worker)
                if not owners:
                    del self._owners[block]

    def match(self, chain: Chain) -> dict[int, int]:
        """Number of leading blocks that each worker holds."""
        return overlaps([self._owners.get(block) for block in chain])


@dataclass(eq=False)
class TreeNode:
    owners: set[int] = field(default_factory=set)
    children: dict[SequenceHash, TreeNode] = field(default_factory=dict)


class RadixTree:
    """A tree with a node per block, below the node of its parent."""

    def __init__(self) -> None:
        self._root = TreeNode()

    def store(self, worker: int, chain: Chain) -> None:
        node = self._root
        for block in chain:
            child = node.children.get(block)
            if child is None:
                child = node.children[block] = TreeNode()
            child.owners.add(worker)
            node = child

    def remove(self, worker: int, chain: Chain) -> None:
        path, node = [], self._root
        for block in chain:
            child = node.children.get(block)
            if child is None:
                break
            path.append((node, block, child))
            node = child
        for parent, block, child in reversed(path):
            child.owners.discard(worker)
            if not child.owners and not child.children:
                del parent.children[block]

    def match(self, chain: Chain) -> dict[int, int]:
        """Number of leading blocks that each worker holds."""
        owners: list[set[int] | None] = []
        node = self._root
        for block in chain:
            child = node.children.get(block)
            if child is None:
                break
            owners.append(child.owners)
            node = child
        return overlaps(owners)


IN_PROCESS: dict[str, type[InProcess]] = {"radix_tree": RadixTree, "flat_map": FlatMap}


def overlaps(owners: Sequence[set[int] | None]) -> dict[int, int]:
    scores: dict[int, int] = {}
    active: set[int] = set()
    for depth, of_block in enumerate(owners):
        still = (of_block or set()) if depth == 0 else active & (of_block or set())
        if len(still) != len(active):
            scores.update(dict.fromkeys(active - still, depth))
        active = still
        if not active:
            break
    scores.update(dict.fromkeys(active, len(owners)))
    return scores


@dataclass(frozen=True)
class Workload:
    """chains: each with the worker that holds it. queries: like chains, but partly unknown; of each
    the first `held` blocks are held."""

    chains: list[tuple[int, list[SequenceHash]]]
    queries: list[list[SequenceHash]]
    held: int
    unique_blocks: int


def workload(point: Point) -> Workload:
    rng = np.random.default_rng(1)
    common = hashes(rng, int(point.depth * point.share))
    own = point.depth - len(common)
    chains = [(n % point.width, [*common, *hashes(rng, own)]) for n in range(max(1, BLOCKS // own))]
    held = int(point.depth * point.match)
    picks = rng.integers(0, len(chains), QUERIES)
    queries = [[*chains[i][1][:held], *hashes(rng, point.depth - held)] for i in picks]
    return Workload(chains, queries, held, len(common) + own * len(chains))


def in_process(load: Workload, kind: type[InProcess]) -> dict[str, float]:
    """CPU time, µs, per block stored, per block removed and per query; bytes per unique block."""
    made = kind()
    blocks = sum(len(chain) for _, chain in load.chains)

    def timed(run: Any, calls: list[tuple[Any, ...]]) -> float:
        begin = time.process_time()
        for arguments in calls:
            run(*arguments)
        return (time.process_time() - begin) * 1e6

    return {
        "store": timed(made.store, list(load.chains)) / blocks,
        "match": timed(made.match, [(query,) for query in load.queries]) / QUERIES,
        "remove": timed(made.remove, list(load.chains)) / blocks,
        "bytes": traced_bytes(load, kind()),
    }


def traced_bytes(load: Workload, made: InProcess) -> float:
    """Bytes per unique block, without the hashes themselves, which existed before."""
    tracemalloc.start()
    try:
        for worker, chain in load.chains:
            made.store(worker, chain)
        return tracemalloc.get_traced_memory()[0] / load.unique_blocks
    finally:
        tracemalloc.stop()


async def in_redis(redis: RedisClient, load: Workload, width: int) -> dict[str, float]:
    """Redis's time, µs, per block stored, per block removed and per query; this process's CPU time
    per query, without hashing; and bytes per unique block."""
    runner = ScriptRunner(redis, timeout_s=60)
    await delete_namespace(redis, KEYS)
    before = await used_memory(redis)
    holders = Holders(runner, KEYS, index_blocks=load.unique_blocks)
    await holders.register(width)
    blocks = sum(len(chain) for _, chain in load.chains)

    async def change(tier: Tier | None) -> float:
        await redis.config_resetstat()
        for worker, chain in load.chains:
            await holders.store(worker, chain, tier)
        return (await evalsha(redis))["usec"] / blocks

    store = await change(Tier.DEVICE)
    size = (await used_memory(redis) - before) / load.unique_blocks
    await redis.config_resetstat()
    cpu_s = 0.0
    for query in load.queries:
        begin = time.process_time()
        overlaps, _ = await match(runner, KEYS, [query])
        cpu_s += time.process_time() - begin
        check_found(overlaps, [load.held])
    return {
        "store": store,
        "match": await look_up_us(redis) / QUERIES,
        "match_cpu": cpu_s / QUERIES * 1e6,
        "remove": await change(None),
        "bytes": size,
    }


async def measure(url: str, sweeps: dict[str, Sequence[float]] = SWEEPS) -> list[dict[str, Any]]:
    """One row per point."""
    rows: list[dict[str, Any]] = []
    collect_seldom()
    async with connect(url) as redis:
        try:
            for name, values in sweeps.items():
                for value in values:
                    point = replace(Point(), **{name: value})  # type: ignore[arg-type]
                    load = workload(point)
                    rows.append(
                        {
                            "sweep": name,
                            **asdict(point),
                            "unique_blocks": load.unique_blocks,
                            "kvroute": await in_redis(redis, load, point.width),
                            **{name: in_process(load, kind) for name, kind in IN_PROCESS.items()},
                        }
                    )
        finally:
            await delete_namespace(redis, KEYS)
    return rows


def show(rows: list[dict[str, Any]], console: Console) -> None:
    indexes = ("kvroute", *IN_PROCESS)
    units = {"match": "µs a query", "store": "µs a block", "remove": "µs a block", "bytes": "bytes"}
    for name in SWEEPS:
        heads = [f"{what}, {unit}\n{made}" for what, unit in units.items() for made in indexes]
        cells = table(name, "match, µs of CPU besides\nkvroute", *heads, title=f"By {name}")
        for row in (row for row in rows if row["sweep"] == name):
            figures = [row[made][what] for what in units for made in indexes]
            besides = row["kvroute"]["match_cpu"]
            cells.add_row(f"{row[name]:g}", *(f"{figure:.3g}" for figure in (besides, *figures)))
        console.print(cells)


main = bench(measure, show, redis=True, width=180)

if __name__ == "__main__":
    main()
