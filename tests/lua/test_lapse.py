from __future__ import annotations

import pytest

from app.core import leases
from app.core.types import Incarnation
from tests.lua.conftest import LONG_MS, NO_LOAD, A, Namespace


async def test_what_waited_in_a_redis_that_hung_retires_nobody(space: Namespace) -> None:
    inc = await space.worker("a")
    heard_ms = await space.now_ms()
    assert await space.do(leases.lapse(space.keys, 0, heard_ms + 2 * LONG_MS)) == 0
    await space.redis.zadd(space.keys["leases"], {str(inc): heard_ms + 50})
    await space.until_lease_lapses(inc)
    assert await space.do(leases.lapse(space.keys, 0, heard_ms)) == 0
    assert await space.lapse() == 1


async def test_a_lapsed_lease_is_retired(space: Namespace) -> None:
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


async def test_a_lapsed_incarnation_that_was_staged_does_not_take_the_worker_along(
    space: Namespace,
) -> None:
    serving = await space.worker("a")
    staged = await space.worker("a", resync=True, ttl_ms=1)
    await space.until_lease_lapses(staged)
    assert await space.lapse() == 1
    assert await space.get("current", "a:0") == str(serving)
    assert set((await space.loads()).loads) == {serving}


async def test_a_step_retires_no_more_than_sixteen(space: Namespace) -> None:
    for i in range(20):
        last = await space.worker(f"w{i}", ttl_ms=1)
    await space.until_lease_lapses(last)
    assert await space.lapse() == 16
    assert await space.lapse() == 4
    assert await space.lapse() == 0


async def test_a_lease_that_ends_later_than_its_worker_asks_for_is_brought_down(
    space: Namespace,
) -> None:
    inc = await space.worker("a", ttl_ms=5_000)
    kept = await space.expires_ms("leases", inc)
    assert await space.lapse(grace_ms=1000) == 0
    assert await space.expires_ms("leases", inc) == kept
    for far in (9e15, float("inf")):
        await space.redis.zadd(space.key("leases"), {str(inc): far})
        assert await space.lapse(grace_ms=1000) == 0
        left_ms = await space.expires_ms("leases", inc) - await space.now_ms()
        assert 3_000 < left_ms <= 5_000


@pytest.mark.parametrize("entry", ["spoilt", "", "5", "[]", '{"lease_ttl_ms": "x"}'])
async def test_where_nothing_says_how_long_it_lapses_now(space: Namespace, entry: str) -> None:
    inc = await space.worker("a")
    await space.redis.hset(space.key("workers"), str(inc), entry)
    assert await space.lapse(grace_ms=1000) == 0
    assert await space.expires_ms("leases", inc) <= await space.now_ms()
    assert await space.renew(inc), "its heartbeat sets both right"


@pytest.mark.parametrize("name", ["workers", "writers", "load"])
async def test_who_has_no_lease_is_retired_unless_he_renews_it(space: Namespace, name: str) -> None:
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


async def test_who_is_routed_to_under_a_number_that_is_not_his_is_dropped(space: Namespace) -> None:
    inc, unread = await space.worker("a"), await space.worker("b")
    await space.redis.hset(space.key("workers"), str(unread), "spoilt")
    await space.redis.hset(space.key("current"), mapping={"x:0": "77", "y:0": "1"})
    await space.lapse(grace_ms=LONG_MS)
    assert await space.redis.hgetall(space.key("current")) == {
        b"a:0": b"%d" % inc,
        b"b:0": b"%d" % unread,
    }


async def test_requests_that_became_something_else_hinder_nobody(space: Namespace) -> None:
    inc = await space.worker("a", ttl_ms=1)
    await space.until_lease_lapses(inc)
    await space.redis.set(space.keys[f"requests:{inc}"], "spoilt")
    assert await space.lapse() == 1
    assert not await space.redis.exists(space.keys[f"requests:{inc}"])
