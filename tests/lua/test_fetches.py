"""What targets are yet to fetch, from the script that reserves both workers until it is known to be
right."""

import pytest

from app.core.fetches import AHEAD_MS, Fetch
from app.core.loads import Reservation
from app.core.types import WorkerKey
from app.state import reservations
from tests.eventually import eventually

FETCH = Fetch(WorkerKey("p"), WorkerKey("d"), "500.5", "", 3, "7-f")


async def split(space, lease_ms=60_000, attempt="7-f"):
    """A request whose prompt p computes, for d."""
    p, d = await space.worker("p"), await space.worker("d")
    owes = {"lease_ms": lease_ms, "fetch": FETCH, "incarnation": p, "max_requests": 8}
    computing = Reservation("", 9, 9, 9, attempt, **owes)
    assert not await space.reserve(d, "r", attempt=attempt, source=computing)


async def kept(space):
    """The attempts of what is outstanding."""
    attempts = await space.redis.zrange(space.keys["fetches"], 0, -1)
    assert {*attempts} == {*await space.redis.hkeys(space.keys["fetching"])}
    return [attempt.decode() for attempt in attempts]


@pytest.mark.oldest_too
async def test_routers_hear_of_a_fetch_shortly_before_its_lease_may_end(space):
    before_ms = await space.now_ms()
    await split(space, lease_ms=AHEAD_MS + 300)
    assert (await space.loads()).fetches == []

    async def told():
        return (await space.loads()).fetches

    [fetch] = await eventually(told)
    ends_ms = fetch.until_ms
    assert before_ms + AHEAD_MS + 300 <= ends_ms < await space.now_ms() + AHEAD_MS
    assert fetch == Fetch(FETCH.source, FETCH.target, "500.5", "", 3, "7-f", ends_ms)


async def test_nothing_is_noted_of_a_source_that_keeps_nothing_for_a_time(space):
    p, d = await space.worker("p"), await space.worker("d")
    await space.reserve(d, "r", source=Reservation("", 9, 9, 9, incarnation=p, max_requests=8))
    assert await kept(space) == []


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("lease_ms", [60_000, 0])
async def test_a_first_token_within_the_lease_shows_that_it_was_fetched(space, lease_ms, whole):
    await split(space, lease_ms)
    assert await kept(space) == ["7-f"]
    assert await space.prefill_complete("r", of_source=True)
    assert await (space.release("r", whole=True) if whole else space.prefill_complete("r"))
    assert await kept(space) == ([] if lease_ms else ["7-f"])


@pytest.mark.parametrize("asked", [False, True])
async def test_what_ends_without_an_answer_may_be_fetched_once_its_target_was_asked(space, asked):
    await split(space)
    if asked:
        assert await space.prefill_complete("r", of_source=True)
    assert await space.release("r")
    assert await kept(space) == (["7-f"] if asked else [])


async def test_what_expires_with_its_replica_stays(space):
    await split(space)
    await space.redis.zadd(space.keys["expiry"], {"r": 1, "r source": 1})
    assert await space.do(reservations.expire(space.keys, 9))
    assert await kept(space) == ["7-f"]


async def test_no_target_fetches_before_its_source_is_done(space):
    await split(space, lease_ms=0)
    [early] = (await space.loads()).fetches
    await eventually(space.now_ms, lambda now: now > early.until_ms + 20)
    assert await space.prefill_complete("r", of_source=True)
    [fetch] = (await space.loads()).fetches
    assert fetch.until_ms > early.until_ms + 20


async def test_what_is_settled_or_long_past_is_forgotten(space):
    await split(space, lease_ms=0)
    await split(space, attempt="8-f")
    for one in reservations.settle(space.keys, ["7-f"]):
        assert await space.do(one) == 1
    assert await kept(space) == ["8-f"]
    await space.redis.zadd(space.keys["fetches"], {"8-f": await space.now_ms() - 600_001})
    await split(space, attempt="9-f")
    assert await kept(space) == ["9-f"]
