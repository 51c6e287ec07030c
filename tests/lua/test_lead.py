from __future__ import annotations

import asyncio

import pytest

from app.state import planner
from app.state.planner import Leadership
from tests.lua.conftest import Namespace


async def lead(space: Namespace, holder: str, ttl_ms: int = 60_000) -> Leadership:
    return await space.do(planner.lead(space.keys, holder, ttl_ms))


@pytest.mark.oldest_too
async def test_one_leads_until_its_lease_ends_or_it_leaves(space: Namespace) -> None:
    assert await lead(space, "a") == Leadership(1, {}, "a")
    assert (await lead(space, "b")).token == 0
    assert (await lead(space, "b")).holder == "a"
    assert (await lead(space, "a")).token == 1
    assert (await lead(space, "a", ttl_ms=0)).token == 1
    assert (await lead(space, "b")).token == 2


async def test_the_token_grows_with_each_new_leader(space: Namespace) -> None:
    for holder, token in (("a", 1), ("b", 2), ("a", 3)):
        assert (await lead(space, holder, ttl_ms=1)).token == token
        await asyncio.sleep(0.01)


async def test_who_leads_next_is_told_what_the_last_leader_recorded(space: Namespace) -> None:
    first = await lead(space, "a", ttl_ms=60_000)
    assert await space.do(planner.propose(space.keys, first.token, {"leaving": "w1"}))
    await lead(space, "a", ttl_ms=0)
    assert (await lead(space, "b")).state == {"leaving": "w1"}


async def test_a_state_that_somebody_has_damaged_is_none(space: Namespace) -> None:
    for text in ("{", "[]", "7"):
        await space.redis.hset(space.keys["planner"], "state", text)
        assert (await lead(space, "a")).state == {}
