from app.core.types import Incarnation
from app.state.leases import absent
from app.state.scripts import ScriptRunner
from tests.fake_worker import KEYS, FakeWorkers


async def test_an_incarnation_that_is_no_writer_is_absent(redis):
    workers, runner = FakeWorkers(redis), ScriptRunner(redis, timeout_s=5)
    a, b = await workers.register("a"), await workers.register("b")
    assert await runner.one(absent(KEYS, [a, Incarnation(77), b])) == [77]
    await redis.hdel(KEYS["writers"], str(a))
    assert await runner.one(absent(KEYS, {a, b})) == [a]


async def test_every_incarnation_is_absent_from_an_emptied_redis(redis):
    asked = [Incarnation(n) for n in range(1, 10_001)]
    assert await ScriptRunner(redis, timeout_s=5).one(absent(KEYS, asked)) == asked
