import pytest

from app.core.loads import Reservation
from app.state import leases
from tests.lua.conftest import LONG_MS, NO_LOAD, A


async def test_a_call_held_up_in_a_hung_redis_retires_nobody(space, inc):
    heard_ms = await space.now_ms()
    assert await space.do(leases.retire_lapsed(space.keys, 0, heard_ms + 2 * LONG_MS)) == 0
    await space.redis.zadd(space.keys["leases"], {str(inc): heard_ms + 50})
    await space.until_lease_lapses(inc)
    assert await space.do(leases.retire_lapsed(space.keys, 0, heard_ms)) == 0
    assert await space.retire_lapsed() == 1


@pytest.mark.oldest_too
async def test_an_incarnation_whose_lease_lapsed_is_retired(space):
    a, b = await space.worker("a", ttl_ms=1), await space.worker("b")
    await space.hold(a, [A])
    await space.hold(b, [A])
    await space.until_lease_lapses(a)
    assert await space.retire_lapsed() == 1
    assert await space.get("current", "a:0") is None
    assert await space.get("current", "b:0") == str(b)
    assert await space.lost() == [a]
    assert (await space.loads()).loads == {b: NO_LOAD}
    assert await space.retire_lapsed() == 0


async def test_reservations_on_a_lapsed_worker_are_dropped(space, inc):
    await space.reserve(inc, "r1")
    await space.renew(inc, ttl_ms=1)
    await space.until_lease_lapses(inc)
    assert await space.retire_lapsed() == 1
    assert not await space.release("r1")
    keys = [f"requests:{inc}", f"prefills:{inc}", "reservations", "expiry", "load"]
    assert not await space.redis.exists(*(space.key(key) for key in keys))


async def test_a_lapsed_staged_incarnation_leaves_its_worker_serving(space):
    serving = await space.worker("a")
    staged = await space.worker("a", resync=True, ttl_ms=1)
    await space.until_lease_lapses(staged)
    assert await space.retire_lapsed() == 1
    assert await space.get("current", "a:0") == str(serving)
    assert set((await space.loads()).loads) == {serving}


async def test_a_step_retires_at_most_sixteen_incarnations(space):
    for i in range(20):
        last = await space.worker(f"w{i}", ttl_ms=1)
    await space.until_lease_lapses(last)
    assert await space.retire_lapsed() == 16
    assert await space.retire_lapsed() == 4
    assert await space.retire_lapsed() == 0


async def test_a_step_retires_no_more_once_it_has_dropped_hundreds_of_requests(space):
    for worker in "abc":
        inc = await space.worker(worker)
        await space.reserve_all(
            *(
                Reservation(f"{worker}{i}", 1, 1, 1, incarnation=inc, max_requests=256)
                for i in range(256)
            )
        )
        await space.renew(inc, ttl_ms=1)
    await space.until_lease_lapses(inc)
    assert await space.retire_lapsed() == 2
    assert await space.redis.hlen(space.key("reservations")) == 256
    assert await space.retire_lapsed() == 1


@pytest.mark.parametrize("entry", ["spoilt", "", "5", "[]", '{"worker": 7}'])
async def test_an_incarnation_of_an_unknown_worker_is_retired_like_any_other(space, entry):
    inc = await space.worker("a", ttl_ms=1)
    await space.redis.hset(space.key("workers"), str(inc), entry)
    await space.until_lease_lapses(inc)
    assert await space.retire_lapsed() == 1
    assert not await space.redis.exists(space.key("workers"), space.key("leases"))
    assert await space.worker("a") == inc + 1


async def test_a_worker_that_has_another_incarnation_by_now_keeps_it(space):
    old = await space.worker("a", nonce="first")
    new = await space.worker("a", nonce="second")
    # As a failover may have it, which loses the last writes.
    await space.redis.zadd(space.key("leases"), {str(old): 1})
    assert await space.retire_lapsed() == 1
    assert await space.get("current", "a:0") == str(new)
