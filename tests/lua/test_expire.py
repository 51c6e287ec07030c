import pytest

from app.core.errors import RedisUnavailable
from app.core.loads import Load


@pytest.mark.oldest_too
async def test_an_expired_reservation_gives_everything_back(space, inc):
    await space.reserve(inc, "r1", tokens=100, us=5000, blocks=7)
    await space.reserve(inc, "r2", tokens=60, us=2000, blocks=4)
    await space.prefill_complete("r1")
    await space.backdate_expiry("r1", "r2")
    assert await space.expire() == 2
    load = await space.load(inc)
    assert load == Load(head_since_ms=load.head_since_ms, total=2)
    keys = [f"requests:{inc}", f"prefills:{inc}", "reservations", "expiry"]
    assert not await space.redis.exists(*(space.keys[key] for key in keys))


async def test_a_reservation_stays_until_it_expires(space, inc):
    await space.reserve(inc, "r2")
    await space.reserve(inc, "r1", ttl_ms=1)
    await space.until_reservation_expires("r1")
    assert await space.expire() == 1
    assert await space.expire() == 0
    assert (await space.load(inc)).requests == 1
    assert await space.release("r2")


async def test_no_more_than_the_limit_expire_in_one_step(space, inc):
    requests = ["r0", "r1", "r2", "r3", "r4"]
    for request_id in requests:
        await space.reserve(inc, request_id)
    await space.backdate_expiry(*requests)
    assert await space.expire(limit=2) == 2
    assert (await space.load(inc)).requests == 3
    assert await space.redis.zrange(space.keys["expiry"], 0, -1) == [b"r2", b"r3", b"r4"]
    assert await space.expire(limit=2) == 2
    assert await space.expire(limit=2) == 1
    assert await space.expire(limit=2) == 0
    assert (await space.load(inc)).requests == 0


async def test_a_reservation_expires_on_a_worker_whose_lease_lapsed(space, inc):
    await space.reserve(inc, "r1")
    await space.renew(inc, ttl_ms=1)
    await space.until_lease_lapses(inc)
    await space.backdate_expiry("r1")
    assert await space.expire() == 1
    assert await space.get("load", inc) is not None
    assert not await space.redis.exists(space.keys["reservations"])


async def test_a_redis_that_takes_no_writes_is_noticed_though_nothing_expires(space):
    assert await space.expire() == 0
    # As good as one that cannot save to disk; either may refuse writes for as long as it runs.
    await space.redis.replicaof("127.0.0.1", 1)
    try:
        with pytest.raises(RedisUnavailable, match="read only replica"):
            await space.expire()
    finally:
        await space.redis.replicaof("NO", "ONE")


async def test_a_reservation_expires_even_if_its_record_or_load_is_unreadable(space, inc):
    for request_id in ("r1", "r2"):
        await space.reserve(inc, request_id)
    await space.redis.hset(space.key("load"), str(inc), "spoilt")
    await space.redis.hset(space.keys[f"requests:{inc}"], "r2", "spoilt")
    await space.backdate_expiry("r1", "r2")
    assert await space.expire() == 2
    assert not await space.redis.exists(space.key("reservations"), space.key("expiry"))
    assert await space.renew(inc)
    assert (await space.load(inc)).requests == 0


async def test_what_is_left_of_a_request_ends_when_its_time_is_up(space, inc):
    for request_id in ("no record", "no reservation"):
        await space.reserve(inc, request_id)
    await space.redis.hdel(space.keys[f"requests:{inc}"], "no record")
    await space.redis.hdel(space.key("reservations"), "no reservation")
    await space.backdate_expiry("no record", "no reservation")
    assert await space.expire() == 2
    assert not await space.redis.exists(space.key("reservations"), space.key("expiry"))
    assert await space.renew(inc)
    assert (await space.load(inc)).requests == 0
