import re

import numpy as np
import pytest
from click import ClickException
from redis.asyncio import Redis

from app.core.types import Incarnation, Tier, TierOverlap
from app.state import index
from loadtest.bench_index import (
    CHAIN,
    KINDS,
    LENGTHS,
    SYSTEM_PROMPT,
    LookUpCost,
    measure,
    prompt,
)
from loadtest.holders import check_found, hashes


@pytest.mark.parametrize("length", LENGTHS)
def test_prompts_are_many_and_lie_in_the_index_as_chains_of_their_own(length):
    rng = np.random.default_rng(1)
    chains = [hashes(rng, CHAIN) for _ in range(4)]
    stored = {c.block: c.leader for chain in chains for c in index.chain_changes(chain, Tier.HOST)}
    asked = [prompt("one owner", chains, length, rng) for _ in range(20)]
    for blocks in asked:
        assert len(blocks) == length
        assert all(stored[c.block] == c.leader for c in index.chain_changes(blocks, Tier.HOST))
    assert (len({blocks[-1] for blocks in asked}) > 10) is (SYSTEM_PROMPT < length < CHAIN)
    # Three workers hold a quarter of a chain.
    three = prompt("three owners", chains, length, rng)
    assert length > CHAIN // 4 or set(three) <= set(chains[3][: CHAIN // 4])
    half = prompt("half of that", chains, length, rng)
    assert [block in stored for block in half] == [n < length // 2 for n in range(length)]


def test_a_lookup_that_finds_other_than_is_held_ends_the_benchmark():
    found = {Incarnation(1): TierOverlap(3, 2, 0), Incarnation(2): TierOverlap(4, 0, 0)}
    check_found([found, {}], [5, 0])
    for wrong, held in ((found, 6), (found, 4), ({}, 1), (None, 1)):
        with pytest.raises(ClickException, match=f"a worker holds {held}"):
            check_found([wrong], [held])


@pytest.mark.slow
async def test_a_small_index_is_measured_and_leaves_no_keys(own_redis_server):
    found = await measure(own_redis_server.url, blocks=30_000, workers=4, queries=4, repeats=1)
    assert re.fullmatch(r"(Redis|Valkey) \d+\.\d+\.\d+", found["server"])
    assert found["unique_blocks"] == 4 * (8192 - 64) + 64
    assert 20 < found["bytes_per_block"] < 100
    for name in LookUpCost._fields:
        assert list(found[name]) == list(KINDS)
        for of_kind in found[name].values():
            assert list(of_kind) == [str(length) for length in LENGTHS]
            assert all(cost > 0 for cost in of_kind.values())
    assert all(us > 0 for us in found["change_us_per_block"].values())
    assert found["peer_us"]["2048"] > found["peer_us"]["512"] > 0
    # The router knows where the system prompt ends, but nothing about what follows it.
    trips = found["round_trips"]
    assert trips["one owner"] == dict.fromkeys(map(str, LENGTHS), 1)
    assert trips["mixed"]["512"] == trips["mixed, first"]["512"] == 1
    assert 1 < trips["mixed"]["8192"] < 2 == trips["mixed, first"]["8192"]
    async with Redis.from_url(own_redis_server.url) as redis:
        assert await redis.dbsize() == 0
