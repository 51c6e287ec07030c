from __future__ import annotations

import pytest

from app.state import index
from tests.lua.conftest import A, Namespace


async def dropped(space: Namespace, *names: str) -> set[str]:
    """Create hashes under these names, call the script, and return those it removed."""
    for name in names:
        await space.redis.hset(space.shard[name], "f", "1d")
    count = await space.do(index.drop_buckets(space.shard, names))
    gone = {name for name in names if not await space.redis.exists(space.shard[name])}
    assert count == len(gone)
    return gone


@pytest.mark.oldest_too
@pytest.mark.parametrize(
    ("bits", "fit", "stray"),
    [
        (4, ["0", "9", "f"], ["", "00", "F", "g", "0.bak", "0:1"]),
        (5, ["00", "a8", "f0"], ["a", "a4", "a9", "f8f", "a800"]),
        (8, ["00", "a9", "ff"], ["0", "000", "fF", " f"]),
    ],
)
async def test_a_bucket_stays_only_if_the_layout_leads_to_it(
    space: Namespace, bits: int, fit: list[str], stray: list[str]
) -> None:
    await space.redis.hset(space.key("shard"), "bucket_bits", str(bits))
    names = [f"blocks:{bucket}" for bucket in fit + stray]
    assert await dropped(space, *names) == {f"blocks:{bucket}" for bucket in stray}


async def test_a_bucket_with_published_blocks_stays(space: Namespace) -> None:
    inc = await space.worker("a", bucket_bits=6)
    await space.hold(inc, [A])
    assert await space.do(index.drop_buckets(space.shard, ["blocks:a8"])) == 0
    assert await space.owners(A, 6) == "1d"


async def test_predictions_have_a_layout_of_their_own(space: Namespace) -> None:
    await space.redis.hset(space.key("shard"), "bucket_bits", "8")
    await space.redis.hset(space.shard["predictions"], "bucket_bits", "4")
    names = ["blocks:aa", "blocks:a", "predicted:aa", "predicted:a"]
    assert await dropped(space, *names) == {"blocks:a", "predicted:aa"}


@pytest.mark.parametrize("bits", [None, "spoilt"])
async def test_all_buckets_stay_while_there_is_no_layout(
    space: Namespace, bits: str | None
) -> None:
    if bits:
        await space.redis.hset(space.key("shard"), "bucket_bits", bits)
    assert await dropped(space, "blocks:aa", "blocks:a", "predicted:a") == set()
