import pytest

from app.core.types import SequenceHash
from app.state import index
from app.state.index import FIRST_PLACE, Audit, Change
from tests.lua.conftest import CROWD, DEVICE, DISK, HOST, A, B, C


async def audit(space, inc, *entries, nonce="nonce-a", seq=1, first=FIRST_PLACE, buckets=0):
    """An audit of `entries`, each of whose blocks begins a chain, and of so many buckets."""
    changes = [Change(block, tier, block) for block, tier in entries]
    return await space.do(index.audit(space.shard, inc, nonce, seq, changes, first, buckets))


async def missing(space, inc, *entries):
    """How many of `entries` are missing; None: the incarnation is lost."""
    found = await audit(space, inc, *entries)
    return found and found.missing


async def claims(space, inc, first=FIRST_PLACE, buckets=256, nonce="nonce-a"):
    return await audit(space, inc, nonce=nonce, first=first, buckets=buckets)


@pytest.fixture
async def inc(space):
    """Worker a, which holds three blocks that each begin a chain."""
    made = await space.worker("a")
    for block in (A, B, C):
        space.set_chain([block])
    assert await space.apply(made, 1, [(A, DEVICE), (B, DEVICE), (C, HOST)])
    return made


@pytest.mark.oldest_too
async def test_published_blocks_are_not_missing(space, inc):
    assert await missing(space, inc, (A, DEVICE), (B, DEVICE), (C, HOST)) == 0
    assert await missing(space, inc) == 0


async def test_deleted_or_corrupt_blocks_are_missing(space, inc):
    await space.redis.hset(space.key("blocks:aa"), f"{A:016x}", "spoilt")
    await space.redis.delete(space.key("blocks:cc"))
    assert await missing(space, inc, (A, DEVICE), (B, DEVICE), (C, HOST)) == 2


async def test_a_block_in_another_tier_or_of_another_owner_is_missing(space, inc):
    assert await missing(space, inc, (A, HOST), (B, DEVICE)) == 1
    await space.redis.hset(space.key("blocks:aa"), f"{A:016x}", "11d2d")
    assert await missing(space, inc, (A, DEVICE)) == 1
    await space.redis.hset(space.key("blocks:aa"), f"{A:016x}", "1d11d")
    assert await missing(space, inc, (A, DEVICE)) == 0
    await space.redis.hset(space.key("blocks:aa"), f"{A:016x}", "21d1d")
    assert await missing(space, inc, (A, DEVICE)) == 0


async def test_an_incarnation_that_may_not_publish_is_lost(space, inc):
    await space.redis.hdel(space.key("applied"), str(inc))
    assert await missing(space, inc, (A, DEVICE)) is None


@pytest.mark.parametrize("mark", ["0 nonce-a", "7 nonce-a", "1 stranger", "spoilt", ""])
async def test_an_incarnation_with_another_batch_number_or_nonce_is_lost(space, inc, mark):
    await space.redis.hset(space.key("applied"), str(inc), mark)
    assert await missing(space, inc, (A, DEVICE)) is None


async def test_an_incarnation_is_lost_if_the_layout_is(space, inc):
    await space.redis.hset(space.key("shard"), "bucket_bits", "spoilt")
    assert await missing(space, inc) is None
    await space.redis.delete(space.key("shard"))
    assert await missing(space, inc) is None


async def test_blocks_are_missing_under_another_layout(space, inc):
    await space.redis.hset(space.key("shard"), "bucket_bits", "12")
    assert await missing(space, inc, (A, DEVICE), (B, DEVICE)) == 2


async def test_both_questions_are_answered_by_one_call(space, inc):
    shown = [(0xAA, DEVICE, A), (0xBB, DEVICE, B), (0xCC, HOST, C)]
    assert await audit(space, inc, (A, HOST), (B, DEVICE), buckets=256) == Audit(
        1, 8, FIRST_PLACE, shown
    )


async def test_every_entry_of_an_incarnation_is_found_and_none_of_another(space, a, b):
    small = SequenceHash(5 << 56)
    for block in (A, B, small):
        space.set_chain([block])
    await space.apply(a, 1, [(A, DEVICE), (B, HOST), (small, DISK)])
    await space.apply(b, 1, [(A, HOST)])
    await space.redis.hset(space.key("blocks:cc"), f"{C:016x}", "11d21h")
    assert await claims(space, a) == Audit(
        0, 8, FIRST_PLACE, [(5, DISK, small), (0xAA, DEVICE, A), (0xBB, HOST, B)]
    )
    assert await claims(space, b, nonce="nonce-b") == Audit(0, 8, FIRST_PLACE, [(0xAA, HOST, A)])


async def test_a_step_searches_no_more_buckets_than_allowed(space):
    inc = await space.worker("a", bucket_bits=4)
    blocks = [SequenceHash(n << 60) for n in range(16)]
    for block in blocks:
        space.set_chain([block])
    await space.hold(inc, blocks)
    first = await claims(space, inc, (0, 0), 6)
    assert [bucket for bucket, _, _ in first.entries] == [0, 1, 2, 3, 4, 5]
    assert first.following == (6, 0)
    last = await claims(space, inc, (12, 0), 6)
    assert [bucket for bucket, _, _ in last.entries] == [12, 13, 14, 15]
    assert last.following == FIRST_PLACE


async def test_a_large_bucket_takes_several_steps(space):
    inc = await space.worker("a")
    for block in (*CROWD, B):
        space.set_chain([block])
    await space.hold(inc, [*CROWD, B])
    place, found = (0xA9, 0), []
    while place[0] <= 0xBB:
        step = await claims(space, inc, place, 20)
        assert len(step.entries) < 1100
        place = step.following
        found += step.entries
    assert sorted(found) == sorted([(0xAA, DEVICE, block) for block in CROWD] + [(0xBB, DEVICE, B)])


async def test_a_start_past_the_last_bucket_means_the_first(space):
    inc = await space.worker("a", bucket_bits=4)
    assert await space.apply(inc, 1, [])
    assert await claims(space, inc, (16, 0), 5) == Audit(0, 4, (5, 0), [])


async def test_entries_that_nobody_published_are_found(space, inc):
    await space.redis.hset(space.key("blocks:aa"), "junk", "1d")
    await space.redis.hset(space.key("blocks:aa"), f"{A:016x}", "1d1h")
    await space.redis.hset(space.key("blocks:bb"), f"{B:016x}", "1x")
    assert set((await claims(space, inc)).entries) == {
        (0xAA, DEVICE, None),
        (0xAA, DEVICE, A),
        (0xAA, HOST, A),
        (0xBB, None, B),
        (0xCC, HOST, C),
    }


@pytest.mark.parametrize(("back", "num_missing"), [(5, 0), (0, 1), (6, 1), (-5, 1)])
async def test_a_block_of_which_is_shown_that_its_engine_goes_on_elsewhere_is_missing(
    space, back, num_missing
):
    inc = await space.worker("a")
    shown = [Change(A, DEVICE, A, 5), Change(B, DEVICE, B)]
    assert await space.do(index.apply(space.shard, inc, "nonce-a", 1, shown))
    published = [Change(A, DEVICE, A, back), Change(B, DEVICE, B)]
    found = await space.do(index.audit(space.shard, inc, "nonce-a", 1, published, FIRST_PLACE, 256))
    assert found.missing == num_missing
    assert {block for _, _, block in found.entries} == {A, B}
