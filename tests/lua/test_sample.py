import pytest

from app.state import replicas


async def history(space, after_ms=0):
    return list(await replicas.history(space.redis, space.keys, after_ms))


@pytest.mark.oldest_too
async def test_one_replica_writes_each_step(space):
    at = [await space.do(replicas.sample(space.keys, {"n": n}, minute=True)) for n in range(3)]
    minutes = await replicas.history(space.redis, space.keys, 0, minute=True)
    written = [ms for ms in at if ms]
    assert [ms for ms, _ in minutes] == written
    # Three in a row lie in one minute, or in two.
    assert len(written) in (1, 2)
    assert all(ms % replicas.MINUTE_MS == 0 for ms in written)
    assert await history(space) == []


async def test_samples_after_a_time_come_oldest_first(space):
    for ms in (5000, 10_000, 15_000):
        await space.redis.xadd(space.keys["history"], {"sample": f'{{"n": {ms}}}'}, id=f"{ms}-0")
    assert await history(space) == [(ms, {"n": ms}) for ms in (5000, 10_000, 15_000)]
    assert await history(space, 10_000) == [(15_000, {"n": 15_000})]


async def test_a_history_is_bounded(space):
    for ms in range(1, 3000):
        await space.redis.xadd(space.keys["history"], {"sample": "{}"}, id=f"{ms}-0")
    assert await space.do(replicas.sample(space.keys, {}))
    assert await space.redis.xlen(space.keys["history"]) < replicas.KEPT + 110


async def test_a_sample_of_the_future_stops_nobody(space):
    await space.redis.xadd(space.keys["history"], {"sample": "{}"}, id=f"{1 << 52}-0")
    at_ms = await space.do(replicas.sample(space.keys, {"n": 1}))
    assert await history(space) == [(at_ms, {"n": 1})]


async def test_what_cannot_be_read_is_left_out(space):
    await space.redis.xadd(space.keys["history"], {"sample": "["}, id="1-0")
    await space.redis.xadd(space.keys["history"], {"other": "{}"}, id="2-0")
    assert await history(space) == []
