import pytest

from app.core.types import WorkerKey
from app.core.verdicts import State
from app.state import leases
from tests.lua.conftest import A

W0 = WorkerKey("w0")


async def drain(space, key=W0, *, undo=False):
    return await space.do(leases.drain(space.keys, key, undo=undo))


@pytest.mark.oldest_too
async def test_nothing_goes_to_a_worker_that_drains_though_it_renews(space):
    first, other = await space.worker("w0"), await space.worker("w1")
    await space.hold(first, [A])
    await space.reserve(first, "r0")
    assert await drain(space) == 1
    for _ in range(2):
        snapshot = await space.loads()
        assert list(snapshot.loads) == [other]
        assert snapshot.paused == [first]
        assert snapshot.verdict(first).state is State.DRAINING
        assert await space.renew(first)
    assert (await space.reserve(first, "r1")).reason == "lapsed"
    assert await space.retire_lapsed(grace_ms=5000) == 0
    assert await space.release("r0")
    assert await drain(space) == 0
    [found] = await space.match([A])
    assert first in found


async def test_the_last_worker_drains_too(space):
    last = await space.worker("w0")
    assert await drain(space) == 0
    assert await space.renew(last)
    assert not (await space.loads()).loads


async def test_once_it_is_undone_the_next_renewal_brings_the_worker_back(space):
    first = await space.worker("w0")
    await space.reserve(first, "r0")
    await drain(space)
    assert await drain(space, undo=True) == 1
    assert await drain(space, undo=True) == 1
    assert await space.renew(first)
    snapshot = await space.loads()
    assert list(snapshot.loads) == [first]
    assert not snapshot.marks


async def test_undoing_forgets_no_failures(space):
    first, _ = await space.worker("w0"), await space.worker("w1")
    await space.reserve(first, "r0")
    await space.suspend("r0")
    await drain(space, undo=True)
    assert (await space.loads()).marks[first].failed.count == 1


async def test_a_worker_that_resyncs_goes_on_draining_and_a_new_process_does_not(space):
    first = await space.worker("w0")
    await space.reserve(first, "r0")
    await drain(space)
    resynced = (await space.register("w0", resync=True)).incarnation
    assert await space.activate("w0", resynced)
    assert not (await space.loads()).loads
    assert await drain(space) == 1
    assert await space.renew(resynced)
    assert not (await space.loads()).loads
    new = await space.worker("w0")
    assert list((await space.loads()).loads) == [new]


async def test_a_worker_stays_out_of_service_when_its_agent_was_frozen_for_long(space):
    first, other = await space.worker("w0", ttl_ms=50), await space.worker("w1")
    await drain(space)
    assert await space.retire_lapsed() == 1
    for _ in range(2):
        again = await space.worker("w0", resync=True)
        assert await space.renew(again)
        snapshot = await space.loads()
        assert (list(snapshot.loads), snapshot.paused) == ([other], [again])
        assert snapshot.verdict(again).state is State.DRAINING
        assert first != again
    assert await drain(space, undo=True) == 0
    assert await space.renew(again)
    assert list((await space.loads()).loads) == [other, again]


async def test_a_worker_stays_out_of_service_when_redis_lost_its_data(space):
    first = await space.worker("w0")
    await drain(space)
    await space.redis.delete(space.keys["verdicts"])
    assert await space.renew(first, drains=True)
    assert (await space.loads()).paused == [first]
    await drain(space, undo=True)
    assert await space.renew(first, drains=True)
    assert list((await space.loads()).loads) == [first]


async def test_a_worker_that_was_stopped_leaves_no_mark_and_one_that_was_killed_for_a_day(space):
    for name in ("w0", "w1", "w2"):
        inc = await space.worker(name)
        await drain(space, WorkerKey(name))
        if name == "w0":
            assert await space.retire(name, inc)
        elif name == "w1":
            assert await space.retire_lapsed() == 1
    assert sorted(await space.redis.hkeys(space.keys["verdicts"])) == [b"w1:0", b"w2:0"]
    await space.mark("w1", draining={"since_ms": 1000}, gone={"since_ms": 1000})
    assert await space.retire("w3", await space.worker("w3"))
    assert await space.redis.hkeys(space.keys["verdicts"]) == [b"w2:0"]


async def test_a_worker_that_nobody_runs_cannot_drain(space):
    await space.worker("w1")
    assert await drain(space) is None
    assert not (await space.loads()).marks
