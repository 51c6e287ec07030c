import pytest

from app.state.leases import claim
from tests.eventually import eventually
from tests.lua.conftest import LONG_MS

SIX = ["1", "2", "3", "4", "5", "6"]


async def claimed(space, holder, ready=SIX, others=(), *, ttl_ms=LONG_MS, room=64, source="s"):
    call = claim(space.keys, source, holder, ready, others, ttl_ms=ttl_ms, room=room)
    return sorted((await space.do(call))[0])


@pytest.mark.oldest_too
async def test_processes_share_the_engines_and_each_has_one_agent(space):
    assert await claimed(space, "a") == SIX
    assert await claimed(space, "b") == []  # they are another's until that asks again
    assert await claimed(space, "a") == ["1", "2", "3"]
    assert await claimed(space, "b") == ["4", "5", "6"]
    assert await claimed(space, "c") == []
    assert await claimed(space, "b") == ["4", "5"]
    assert await claimed(space, "a") == ["1", "2"]
    assert await claimed(space, "c") == ["3", "6"]


async def test_those_of_a_process_that_leaves_are_free_at_once(space):
    assert await claimed(space, "a") == SIX
    assert await claimed(space, "b") == []
    assert await claimed(space, "a", ttl_ms=0) == []
    assert await claimed(space, "b") == SIX


async def test_those_of_a_process_that_is_silent_are_free_once_its_lease_has_ended(space):
    assert await claimed(space, "a", ttl_ms=50) == SIX

    async def of_b():
        return await claimed(space, "b")

    assert await eventually(of_b) == SIX
    assert await claimed(space, "a") == []


async def lapse(space, **holders):
    """As if their leases had ended so many ms ago."""
    seconds, _ = await space.redis.time()
    for holder, ms in holders.items():
        ended = seconds * 1000 - ms
        await space.redis.hset(space.keys["agents:"] + "s", f"agent {holder}", ended)


async def test_processes_that_all_come_late_keep_their_engines(space):
    for holder in "aba":
        await claimed(space, holder)
    assert await claimed(space, "b") == ["4", "5", "6"]
    await lapse(space, a=2, b=1)
    assert await claimed(space, "b") == ["4", "5", "6"]
    assert await claimed(space, "a") == ["1", "2", "3"]
    # b comes late once more, and a, to which it gave a lease, was not heard of.
    await lapse(space, a=1, b=1)
    assert await claimed(space, "b") == SIX


async def test_one_that_was_silent_before_another_came_too_late_has_no_lease(space):
    await claimed(space, "a")
    await claimed(space, "b")
    await lapse(space, a=LONG_MS + 1, b=1)
    assert await claimed(space, "b") == SIX


async def test_a_process_claims_no_more_than_it_has_room_for(space):
    assert await claimed(space, "a", room=4) == ["1", "2", "3", "4"]
    assert await claimed(space, "b") == ["5", "6"]


async def test_those_without_an_agent_are_told_once_all_may_claim_them(space):
    async def free(ready, others=(), room=4):
        call = claim(space.keys, "s", "a", ready, others, ttl_ms=LONG_MS, room=room)
        return sorted((await space.do(call))[1])

    assert await free(SIX[:4]) == []
    assert await free(SIX[:5]) == ["5"]
    assert await free(SIX[:4], ["5", "6"]) == []  # they are not ready
    assert await claimed(space, "b") == ["5", "6"]
    assert await free(SIX) == []


async def test_an_engine_that_is_not_ready_is_only_claimed_if_it_was_before(space):
    assert await claimed(space, "a", ["1"], ["2"]) == ["1"]
    assert await claimed(space, "a", [], ["1", "2"]) == ["1"]
    await claimed(space, "a", ttl_ms=0)
    assert await claimed(space, "b", [], ["1", "2"]) == ["1"]


async def test_an_engine_that_nobody_sees_any_more_is_forgotten(space):
    await claimed(space, "a")
    assert await claimed(space, "a", ["1"]) == ["1"]
    assert await claimed(space, "a", [], SIX) == ["1"]
    await claimed(space, "a", ttl_ms=0)
    await claimed(space, "b", ["2"])
    assert await claimed(space, "b", ["2"], ["1"]) == ["2"]


async def test_engines_that_only_another_process_sees_stay_its_own(space):
    await claimed(space, "a", ["1"])
    await claimed(space, "b", ["2"])
    assert await claimed(space, "a", ["1"]) == ["1"]


async def test_sources_are_apart(space):
    assert await claimed(space, "a") == SIX
    assert await claimed(space, "b", source="t") == SIX


@pytest.mark.parametrize("bad", ["abc", "-1", "1e300", ""])
async def test_a_lease_that_cannot_be_read_is_none(space, bad):
    await claimed(space, "a")
    await space.redis.hset(space.keys["agents:"] + "s", "agent a", bad)
    await space.redis.hset(space.keys["agents:"] + "s", "rubbish", bad)
    assert await claimed(space, "b") == SIX
