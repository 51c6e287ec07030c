import pytest

from app.core.types import Incarnation
from app.state import index
from tests.lua.conftest import A

ONE = Incarnation(1)


async def opened(space, inc, nonce="nonce-x", bits=8):
    return await space.do(index.open_shard(space.shard, Incarnation(inc), nonce, bits))


@pytest.mark.oldest_too
async def test_the_first_to_open_a_shard_sets_its_layout(space):
    before = await space.now_ms()
    assert await opened(space, 1, bits=6)
    assert await opened(space, 2, bits=9)
    assert await space.get("shard", "bucket_bits") == "6"
    assert before <= int(await space.get("shard", "swept_ms") or 0) <= await space.now_ms()


async def test_an_incarnation_may_publish_once_it_has_opened_the_shard(space):
    assert not await space.apply(ONE, 1, [], nonce="nonce-x")
    assert await opened(space, 1)
    assert await space.apply(ONE, 1, [], nonce="nonce-x")


async def test_opening_again_before_publishing_changes_nothing(space):
    assert await opened(space, 1)
    before = await space.contents()
    assert await opened(space, 1)
    assert await space.contents() == before


async def test_a_number_of_another_process_is_refused(space):
    assert await opened(space, 1, "nonce-x")
    assert not await opened(space, 1, "nonce-y")
    assert await space.get("applied", 1) == "0 nonce-x"
    await space.redis.hset(space.key("applied"), "1", "")
    assert not await opened(space, 1, "nonce-y")


async def test_a_number_under_which_the_same_process_has_published_is_refused(space):
    """Its next batch has number 1 again, and would be taken for one already applied."""
    assert await opened(space, 1)
    assert await space.apply(ONE, 1, [], nonce="nonce-x")
    assert not await opened(space, 1)


async def test_a_number_whose_entries_are_not_swept_yet_is_refused(space, inc):
    await space.hold(inc, [A])
    await space.retire("a", inc)
    await space.sweep(max_buckets=1)
    assert await space.redis.smembers(space.key("dead")) == {b"1"}
    assert not await opened(space, inc)
    while (await space.sweep()).buckets_left:
        pass
    assert await opened(space, inc)


async def test_an_invalid_layout_is_replaced(space):
    for bits in ("spoilt", "", "0", "25", "-3", "4.5", "0x8"):
        await space.redis.hset(space.key("shard"), "bucket_bits", bits)
        await space.redis.delete(space.key("applied"))
        assert await opened(space, 1)
        assert await space.get("shard", "bucket_bits") == "8", bits
