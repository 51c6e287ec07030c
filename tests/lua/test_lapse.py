from __future__ import annotations

import pytest

from app.core.loads import Reservation, Wish
from app.core.types import Incarnation
from app.state import leases
from tests.lua.conftest import LONG_MS, NO_LOAD, A, Namespace


async def test_a_call_held_up_in_a_hung_redis_retires_nobody(space: Namespace) -> None:
    inc = await space.worker("a")
    heard_ms = await space.now_ms()
    assert await space.do(leases.lapse(space.keys, 0, heard_ms + 2 * LONG_MS)) == 0
    await space.redis.zadd(space.keys["leases"], {str(inc): heard_ms + 50})
    await space.until_lease_lapses(inc)
    assert await space.do(leases.lapse(space.keys, 0, heard_ms)) == 0
    assert await space.lapse() == 1


@pytest.mark.oldest_too
async def test_an_incarnation_whose_lease_lapsed_is_retired(space: Namespace) -> None:
    a, b = await space.worker("a", ttl_ms=1), await space.worker("b")
    await space.hold(a, [A])
    await space.hold(b, [A])
    await space.until_lease_lapses(a)
    assert await space.lapse() == 1
    assert await space.get("current", "a:0") is None
    assert await space.get("current", "b:0") == str(b)
    assert await space.lost() == [a]
    assert (await space.loads()).loads == {b: NO_LOAD}
    assert await space.lapse() == 0


async def test_reservations_on_a_lapsed_worker_are_dropped(space: Namespace) -> None:
    inc = await space.worker("a")
    await space.reserve(inc, "r1")
    await space.renew(inc, ttl_ms=1)
    await space.until_lease_lapses(inc)
    assert await space.lapse() == 1
    assert not await space.release("r1")
    keys = [f"requests:{inc}", f"prefills:{inc}", "reservations", "expiry", "load"]
    assert not await space.redis.exists(*(space.key(key) for key in keys))


async def test_a_lapsed_staged_incarnation_leaves_its_worker_serving(
    space: Namespace,
) -> None:
    serving = await space.worker("a")
    staged = await space.worker("a", resync=True, ttl_ms=1)
    await space.until_lease_lapses(staged)
    assert await space.lapse() == 1
    assert await space.get("current", "a:0") == str(serving)
    assert set((await space.loads()).loads) == {serving}


async def test_a_step_retires_at_most_sixteen_incarnations(space: Namespace) -> None:
    for i in range(20):
        last = await space.worker(f"w{i}", ttl_ms=1)
    await space.until_lease_lapses(last)
    assert await space.lapse() == 16
    assert await space.lapse() == 4
    assert await space.lapse() == 0


async def test_a_step_retires_no_more_once_it_has_dropped_hundreds_of_requests(
    space: Namespace,
) -> None:
    for worker in "abc":
        inc = await space.worker(worker)
        await space.reserve_all(
            *(Wish(inc, Reservation(f"{worker}{i}", 1, 1, 1), 256, None) for i in range(256))
        )
        await space.renew(inc, ttl_ms=1)
    await space.until_lease_lapses(inc)
    assert await space.lapse() == 2
    assert await space.redis.hlen(space.key("reservations")) == 256
    assert await space.lapse() == 1


async def test_a_lease_that_ends_later_than_its_worker_asks_for_is_lowered(
    space: Namespace,
) -> None:
    inc = await space.worker("a", ttl_ms=5_000)
    soon = await space.expires_ms("leases", inc) - 2_000
    await space.redis.zadd(space.key("leases"), {str(inc): soon})
    assert await space.lapse(grace_ms=1000) == 0
    assert await space.expires_ms("leases", inc) == soon
    for far in (9e15, float("inf")):
        await space.redis.zadd(space.key("leases"), {str(inc): far})
        assert await space.lapse(grace_ms=1000) == 0
        left_ms = await space.expires_ms("leases", inc) - await space.now_ms()
        assert 3_000 < left_ms <= 5_000


@pytest.mark.parametrize("entry", ["spoilt", "", "5", "[]", '{"lease_ttl_ms": "x"}'])
async def test_a_lease_of_unreadable_length_lapses_now(space: Namespace, entry: str) -> None:
    inc = await space.worker("a")
    await space.redis.hset(space.key("workers"), str(inc), entry)
    assert await space.lapse(grace_ms=1000) == 0
    assert await space.expires_ms("leases", inc) <= await space.now_ms()
    # A heartbeat restores both.
    assert await space.renew(inc)
    assert await space.redis.hget(space.key("workers"), str(inc)) != entry.encode()
    assert await space.expires_ms("leases", inc) > await space.now_ms()


@pytest.mark.parametrize("name", ["workers", "writers", "load"])
async def test_an_incarnation_without_a_lease_is_retired_unless_it_renews(
    space: Namespace, name: str
) -> None:
    inc = await space.worker("a")
    await space.redis.hset(space.key(name), "77", "junk")
    await space.redis.hset(space.key(name), "junk", "7")
    await space.redis.delete(space.key("leases"))
    for _ in range(2):
        assert await space.lapse(grace_ms=LONG_MS) == 0
    assert await space.redis.zcard(space.key("leases")) == 3
    assert await space.renew(inc)
    await space.until_lease_lapses(Incarnation(77))
    assert await space.lapse() == 2
    assert await space.redis.hkeys(space.key(name)) == [b"1"]


async def test_a_current_entry_whose_number_is_not_its_worker_s_is_dropped(
    space: Namespace,
) -> None:
    inc, unreadable = await space.worker("a"), await space.worker("b")
    await space.redis.hset(space.key("workers"), str(unreadable), "spoilt")
    await space.redis.hset(space.key("current"), mapping={"x:0": "77", "y:0": "1"})
    await space.lapse(grace_ms=LONG_MS)
    assert await space.redis.hgetall(space.key("current")) == {
        b"a:0": b"%d" % inc,
        b"b:0": b"%d" % unreadable,
    }


async def test_requests_of_another_type_do_not_prevent_retirement(space: Namespace) -> None:
    inc = await space.worker("a", ttl_ms=1)
    await space.until_lease_lapses(inc)
    await space.redis.set(space.keys[f"requests:{inc}"], "spoilt")
    assert await space.lapse() == 1
    assert not await space.redis.exists(space.keys[f"requests:{inc}"])
