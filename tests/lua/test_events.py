"""What scripts tell of what they did."""

from app.core.types import WorkerKey
from app.state import events, leases, planner, replicas

A = WorkerKey("a")


async def told(space):
    found = await events.read(space.redis, space.keys, "", 100)
    return [(event.kind, event.subject) for event in reversed(found)]


async def test_a_workers_life_is_told(space, inc):
    for undo in (False, False, True):
        await space.do(leases.drain(space.keys, A, undo=undo))
    again = await space.register("a", resync=True)
    await space.activate("a", again.incarnation)
    await space.retire("a", again.incarnation)
    assert inc != again.incarnation
    assert await told(space) == [
        ("joined", "a:0"),
        ("drain", "a:0"),
        ("undrain", "a:0"),
        ("resynced", "a:0"),
        ("left", "a:0"),
    ]


async def test_a_worker_that_fails_and_dies_is_told(space, inc):
    await space.worker("b")
    await space.reserve(inc, "r1")
    await space.suspend("r1")
    await space.retire_lapsed()
    found = await events.read(space.redis, space.keys, "", 2)
    assert [(e.kind, e.subject, e.text) for e in found] == [
        ("lost", "a:0", "1 requests were on it"),
        ("suspended", "a:0", "it failed r1: broken"),
    ]


async def test_a_proposal_is_told_if_it_is_another_one(space):
    leader = await space.do(planner.lead(space.keys, "p", 60_000))
    for desired in (2, 2, 3):
        shown = {"desired": desired, "reason": "queues"}
        assert await space.do(planner.propose(space.keys, leader.token, {}, {}, shown))
    found = await events.read(space.redis, space.keys, "", 10)
    assert [e.text for e in found] == ["3 workers: queues", "2 workers: queues"]


async def test_replicas_that_come_and_go_are_told(space):
    await space.redis.hset(space.keys["replicas"], "old", "1 {}")
    for figures in ({}, {}, None, None):
        await space.do(replicas.beat(space.keys, "new", figures))
    assert await told(space) == [
        ("replica_joined", "new"),
        ("replica_lost", "old"),
        ("replica_left", "new"),
    ]


async def test_what_happened_later_can_be_asked_for(space):
    await space.do(events.record(space.keys, "redis_away", "r", "1"))
    [first] = await events.read(space.redis, space.keys, "", 10)
    await space.do(events.record(space.keys, "redis_away", "r", "2"))
    assert [e.text for e in await events.read(space.redis, space.keys, first.id, 10)] == ["2"]


async def test_a_key_of_another_type_stops_nothing(space):
    await space.redis.set(space.keys["events"], "spoilt")
    inc = await space.worker("a")
    assert await space.do(leases.drain(space.keys, A)) == 0
    await space.retire("a", inc)
