from __future__ import annotations

import random

import pytest
from redis.asyncio import Redis

from app.core.types import SequenceHash
from app.local.redis_server import EmbeddedRedis
from loadtest import bench_index_sweeps as sweeps
from loadtest.bench_index_sweeps import FlatMap, InProcess, Point, RadixTree, measure, workload


def scan(held: dict[int, set[int]], chain: list[int]) -> dict[int, int]:
    found = {}
    for worker, blocks in held.items():
        count = next((i for i, b in enumerate(chain) if b not in blocks), len(chain))
        if count:
            found[worker] = count
    return found


@pytest.mark.parametrize("kind", [FlatMap, RadixTree])
def test_the_in_process_indexes_agree_with_a_full_scan(kind: type[InProcess]) -> None:
    rng = random.Random(1)
    chains = [
        [SequenceHash(1 + n // 3), *(SequenceHash(100 * n + i) for i in range(50, 59))]
        for n in range(6)
    ]
    index, held = kind(), {worker: set[int]() for worker in range(4)}
    for _ in range(300):
        worker, chain = rng.randrange(4), rng.choice(chains)
        cut = rng.randrange(1, 10)
        if rng.random() < 0.6:
            index.store(worker, chain[:cut])
            held[worker] |= set(chain[:cut])
        else:
            index.remove(worker, chain)
            held[worker] -= set(chain)
        for query in chains:
            assert index.match(query) == scan(held, query)


def test_the_workload_of_a_point_has_its_shape() -> None:
    load = workload(Point(depth=128, width=4, match=0.5, share=0.25))
    chains = [chain for _, chain in load.chains]
    assert {len(chain) for chain in chains} == {len(query) for query in load.queries} == {128}
    assert {worker for worker, _ in load.chains} == {0, 1, 2, 3}
    assert all(chain[:32] == chains[0][:32] for chain in chains)
    assert len({block for chain in chains for block in chain}) == load.unique_blocks
    held = {tuple(chain[:64]) for chain in chains}
    assert all(tuple(query[:64]) in held for query in load.queries)
    assert not {b for query in load.queries for b in query[64:]} & {b for c in chains for b in c}


@pytest.mark.slow
async def test_a_small_sweep_is_measured_and_leaves_no_keys(
    own_redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeps, "BLOCKS", 20_000)
    rows = await measure(own_redis_server.url, {"depth": (32, 1024), "width": (4,)})
    assert [(row["sweep"], row["depth"], row["width"]) for row in rows] == [
        ("depth", 32, 64),
        ("depth", 1024, 64),
        ("width", 512, 4),
    ]
    for row in rows:
        plain = {"store", "match", "remove", "bytes"}
        assert row["kvroute"].keys() == plain | {"match_cpu"}
        assert row["radix_tree"].keys() == row["flat_map"].keys() == plain
        for name in ("kvroute", "radix_tree", "flat_map"):
            assert all(figure > 0 for figure in row[name].values())
    async with Redis.from_url(own_redis_server.url) as redis:
        assert await redis.dbsize() == 0
