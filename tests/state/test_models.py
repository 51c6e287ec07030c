"""The directory of models, on a real Redis; that of who has which name is in tests/lua."""

from app.core.keys import Keyspace
from app.state import models
from app.state.scripts import ScriptRunner


async def test_a_namespace_exists_once_a_worker_has_registered_there(redis):
    await redis.hset(Keyspace("b")["meta"], "shards", 1)
    calls = [models.exists(name) for name in "ab"]
    assert await ScriptRunner(redis, 5.0).run(calls) == [False, True]
