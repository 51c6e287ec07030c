from dataclasses import replace

import pytest

from app.core.errors import WorkerReplaced
from app.core.types import WorkerKey
from app.core.verdicts import State
from app.state import leases
from tests.eventually import eventually
from tests.lua.conftest import BROKEN, LONG_MS, info

DAY_MS = 86_400_000


async def vouch(space, *incs, most_ms=DAY_MS):
    return await space.do(leases.vouch(space.keys, incs, most_ms=most_ms))


async def lapsed(space, name):
    """A worker whose agent has gone without a word."""
    inc = await space.worker(name)
    await space.redis.zadd(space.key("leases"), {str(inc): 1})
    return inc


@pytest.fixture
async def inc(space):
    return await lapsed(space, "a")


async def after(space, at_ms):
    await eventually(space.now_ms, lambda now: now > at_ms)


async def told(space, *kinds):
    entries = await space.redis.xrange(space.key("events"))
    return [(e[b"kind"], e[b"subject"]) for _, e in entries if e[b"kind"] in kinds]


@pytest.mark.oldest_too
async def test_a_worker_whose_engine_answers_stays_in_service_without_its_agent(space, a):
    await space.reserve(a, "r1")
    await space.redis.zadd(space.key("leases"), {str(a): await space.now_ms() + 500})
    assert await vouch(space, a) == [True]
    snapshot = await space.loads()
    assert (list(snapshot.loads), list(snapshot.away)) == ([a], [a])
    assert await space.reserve(a, "r2") is None
    assert (await space.load(a)).requests == 2


async def test_an_agent_that_has_its_lease_in_hand_needs_nobody(space):
    inc, short = await space.worker("a"), await space.worker("b", ttl_ms=LONG_MS)
    now_ms = await space.now_ms()
    await space.redis.zadd(space.key("leases"), {str(short): now_ms + 30_000})
    assert await vouch(space, inc, short) == [False, False]
    assert not (await space.loads()).away


async def test_a_full_worker_is_promised_no_more_while_its_agent_is_away(space, inc):
    await vouch(space, inc)
    assert await space.reserve(inc, "r1", max_requests=1) is None
    assert (await space.reserve(inc, "r2", max_requests=1)).reason == "full"


async def test_an_agent_that_is_back_renews_and_nothing_is_left_of_its_absence(space, inc):
    await space.reserve(inc, "r0")
    await vouch(space, inc)
    await space.reserve(inc, "r1")
    assert await space.renew(inc)
    snapshot = await space.loads()
    assert (list(snapshot.loads), snapshot.away) == ([inc], {})
    assert (await space.load(inc)).requests == 1
    assert await space.redis.hlen(space.key("verdicts")) == 0


async def test_an_agent_of_an_earlier_release_that_is_back_ends_the_absence_too(space, inc):
    """It renews the lease, and leaves the mark."""
    await vouch(space, inc)
    (since_ms,) = (await space.loads()).away.values()
    await space.redis.zadd(space.key("leases"), {str(inc): await space.now_ms() + 3500})
    await eventually(lambda: vouch(space, inc), lambda vouched: vouched == [True])
    assert (await space.loads()).away[inc] > since_ms + 2000


async def test_what_is_in_flight_goes_on_under_a_new_agent_beside_the_same_engine(space):
    old = await lapsed(space, "a")
    await vouch(space, old)
    await space.reserve(old, "r1")
    new = await space.worker("a", nonce="nonce-new")
    snapshot = await space.loads()
    assert (list(snapshot.loads), snapshot.away) == ([new], {})
    assert (await space.load(new)).requests == 1
    assert await space.get("reservations", "r1") == str(new)


async def test_a_new_agent_beside_another_engine_takes_over_no_requests(space):
    old = await lapsed(space, "a")
    await vouch(space, old)
    await space.reserve(old, "r1")
    moved = replace(info("a"), address="http://elsewhere:8081")
    registration = await space.do(leases.register(space.keys, moved, "n2", ttl_ms=LONG_MS))
    new = registration.incarnation
    assert await space.do(leases.activate(space.keys, WorkerKey("a"), new, "n2"))
    assert (await space.load(new)).requests == 0
    assert await space.get("reservations", "r1") is None


async def test_a_process_is_not_kept_out_by_one_that_is_away(space):
    mine = await space.worker("a", nonce="mine")
    other = await space.worker("a", nonce="other")
    await space.redis.zadd(space.key("leases"), {str(other): 1})
    await vouch(space, other)
    again = leases.register(space.keys, info("a"), "mine", ttl_ms=LONG_MS, previous=mine)
    assert (await space.do(again)).incarnation > other
    await space.renew(other, nonce="other")
    with pytest.raises(WorkerReplaced):
        await space.do(again)


async def test_one_that_said_goodbye_is_gone(space, inc):
    await vouch(space, inc)
    assert await space.retire("a", inc)
    assert await vouch(space, inc) == [False]
    assert not (await space.loads()).loads
    assert await space.redis.hlen(space.key("verdicts")) == 0


async def test_one_that_drains_gets_nothing_and_can_be_put_back(space, inc):
    await vouch(space, inc)
    await space.do(leases.drain(space.keys, WorkerKey("a")))
    assert await vouch(space, inc) == [True]
    snapshot = await space.loads()
    assert not snapshot.loads
    assert snapshot.lapsed == {inc}
    assert await space.retire_lapsed() == 0
    await space.do(leases.drain(space.keys, WorkerKey("a"), undo=True))
    await vouch(space, inc)
    assert list((await space.loads()).loads) == [inc]


