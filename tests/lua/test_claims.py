from __future__ import annotations

import pytest

from app.core.types import Incarnation, SequenceHash
from app.state import index
from app.state.index import FIRST_PLACE, Claims
from tests.lua.conftest import CROWD, DEVICE, DISK, HOST, A, B, C, D, Namespace


async def claims(
    space: Namespace, inc: Incarnation, first: int = 0, buckets: int = 256
) -> Claims | None:
    return await space.do(index.claims(space.shard, inc, (first, 0), buckets))


@pytest.mark.oldest_too
async def test_every_entry_of_an_incarnation_is_found(space: Namespace) -> None:
    a, b = await space.worker("a"), await space.worker("b")
    space.set_chain([A])
    space.set_chain([B])
    small = SequenceHash(5 << 56)
    space.set_chain([small])
    await space.apply(a, 1, [(A, DEVICE), (B, HOST), (small, DISK)])
    await space.apply(b, 1, [(A, HOST)])
    assert await claims(space, a) == Claims(
        8, FIRST_PLACE, [(5, DISK, small), (0xAA, DEVICE, A), (0xBB, HOST, B)]
    )
    assert await claims(space, b) == Claims(8, FIRST_PLACE, [(0xAA, HOST, A)])
    assert await claims(space, Incarnation(11)) == Claims(8, FIRST_PLACE, [])


async def test_a_step_searches_no_more_buckets_than_allowed(space: Namespace) -> None:
    inc = await space.worker("a", bucket_bits=4)
    blocks = [SequenceHash(n << 60) for n in range(16)]
    for block in blocks:
        space.set_chain([block])
    await space.hold(inc, blocks)
    first = await claims(space, inc, 0, 6)
    assert first is not None
    assert [bucket for bucket, _, _ in first.entries] == [0, 1, 2, 3, 4, 5]
    assert first.following == (6, 0)
    last = await claims(space, inc, 12, 6)
    assert last is not None
    assert [bucket for bucket, _, _ in last.entries] == [12, 13, 14, 15]
    assert last.following == FIRST_PLACE


async def test_a_large_bucket_takes_several_steps(space: Namespace) -> None:
    inc = await space.worker("a")
    for block in (*CROWD, B):
        space.set_chain([block])
    await space.hold(inc, [*CROWD, B])
    place, found = (0xA9, 0), []
    while place[0] <= 0xBB:
        step = await space.do(index.claims(space.shard, inc, place, 20))
        assert step is not None
        assert len(step.entries) < 1100
        place = step.following
        found += step.entries
    assert sorted(found) == sorted([(0xAA, DEVICE, block) for block in CROWD] + [(0xBB, DEVICE, B)])


async def test_a_start_past_the_last_bucket_means_the_first(space: Namespace) -> None:
    inc = await space.worker("a", bucket_bits=4)
    found = await claims(space, inc, 16, 5)
    assert found == Claims(4, (5, 0), [])


async def test_tampered_entries_of_an_incarnation_are_found(space: Namespace) -> None:
    inc = await space.worker("a")
    bucket = space.key("blocks:aa")
    await space.redis.hset(bucket, "junk", "1d")
    await space.redis.hset(bucket, f"{A:016x}", "1d1h")
    await space.redis.hset(bucket, f"{B:016x}", "1x")
    await space.redis.hset(bucket, f"{C:016x}", "001k")
    await space.redis.hset(bucket, f"{D:016x}", "11d201h")
    found = await claims(space, inc)
    assert found is not None
    assert set(found.entries) == {
        (0xAA, DEVICE, None),
        (0xAA, DEVICE, A),
        (0xAA, HOST, A),
        (0xAA, None, B),
        (0xAA, DISK, C),
    }


async def test_a_bucket_of_another_type_shows_nothing(space: Namespace) -> None:
    inc = await space.worker("a")
    await space.redis.set(space.key("blocks:aa"), "1d")
    assert await claims(space, inc) == Claims(8, FIRST_PLACE, [])


async def test_there_is_no_answer_without_a_layout(space: Namespace) -> None:
    inc = await space.worker("a")
    await space.redis.hset(space.key("shard"), "bucket_bits", "spoilt")
    assert await claims(space, inc) is None
    await space.redis.delete(space.key("shard"))
    assert await claims(space, inc) is None
