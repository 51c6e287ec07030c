import pytest

from app.core.types import Incarnation
from tests.eventually import eventually
from tests.lua.conftest import LONG_MS

ONE = Incarnation(1)


async def known(space):
    return {session.decode() for session in await space.redis.hkeys(space.key("sessions"))}


@pytest.mark.oldest_too
async def test_no_more_sessions_are_kept_than_the_limit(space):
    for n in range(100):
        await space.remember(f"s{n}", ONE, limit=20)
        assert f"s{n}" in await known(space)
        assert len(await known(space)) == min(n + 1, 20)
    # Each time the oldest of a few is evicted, so most of the latest are still there.
    latest = {f"s{n}" for n in range(80, 100)}
    assert len(await known(space) & latest) >= 10


async def test_a_known_session_evicts_no_other(space):
    for session in ("a", "b", "a", "b", "a"):
        assert await space.remember(session, ONE, limit=2) == 0
    assert await known(space) == {"a", "b"}


async def test_a_session_does_not_evict_itself(space):
    now = await space.now_ms()
    times = {"a": now - 30, "b": now - 20, "c": now - 10, "over": 1}
    sessions = {session: f"1 {at_ms}" for session, at_ms in times.items()}
    await space.redis.hset(space.key("sessions"), mapping=sessions)
    assert await space.remember("a", ONE, limit=1) == 2
    assert await known(space) == {"a", "c"}


async def test_expired_sessions_are_forgotten_as_others_come(space):
    long_ago = {f"old{n}": f"1 {n}" for n in range(40)}
    await space.redis.hset(space.key("sessions"), mapping=long_ago | {"junk": "junk"})
    await space.redis.hset(space.key("sessions"), "ahead", f"1 {await space.now_ms() + LONG_MS}")

    async def one_more():
        await space.remember("new", ONE, limit=5)
        return await known(space)

    await eventually(one_more, lambda found: found == {"new"})


async def test_nothing_is_left_once_no_session_comes(space):
    await space.remember("a", ONE, ttl_ms=20)
    assert await eventually(space.contents, lambda found: not found) == ""
    await space.remember("a", ONE)
    assert 0 < await space.redis.pttl(space.key("sessions")) <= LONG_MS
