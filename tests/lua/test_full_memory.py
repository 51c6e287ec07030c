"""What still works once the memory of Redis is full."""

import pytest

from app.core.errors import RedisFull
from app.core.types import Incarnation
from app.state import decisions, index, planner
from app.state.index import Change
from app.state.predictions import PredictionSettings
from tests.lua.conftest import DEVICE, HOST, LONG_MS, A, B, C, ticket
from tests.state.test_decisions import record

MINUTE = PredictionSettings(lifetime_s=60, max_entries=100)


@pytest.fixture
async def full(space):
    """A Redis whose memory is full, with a worker that holds a chain and has a request."""
    inc = await space.worker("a")
    await space.hold(inc, [A, B])
    await space.reserve(inc, "r1")
    await space.predict(inc, [A, B], MINUTE)
    await space.redis.config_set("maxmemory", 1)
    yield space
    await space.redis.config_set("maxmemory", 0)


async def test_a_batch_with_new_blocks_is_refused_as_a_whole(full):
    inc = Incarnation(1)
    before = await full.contents()
    with pytest.raises(RedisFull, match=r"apply: .*maxmemory"):
        await full.apply(inc, 2, [(C, DEVICE)])
    assert await full.contents() == before
    with pytest.raises(RedisFull, match="predict"):
        await full.predict(inc, [A] * 20, MINUTE)


async def test_a_batch_that_adds_no_entries_is_applied(full):
    changes = [Change(B, None, A), Change(A, HOST, A)]
    assert await full.do(
        index.apply(full.shard, Incarnation(1), "nonce-a", 2, changes, essential=True)
    )
    assert await full.owners(A) == "1h"
    assert await full.owners(B) is None


async def test_workers_and_requests_still_come_and_go(full):
    inc = Incarnation(1)
    await full.redis.zrem(full.key("leases"), str(inc))
    assert await full.retire_lapsed(grace_ms=LONG_MS) == 0
    assert await full.renew(inc)
    assert await full.reserve(inc, "r2") is None
    assert await full.prefill_complete("r1")
    assert await full.release("r1")
    assert await full.worker("b") == 2
    assert await full.suspend("r2") == inc
    assert await full.expire() == 0
    assert await full.prune(MINUTE) == 0
    assert await full.retire("a", inc)
    while (await full.sweep(max_buckets=64)).buckets_left:
        pass
    assert await full.owners(A) is None


async def test_no_decision_is_recorded_but_earlier_ones_stay(full):
    one = decisions.record(full.keys, record("r1", [A]), kept=100)
    await full.redis.config_set("maxmemory", 0)
    assert await full.do(one)
    await full.redis.config_set("maxmemory", 1)
    with pytest.raises(RedisFull, match="record"):
        await full.do(one)
    assert await full.redis.xlen(full.key("decisions")) == 1


async def test_a_planner_still_leads_and_proposes(full):
    token = (await full.do(planner.lead(full.keys, "a", LONG_MS))).token
    assert await full.do(planner.propose(full.keys, token, {"known": []}, {"desired": 1}))


async def test_requests_still_wait_and_have_turns_but_sessions_are_not_remembered(full):
    one, two = ticket("normal:a", "x", 1), ticket("normal:b", "x", 2)
    assert await full.wait("x", one, two) == 2
    assert await full.turns("x", 1) == [one.name]
    await full.leave(one, had_turn=True)
    assert await full.turns("x", 1) == [two.name]
    with pytest.raises(RedisFull, match="remember"):
        await full.remember("s", Incarnation(1))
