from __future__ import annotations

import pytest

from app.core.types import Incarnation, SequenceHash, Tier
from app.state import index
from app.state.index import Change
from tests.lua.conftest import DEVICE, HOST, A, B, C, Namespace


async def missing(
    space: Namespace, inc: Incarnation, *entries: tuple[SequenceHash, Tier], seq: int = 1
) -> int:
    """What an audit of `entries` answers. Each of the blocks begins a chain."""
    changes = [Change(block, tier, block) for block, tier in entries]
    return await space.do(index.audit(space.shard, inc, "nonce-a", seq, changes))


@pytest.fixture
async def inc(space: Namespace) -> Incarnation:
    """Worker a, which holds three blocks that each begin a chain."""
    made = await space.worker("a")
    for block in (A, B, C):
        space.set_chain([block])
    assert await space.apply(made, 1, [(A, DEVICE), (B, DEVICE), (C, HOST)])
    return made


@pytest.mark.oldest_too
async def test_published_blocks_are_not_missing(space: Namespace, inc: Incarnation) -> None:
    assert await missing(space, inc, (A, DEVICE), (B, DEVICE), (C, HOST)) == 0
    assert await missing(space, inc) == 0


async def test_deleted_or_corrupt_blocks_are_missing(space: Namespace, inc: Incarnation) -> None:
    await space.redis.hset(space.key("blocks:aa"), f"{A:016x}", "spoilt")
    await space.redis.set(space.key("blocks:bb"), "spoilt")
    await space.redis.delete(space.key("blocks:cc"))
    assert await missing(space, inc, (A, DEVICE), (B, DEVICE), (C, HOST)) == 3


async def test_a_block_in_another_tier_or_of_another_owner_is_missing(
    space: Namespace, inc: Incarnation
) -> None:
    assert await missing(space, inc, (A, HOST), (B, DEVICE)) == 1
    await space.redis.hset(space.key("blocks:aa"), f"{A:016x}", "11d2d")
    assert await missing(space, inc, (A, DEVICE)) == 1
    await space.redis.hset(space.key("blocks:aa"), f"{A:016x}", "1d11d")
    assert await missing(space, inc, (A, DEVICE)) == 0
    await space.redis.hset(space.key("blocks:aa"), f"{A:016x}", "7d1d")
    assert await missing(space, inc, (A, DEVICE)) == 0


async def test_an_incarnation_that_may_not_publish_is_lost(
    space: Namespace, inc: Incarnation
) -> None:
    await space.redis.hdel(space.key("applied"), str(inc))
    assert await missing(space, inc, (A, DEVICE)) == -1


@pytest.mark.parametrize("mark", ["0 nonce-a", "7 nonce-a", "1 stranger", "spoilt", ""])
async def test_an_incarnation_with_another_batch_number_or_nonce_is_lost(
    space: Namespace, inc: Incarnation, mark: str
) -> None:
    await space.redis.hset(space.key("applied"), str(inc), mark)
    assert await missing(space, inc, (A, DEVICE)) == -1


async def test_an_incarnation_is_lost_if_the_layout_is(space: Namespace, inc: Incarnation) -> None:
    await space.redis.hset(space.key("shard"), "bucket_bits", "spoilt")
    assert await missing(space, inc) == -1
    await space.redis.delete(space.key("shard"))
    assert await missing(space, inc) == -1


async def test_blocks_are_missing_under_another_layout(space: Namespace, inc: Incarnation) -> None:
    await space.redis.hset(space.key("shard"), "bucket_bits", "12")
    assert await missing(space, inc, (A, DEVICE), (B, DEVICE)) == 2
