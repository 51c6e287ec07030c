from dataclasses import replace

import pytest

from app.core.fetches import Fetch
from app.core.types import WorkerKey
from app.core.verdicts import State
from app.state import leases


async def alive(space, name, life="1000.5"):
    """A worker whose engine says in which life it is."""
    inc = await space.worker(name)
    await lives(space, inc, life)
    return inc


@pytest.fixture
async def inc(space):
    return await alive(space, "a")


async def lives(space, inc, life):
    space.infos[inc] = replace(space.infos[inc], engine_life=life)
    assert await space.renew(inc)


async def outstanding(space, info, left_ms=-1, source="b", attempt="1-f"):
    """A worker is to fetch from a source, whose lease ends then."""
    fetch = Fetch(WorkerKey(source), info.key, "500.5", info.engine_life, 0)
    await space.redis.zadd(space.keys["fetches"], {attempt: await space.now_ms() + left_ms})
    await space.redis.hset(space.keys["fetching"], attempt, fetch.record())


async def late(space, source="b"):
    return await space.do(leases.fetched_late(space.keys, WorkerKey(source)))


async def taint(space, info):
    await outstanding(space, info)
    return bool(await late(space))


async def marked(space):
    records = await space.redis.hgetall(space.keys["verdicts"])
    return [name.decode() for name, text in records.items() if b"tainted" in text]


@pytest.mark.oldest_too
async def test_nothing_goes_to_a_tainted_worker_be_it_the_last(space, inc):
    await space.reserve(inc, "r0")
    assert await taint(space, space.infos[inc])
    assert not await taint(space, space.infos[inc])
    for _ in range(2):
        snapshot = await space.loads()
        assert not snapshot.loads
        assert snapshot.paused == [inc]
        verdict = snapshot.verdict(inc)
        assert verdict.state is State.TAINTED
        assert verdict.cause.endswith("after a lease of b:0 had ended")
        assert await space.renew(inc)
    assert (await space.reserve(inc, "r1")).reason == "lapsed"
    assert await space.retire_lapsed(grace_ms=5000) == 0
    assert await space.release("r0")


async def test_all_targets_of_a_source_that_may_have_fetched_late_are_tainted_and_no_other(space):
    a, c, d, e = [space.infos[await alive(space, name)] for name in "acde"]
    await outstanding(space, a, attempt="1-a")
    await outstanding(space, c, -5000, attempt="1-c")
    await outstanding(space, d, 60_000, attempt="1-d")  # counts left by others are none of its
    await outstanding(space, e, source="other", attempt="1-e")
    assert sorted(await late(space)) == ["a:0", "c:0"]
    assert sorted(await marked(space)) == ["a:0", "c:0"]
    assert await late(space) == []


@pytest.mark.parametrize("text", [None, "b:0 a:0", "b:0 a:0 - - - -"])
async def test_a_damaged_record_taints_nobody(space, text):
    await alive(space, "a")
    await space.redis.zadd(space.keys["fetches"], {"1-f": 1})
    if text is not None:
        await space.redis.hset(space.keys["fetching"], "1-f", text)
    assert await late(space) == []
    assert (await space.loads()).fetches == []


async def test_its_agent_hears_of_it_with_the_next_renewal(space, inc):
    await taint(space, space.infos[inc])
    call = leases.renew(space.keys, space.infos[inc], inc, "nonce-a", ttl_ms=1000)
    assert await space.do(call) == leases.Renewal(1, drains=False, tainted=True)


@pytest.mark.parametrize("life", ["2000.5", "1000.5+7"])
async def test_an_engine_that_has_begun_anew_or_dropped_what_it_held_is_back(space, inc, life):
    await taint(space, space.infos[inc])
    await lives(space, inc, life)
    assert list((await space.loads()).loads) == [inc]
    assert await marked(space) == []


async def test_neither_another_agent_nor_a_resync_nor_an_operator_brings_it_back(space, inc):
    await taint(space, space.infos[inc])
    resynced = (await space.register("a", resync=True)).incarnation
    await lives(space, resynced, "1000.5")
    assert await space.activate("a", resynced)
    assert not (await space.loads()).loads
    await space.do(leases.drain(space.keys, space.infos[resynced].key, undo=True))
    assert await space.retire("a", resynced)
    again = await space.worker("a", nonce="another agent")
    assert not (await space.loads()).loads
    space.infos[again] = replace(space.infos[again], engine_life="1000.5")
    assert await space.renew(again)
    assert not (await space.loads()).loads


async def test_no_router_vouches_for_a_tainted_engine_whose_agent_is_away(space, inc):
    await taint(space, space.infos[inc])
    await space.redis.zadd(space.keys["leases"], {str(inc): await space.now_ms() - 10_000})
    assert await space.do(leases.vouch(space.keys, [inc], most_ms=60_000)) == [True]
    assert not (await space.loads()).loads


async def test_an_engine_that_does_not_tell_its_life_stays_out(space, a):
    assert await taint(space, space.infos[a])
    assert await space.renew(a)
    assert not (await space.loads()).loads
    await lives(space, a, "seen 2")
    assert list((await space.loads()).loads) == [a]


async def test_what_was_given_to_an_engine_taints_that_process_alone(space, inc):
    before = space.infos[inc]
    await lives(space, inc, "2000.5")
    assert not await taint(space, before)
    assert list((await space.loads()).loads) == [inc]
    # What it fetches after it has dropped all taints it anew.
    await lives(space, inc, "2000.5+1")
    assert await taint(space, replace(before, engine_life="2000.5"))
    for life in ("2000.5+1", "2000.5"):  # an agent that was restarted tells the process alone
        await lives(space, inc, life)
        assert not (await space.loads()).loads
    await lives(space, inc, "2000.5+2")
    assert list((await space.loads()).loads) == [inc]


async def test_an_agent_restores_what_redis_has_lost_of_it(space, inc):
    call = leases.renew(space.keys, space.infos[inc], inc, "nonce-a", ttl_ms=60_000, tainted=True)
    assert (await space.do(call)).tainted
    assert not (await space.loads()).loads
    assert await marked(space) == ["a:0"]


async def test_marks_of_workers_that_are_gone_are_dropped_after_a_day(space):
    since_ms = await space.now_ms() - 2 * 86_400_000
    for name in ("gone", "here"):
        tainted = {"since_ms": since_ms, "life": "1000.5"}
        await space.mark(name, tainted=tainted, gone={"since_ms": since_ms})
    await alive(space, "here")
    assert await space.retire("other", await space.worker("other"))
    assert await marked(space) == ["here:0"]


async def test_tainted_workers_do_not_count_among_those_that_may_be_suspended(space):
    a, b, c = [await alive(space, name) for name in "abc"]
    await taint(space, space.infos[a])
    await space.reserve(b, "r0")
    await space.reserve(c, "r1")
    assert await space.suspend("r0") == b
    assert await space.suspend("r1") is None