async def test_one_that_fails_requests_is_left_alone_until_its_pause_is_over(space):
    a, _ = await space.worker("a"), await space.worker("b")
    await space.reserve(a, "r1")
    assert await space.suspend("r1", replace(BROKEN, pause_s=30.0)) == a
    await space.redis.zadd(space.key("leases"), {str(a): await space.now_ms() - 3001})
    assert await vouch(space, a) == [True]
    assert await vouch(space, a) == [True]
    assert (await space.loads()).lapsed == {a}
    assert await space.retire_lapsed() == 0


async def test_one_that_was_ill_when_its_agent_went_gets_one_request_at_a_time(space):
    inc, _ = await space.worker("a"), await space.worker("b")
    ill = replace(space.infos[inc], ill="stands still")
    renewal = leases.renew(space.keys, ill, inc, "nonce-a", ttl_ms=LONG_MS)
    assert (await space.do(renewal)).is_out
    assert await vouch(space, inc) == [False]
    await space.redis.zadd(space.key("leases"), {str(inc): await space.now_ms() - 3001})
    assert await vouch(space, inc) == [True]
    snapshot = await space.loads()
    assert inc in snapshot.loads
    assert snapshot.verdict(inc).state is State.TRIAL


async def test_nobody_vouches_for_a_worker_that_is_out_of_service_while_its_agent_renews(space):
    """It drains, is ill, or has failed requests: its agent leaves the lease lapsed."""
    ill, drained, failed, *_ = [await space.worker(name) for name in "abcdef"]
    told = replace(space.infos[ill], ill="stands still")
    await space.do(leases.renew(space.keys, told, ill, "nonce-a", ttl_ms=LONG_MS))
    await space.do(leases.drain(space.keys, WorkerKey("b")))
    await space.reserve(failed, "r1")
    assert await space.suspend("r1", replace(BROKEN, pause_s=30.0)) == failed
    assert await vouch(space, ill, drained, failed) == [False, False, False]
    await space.redis.zadd(space.key("leases"), {str(drained): await space.now_ms() - 3001})
    assert await space.renew(drained)
    assert await vouch(space, drained) == [False]
    snapshot = await space.loads()
    assert snapshot.lapsed == {ill, drained, failed}
    assert not snapshot.away


async def test_a_lease_that_has_just_lapsed_is_one_that_its_agent_missed(space):
    inc = await space.worker("a", ttl_ms=1)
    await space.until_lease_lapses(inc)
    assert await vouch(space, inc) == [True]


async def test_one_that_is_staged_is_not_vouched_for(space):
    await space.worker("a")
    staged = await space.worker("a", resync=True, ttl_ms=1)
    await space.until_lease_lapses(staged)
    assert await vouch(space, staged) == [False]


async def test_after_the_longest_absence_nobody_vouches_any_more(space, inc):
    assert await vouch(space, inc) == [True]
    await space.redis.zadd(space.key("leases"), {str(inc): 1})
    (since_ms,) = (await space.loads()).away.values()
    await after(space, since_ms)
    assert await vouch(space, inc, most_ms=1) == [False]
    assert await vouch(space, inc) == [True]


async def test_one_whose_engine_answers_no_more_is_kept_for_a_while_and_then_retired(space):
    away, never = await lapsed(space, "a"), await lapsed(space, "b")
    await vouch(space, away)
    await space.redis.zadd(space.key("leases"), {str(away): 1})
    assert await space.retire_lapsed() == 1
    assert await space.lost() == [never]
    now_ms = await space.now_ms()
    late = leases.retire_lapsed(space.keys, 0, now_ms, away_grace_ms=-3001)
    assert await space.do(late) == 1
    assert await space.redis.hlen(space.key("verdicts")) == 0


async def test_those_that_are_kept_hold_up_no_retirement(space):
    kept = [await lapsed(space, f"k{number}") for number in range(17)]
    assert all(await vouch(space, *kept))
    await space.redis.zadd(space.key("leases"), {str(inc): 1 for inc in kept})
    gone = await lapsed(space, "gone")
    assert await space.retire_lapsed() == 1
    assert await space.lost() == [gone]


async def test_operators_are_told_once_that_an_agent_is_away_and_once_that_it_is_back(space, inc):
    kinds = (b"away", b"back")
    await vouch(space, inc)
    await space.renew(inc)
    assert await told(space, *kinds) == []
    await space.redis.zadd(space.key("leases"), {str(inc): 1})
    for _ in range(4):
        await vouch(space, inc)
        vouched_ms = await space.now_ms()
        await space.redis.zadd(space.key("leases"), {str(inc): vouched_ms + 10})
        await after(space, vouched_ms)
    assert await told(space, *kinds) == [(b"away", b"a:0")]
    await space.renew(inc)
    assert await told(space, *kinds) == [(b"away", b"a:0"), (b"back", b"a:0")]


@pytest.mark.parametrize("text", ["spoilt", "[]", '{"away":7}', '{"away":{"until_ms":"5"}}'])
async def test_a_record_that_somebody_spoilt_is_written_anew(space, inc, text):
    await space.redis.hset(space.key("verdicts"), "a:0", text)
    assert not (await space.loads()).away
    assert await vouch(space, inc) == [True]
    assert list((await space.loads()).away) == [inc]


@pytest.mark.parametrize("entry", ["spoilt", "", "5", "[]", '{"worker": 7}', "{}"])
async def test_one_whose_registration_cannot_be_read_is_not_vouched_for(space, entry):
    inc, other = await lapsed(space, "a"), await lapsed(space, "b")
    await space.redis.hset(space.key("workers"), str(inc), entry)
    assert await vouch(space, inc, other) == [False, True]
