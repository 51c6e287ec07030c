import pytest

from app.core.loads import Reservation
from tests.lua.conftest import A


@pytest.mark.oldest_too
async def test_a_retired_worker_is_gone_at_once(space, a, b):
    await space.hold(a, [A])
    assert await space.retire("a", a)
    assert set((await space.loads()).loads) == {b}
    assert await space.match([A]) == [{}]
    assert await space.get("current", "a:0") is None
    assert (await space.reserve(a, "r1")).reason == "lapsed"


async def test_a_retired_worker_s_reservations_are_dropped(space, a, b):
    await space.reserve(a, "r1")
    await space.reserve(a, "r2")
    await space.reserve(b, "r3")
    # Reserved again on b, though its record on a is left.
    await space.reserve(a, "r4")
    await space.redis.hdel(space.key("reservations"), "r4")
    await space.reserve(b, "r4")
    assert await space.retire("a", a)
    assert set(await space.redis.hkeys(space.key("reservations"))) == {b"r3", b"r4"}
    assert set(await space.redis.zrange(space.key("expiry"), 0, -1)) == {b"r3", b"r4"}
    assert not await space.redis.exists(space.keys[f"requests:{a}"], space.keys[f"prefills:{a}"])
    assert not await space.prefill_complete("r1")
    assert not await space.release("r2")


@pytest.mark.parametrize("how", ["stop", "lapse", "replace"])
async def test_what_sources_owe_ends_with_the_targets_that_end(space, a, b, how):
    source = Reservation(
        "", prefill_tokens=90, prefill_us=9_000_000, blocks=9, incarnation=b, max_requests=8
    )
    await space.reserve(a, "r1", source=source)
    await space.reserve(a, "computed", source=source)
    await space.prefill_complete("computed", of_source=True)
    if how == "stop":
        assert await space.retire("a", a)
    elif how == "lapse":
        await space.redis.zadd(space.keys["leases"], {str(a): 1})
        assert await space.retire_lapsed() == 1
    else:
        await space.worker("a", nonce="another process")
    # What is computed is kept until its lease ends, whoever wanted it.
    left = await space.load(b)
    assert (left.blocks, left.requests, left.prefill_tokens, left.prefill_us) == (9, 0, 0, 0)
    assert await space.redis.hkeys(space.key("reservations")) == [b"computed source"]


async def test_a_retired_worker_s_blocks_are_left_to_the_sweep(space, inc):
    await space.hold(inc, [A])
    assert await space.retire("a", inc)
    assert await space.owners(A) == "1d"
    assert await space.lost() == [inc]


async def test_retiring_twice_does_nothing_the_second_time(space, inc):
    assert await space.retire("a", inc)
    assert not await space.retire("a", inc)


async def test_another_process_cannot_retire_an_incarnation(space, inc):
    assert not await space.retire("a", inc, nonce="stranger")
    assert set((await space.loads()).loads) == {inc}


async def test_retiring_a_replaced_incarnation_keeps_its_successor(space):
    old = await space.worker("a", nonce="first")
    new = await space.worker("a", nonce="second")
    assert not await space.retire("a", old)
    assert await space.get("current", "a:0") == str(new)


async def test_retiring_a_staged_incarnation_keeps_the_one_that_serves(space):
    old = await space.worker("a")
    staged = await space.worker("a", resync=True)
    assert await space.retire("a", staged)
    assert await space.get("current", "a:0") == str(old)
    assert set((await space.loads()).loads) == {old}
