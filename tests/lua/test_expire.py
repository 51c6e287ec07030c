from __future__ import annotations

from app.core.reservations import Load
from tests.lua.conftest import Namespace


async def test_a_reservation_past_its_time_gives_everything_back(space: Namespace) -> None:
    inc = await space.worker("a")
    await space.reserve(inc, "r1", tokens=100, us=5000, blocks=7)
    await space.reserve(inc, "r2", tokens=60, us=2000, blocks=4)
    await space.prefill_complete("r1")
    await space.run_out("r1", "r2")
    assert await space.expire() == 2
    load = await space.load(inc)
    assert load == Load(head_since_ms=load.head_since_ms, total=2)
    keys = [f"requests:{inc}", f"prefills:{inc}", "reservations", "expiry"]
    assert not await space.redis.exists(*(space.keys[key] for key in keys))


async def test_a_reservation_within_its_time_stays(space: Namespace) -> None:
    inc = await space.worker("a")
    await space.reserve(inc, "r2")
    await space.reserve(inc, "r1", ttl_ms=1)
    await space.reservation_expires("r1")
    assert await space.expire() == 1
    assert await space.expire() == 0
    assert (await space.load(inc)).requests == 1
    assert await space.release("r2")


async def test_no_more_than_the_limit_expire_in_one_step(space: Namespace) -> None:
    inc = await space.worker("a")
    requests = ["r0", "r1", "r2", "r3", "r4"]
    for request_id in requests:
        await space.reserve(inc, request_id)
    await space.run_out(*requests)
    assert await space.expire(limit=2) == 2
    assert (await space.load(inc)).requests == 3
    assert await space.redis.zrange(space.keys["expiry"], 0, -1) == [b"r2", b"r3", b"r4"]
    assert await space.expire(limit=2) == 2
    assert await space.expire(limit=2) == 1
    assert await space.expire(limit=2) == 0
    assert (await space.load(inc)).requests == 0


async def test_a_reservation_expires_on_a_worker_whose_lease_lapsed(space: Namespace) -> None:
    inc = await space.worker("a")
    await space.reserve(inc, "r1")
    await space.renew(inc, ttl_ms=1)
    await space.lease_lapses(inc)
    await space.run_out("r1")
    assert await space.expire() == 1
    assert await space.get("load", inc) is not None
    assert not await space.redis.exists(space.keys["reservations"])
