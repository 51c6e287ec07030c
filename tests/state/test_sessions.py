from app.core.keys import Keyspace
from app.core.types import Incarnation
from app.state import sessions
from app.state.scripts import ScriptRunner
from app.state.sessions import Visit

KEYS = Keyspace("test")
ONE, TWO = Incarnation(1), Incarnation(2)


async def test_a_session_is_where_it_last_went(redis):
    runner = ScriptRunner(redis, timeout_s=5)
    for session, inc in (("a", ONE), ("b", ONE), ("a", TWO)):
        await runner.one(sessions.remember(KEYS, session, inc, ttl_ms=60_000))
    visits = await runner.one(sessions.recall(KEYS, ["a", "b", "c", "a"]))
    assert [visit and visit.incarnation for visit in visits] == [TWO, ONE, None, TWO]


async def test_when_a_session_went_there_is_known(redis):
    await redis.hset(KEYS["sessions"], "a", "7 1700000000123")
    visits = await ScriptRunner(redis, timeout_s=5).one(sessions.recall(KEYS, ["a"]))
    assert visits == [Visit(Incarnation(7), at_ms=1_700_000_000_123)]


async def test_a_session_with_a_corrupt_entry_is_unknown(redis):
    spoilt = {"a": "", "b": "1", "c": "x 99999999999999", "d": "1 2 3", "e": "-1 99999999999999"}
    spoilt["f"] = f"{'9' * 5000} 99999999999999"
    await redis.hset(KEYS["sessions"], mapping={"good": "1 17", **spoilt})
    visits = await ScriptRunner(redis, timeout_s=5).one(sessions.recall(KEYS, ["good", *spoilt]))
    assert visits == [Visit(ONE, 17), *[None] * len(spoilt)]
