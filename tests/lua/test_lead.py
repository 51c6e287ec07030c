import asyncio

import pytest

from app.state import planner
from app.state.planner import Leadership


async def lead(space, holder, ttl_ms=60_000):
    return await space.do(planner.lead(space.keys, holder, ttl_ms))


@pytest.mark.oldest_too
async def test_one_leads_until_its_lease_ends_or_it_leaves(space):
    first = await lead(space, "a")
    assert await lead(space, "b") == Leadership(0, {}, "a")
    assert await lead(space, "a") == first
    assert await lead(space, "a", ttl_ms=0) == first
    assert (await lead(space, "b")).token > first.token


async def test_the_token_grows_with_each_new_leader_even_if_redis_has_lost_all(space):
    tokens = []
    for holder in ("a", "b", "a"):
        tokens.append((await lead(space, holder, ttl_ms=0)).token)
    await asyncio.sleep(0.01)
    await space.redis.flushall()
    tokens.append((await lead(space, "b")).token)
    assert tokens == sorted(set(tokens))


@pytest.mark.parametrize("holder", ["a", "b"])
@pytest.mark.parametrize("bad", ["abc", "-1", "1e300", "nan", ""])
async def test_a_bad_token_or_end_of_a_lease_stops_nobody(space, bad, holder):
    for field in ("token", "until_ms"):
        await lead(space, "a", ttl_ms=0)
        await space.redis.hset(space.keys["planner"], field, bad)
        token = (await lead(space, holder)).token
        assert token > 0
        assert await space.do(planner.propose(space.keys, token, {}, {"desired": 1}))
        await lead(space, holder, ttl_ms=0)


async def test_a_lease_that_ends_later_than_any_planner_asks_for_is_none(space):
    await lead(space, "a")
    await space.redis.hset(space.keys["planner"], "until_ms", 1 << 50)
    assert (await lead(space, "b")).token > 0


async def test_who_leads_next_is_told_what_the_last_leader_recorded(space):
    first = await lead(space, "a", ttl_ms=60_000)
    assert await space.do(planner.propose(space.keys, first.token, {"leaving": "w1"}))
    await lead(space, "a", ttl_ms=0)
    assert (await lead(space, "b")).state == {"leaving": "w1"}


async def test_a_state_that_somebody_has_damaged_is_none(space):
    for text in ("{", "[]", "7"):
        await space.redis.hset(space.keys["planner"], "state", text)
        assert (await lead(space, "a")).state == {}
