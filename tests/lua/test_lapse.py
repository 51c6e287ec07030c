from __future__ import annotations

from tests.lua.conftest import NO_LOAD, A, Namespace


async def test_a_lapsed_lease_is_retired(space: Namespace) -> None:
    a, b = await space.worker("a", ttl_ms=1), await space.worker("b")
    await space.hold(a, [A])
    await space.hold(b, [A])
    await space.lease_lapses(a)
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
    await space.lease_lapses(inc)
    assert await space.lapse() == 1
    assert not await space.release("r1")
    keys = [f"requests:{inc}", f"prefills:{inc}", "reservations", "expiry", "load"]
    assert not await space.redis.exists(*(space.key(key) for key in keys))


async def test_a_lapsed_incarnation_that_was_staged_does_not_take_the_worker_along(
    space: Namespace,
) -> None:
    serving = await space.worker("a")
    staged = await space.worker("a", resync=True, ttl_ms=1)
    await space.lease_lapses(staged)
    assert await space.lapse() == 1
    assert await space.get("current", "a:0") == str(serving)
    assert set((await space.loads()).loads) == {serving}


async def test_a_step_retires_no_more_than_sixteen(space: Namespace) -> None:
    for i in range(20):
        last = await space.worker(f"w{i}", ttl_ms=1)
    await space.lease_lapses(last)
    assert await space.lapse() == 16
    assert await space.lapse() == 4
    assert await space.lapse() == 0
