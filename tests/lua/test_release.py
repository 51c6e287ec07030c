import pytest

from app.core.loads import Load
from app.state.reservations import Release
from tests.eventually import eventually


@pytest.mark.oldest_too
async def test_a_release_before_the_first_token_gives_everything_back(space, inc):
    await space.reserve(inc, "r1", tokens=100, us=5000, blocks=7)
    assert await space.release("r1")
    load = await space.load(inc)
    assert load == Load(head_since_ms=load.head_since_ms, total=1)


async def test_a_release_while_decoding_gives_everything_back(space, inc):
    await space.reserve(inc, "r1", tokens=100, us=5000, blocks=7)
    await space.prefill_complete("r1")
    assert await space.release("r1")
    load = await space.load(inc)
    assert load == Load(head_since_ms=load.head_since_ms, total=1)


async def test_a_released_request_leaves_no_key(space, inc):
    await space.reserve(inc, "r1")
    await space.release("r1")
    keys = [f"requests:{inc}", f"prefills:{inc}", "reservations", "expiry"]
    assert not await space.redis.exists(*(space.keys[key] for key in keys))


async def test_a_repeated_release_changes_nothing(space, inc):
    await space.reserve(inc, "r1")
    await space.reserve(inc, "r2")
    assert await space.release("r1")
    before = await space.contents()
    assert not await space.release("r1")
    assert await space.contents() == before


async def test_a_release_leaves_the_other_reservations_alone(space, inc):
    await space.reserve(inc, "r1", tokens=100, us=5000, blocks=7)
    await space.reserve(inc, "r2", tokens=60, us=2000, blocks=4)
    await space.reserve(inc, "r3", tokens=30, us=1000, blocks=2)
    await space.prefill_complete("r3")
    await space.release("r1")
    load = await space.load(inc)
    assert (load.prefill_tokens, load.prefill_us, load.head_us) == (60, 2000, 2000)
    assert (load.blocks, load.requests, load.decoding, load.total) == (6, 2, 1, 3)


async def test_releasing_a_queued_prefill_leaves_the_head_alone(space, inc):
    await space.reserve(inc, "r1", us=5000)
    await space.reserve(inc, "r2", us=2000)
    before = await space.load(inc)
    await eventually(space.now_ms, lambda now: now > before.head_since_ms)
    await space.release("r2")
    load = await space.load(inc)
    assert (load.prefill_us, load.head_us) == (5000, 5000)
    assert load.head_since_ms == before.head_since_ms


async def test_an_unknown_request_cannot_be_released(space):
    await space.worker("a")
    assert not await space.release("r1")


async def test_a_release_that_names_an_attempt_releases_only_that_attempt(space, inc):
    """A router that gives up an attempt does not release the next attempt's reservation."""
    await space.reserve(inc, "r1", attempt="x-1")
    await space.reserve(inc, "r1", attempt="y-1")
    assert not await space.release("r1", "x-1")
    assert (await space.load(inc)).requests == 1
    await space.prefill_complete("r1")
    assert not await space.release("r1", "x-1")
    assert await space.release("r1", "y-1")
    assert (await space.load(inc)).requests == 0


async def test_a_release_without_an_attempt_releases_any(space, inc):
    await space.reserve(inc, "r1", attempt="x-1")
    assert await space.release("r1")
    assert not await space.release("r1", "x-1")


async def test_a_release_and_a_heartbeat_leave_nothing_of_a_damaged_reservation(space):
    inc, other = await space.worker("a"), await space.worker("b")
    for request_id in ("r1", "r2", "r3", "r4"):
        await space.reserve(inc, request_id, blocks=7)
    await space.redis.hdel(space.key("reservations"), "r1")
    await space.redis.hset(space.key("reservations"), "r2", str(other))
    await space.redis.zrem(space.key("expiry"), "r3")
    await space.redis.hset(space.keys[f"requests:{inc}"], "r4", "spoilt")
    for request_id in ("r1", "r2", "r3", "r4"):
        assert await space.release(request_id, "-")
        assert not await space.release(request_id, "-")
    assert await space.renew(inc)
    load = await space.load(inc)
    assert (load.prefill_tokens, load.blocks, load.requests) == (0, 0, 0)
    assert (await space.load(other)).requests == 0
    keys = [f"requests:{inc}", f"prefills:{inc}", "reservations", "expiry"]
    assert not await space.redis.exists(*(space.keys[key] for key in keys))


async def test_a_load_that_falls_below_zero_is_recounted(space, inc):
    await space.reserve(inc, "r1", tokens=100, us=5000, blocks=7)
    await space.redis.hset(space.key("load"), str(inc), "50 0 0 0 1 1 0 1")
    assert await space.release("r1")
    assert (await space.loads()).loads == {}, "the worker is not routed to meanwhile"
    assert await space.renew(inc)
    assert (await space.load(inc)).prefill_tokens == 0


async def test_a_late_release_leaves_a_newer_reservation_alone(space, inc):
    await space.reserve(inc, "r1", attempt="1000-aa")
    before = await space.contents()
    assert not await space.release("r1", began_by_ms=999)
    assert await space.contents() == before
    assert not await space.release("r2", began_by_ms=1000)
    assert await space.release("r1", began_by_ms=1000)
    await space.reserve(inc, "r2")
    await space.redis.zrem(space.key("expiry"), "r2")
    assert await space.release("r2", began_by_ms=1000), "nobody knows when that one began"
    assert (await space.load(inc)).requests == 0


async def test_a_reservation_is_released_by_its_own_id_and_nobody_elses(space, inc):
    await space.reserve(inc, "r1", attempt="1000-aa")
    await space.reserve(inc, "r1", attempt="1000-bb")
    before = await space.contents()
    assert not await space.release("r1~cc")
    assert await space.contents() == before
    assert await space.release("r1~aa")
    assert not await space.release("r1~aa")
    # Although the request id is free again, it does not name the reservation that is left.
    assert not await space.release("r1")
    assert await space.release("r1~bb")
    assert (await space.load(inc)).requests == 0


async def test_a_request_id_that_was_given_out_again_is_not_released_by_the_first_ones_reservation(
    space,
):
    inc = await space.worker("a")
    await space.reserve(inc, "r1", attempt="1000-aa")
    assert await space.release("r1~aa")
    await space.reserve(inc, "r1", attempt="2000-bb")
    assert not await space.release("r1~aa")
    assert await space.release("r1~bb")


async def test_one_call_releases_each_by_itself(space):
    inc, other = await space.worker("w1"), await space.worker("w2")
    await space.reserve(inc, "r1", tokens=100, blocks=7, attempt="1-aa")
    await space.reserve(inc, "r2", tokens=30, blocks=2, attempt="2-bb")
    await space.reserve(other, "r3", attempt="3-cc")
    await space.prefill_complete("r2")
    released = await space.release_all(
        Release("r1", "another"), Release("r2"), Release("gone"), Release("r2"), Release("r3")
    )
    assert released == [None, "-", None, None, "3-cc"]
    load = await space.load(inc)
    assert (load.requests, load.decoding, load.prefill_tokens, load.blocks) == (1, 0, 100, 7)
    assert await space.release_all(Release("r1"), Release("r1")) == ["1-aa", None]
