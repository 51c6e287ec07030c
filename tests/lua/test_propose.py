import asyncio

import pytest

from app.state import planner


async def lead(space, holder, ttl_ms=60_000):
    return (await space.do(planner.lead(space.keys, holder, ttl_ms))).token


@pytest.mark.oldest_too
async def test_the_leader_records_a_proposal_and_shows_some_of_it(space):
    token = await lead(space, "a")
    said = {"desired": 3, "at_s": 1.5}
    shown = {"desired": 3, "reason": "enough", "values": '{"w0":1.5}'}
    assert await space.do(planner.propose(space.keys, token, {}, said, shown))
    assert await planner.proposals(space.redis, space.keys, 5) == [said]
    assert await planner.values(space.redis, space.keys) == {"w0": 1.5}
    assert await space.redis.hget(space.keys["planner"], "reason") == b"enough"


async def test_who_has_been_followed_records_nothing(space):
    old = await lead(space, "a", ttl_ms=1)
    await asyncio.sleep(0.01)
    new = await lead(space, "b")
    assert not await space.do(planner.propose(space.keys, old, {"leaving": "w0"}, {"desired": 1}))
    assert await planner.proposals(space.redis, space.keys, 5) == []
    assert await space.do(planner.propose(space.keys, new, {}))


async def test_who_has_slept_through_its_lease_records_nothing(space):
    token = await lead(space, "a", ttl_ms=1)
    await asyncio.sleep(0.01)
    assert not await space.do(planner.propose(space.keys, token, {}, {"desired": 1}))


async def test_in_a_redis_that_has_lost_all_nobody_leads(space):
    token = await lead(space, "a")
    await space.redis.flushall()
    assert not await space.do(planner.propose(space.keys, token, {}, {"desired": 1}))
    assert await space.redis.keys("*") == []


async def test_entries_that_cannot_be_read_are_left_out(space):
    token = await lead(space, "a")
    await space.redis.xadd(space.keys["proposals"], {"proposal": "{"})
    await space.redis.xadd(space.keys["proposals"], {"other": "1"})
    assert await space.do(planner.propose(space.keys, token, {}, {"desired": 1}))
    assert await planner.proposals(space.redis, space.keys, 5) == [{"desired": 1}]
    await space.redis.hset(space.keys["planner"], "values", '{"w0": "x"}')
    assert await planner.values(space.redis, space.keys) == {}
