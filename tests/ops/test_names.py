"""Which namespaces get the requests for a name, as the doctor and the console tell."""

from app.core.keys import DATA_VERSION, Keyspace
from app.ops.names import check, names_of
from app.state import leases, models, replicas
from app.state.scripts import ScriptRunner
from tests.fake_worker import FakeWorker, worker_info


async def worker(redis, namespace, *names):
    runner = ScriptRunner(redis, 5.0)
    started = FakeWorker(runner, Keyspace(namespace), worker_info(namespace, models=names))
    await started.register()
    await started.activate()
    await runner.one(models.announce(namespace, names))
    return started


async def router(redis, namespace, name, weights):
    beat = replicas.beat(Keyspace(namespace), name, {"namespace_weights": weights})
    await ScriptRunner(redis, 5.0).one(beat)


async def found(redis, namespace, info):
    told = check(await names_of(redis, namespace, [info]), namespace, [info])
    return told.ok, told.found


async def test_each_namespaces_part_of_a_names_requests_is_told(redis):
    old = (await worker(redis, "old", "m", "sql", "own")).info
    started = await worker(redis, "new", "m", "sql")
    new = started.info
    mine = "m is namespace old's (new:0); sql is namespace old's (new:0)"
    assert await found(redis, "new", new) == (False, mine)
    assert await found(redis, "old", old) == (True, "m, own, sql: old 100%")
    await router(redis, "old", "r1", "old=3,new=1")
    for namespace, info, more in (("new", new, ""), ("old", old, "; own: old 100%")):
        parts = "m, sql: old 75%, new 25%"
        told = await found(redis, namespace, info)
        assert told[0]
        assert sorted(told[1].split("; ")) == sorted((parts + more).split("; "))
    await ScriptRunner(redis, 5.0).one(leases.drain(Keyspace("new"), new.key))
    assert (await found(redis, "old", old))[1] == "m, own, sql: old 100%"
    await started.retire()
    assert (await found(redis, "old", old))[1] == "m, own, sql: old 100%"


async def test_a_name_is_free_once_who_had_it_is_gone_or_speaks_another_version(redis):
    gone = await worker(redis, "gone", "m")
    await worker(redis, "later", "m")
    new = (await worker(redis, "new", "m")).info
    assert await found(redis, "new", new) == (False, "m is namespace gone's (new:0)")
    await gone.retire()
    assert await found(redis, "new", new) == (False, "m is namespace later's (new:0)")
    await redis.hset(Keyspace("later")["meta"], "version", DATA_VERSION + 1)
    assert await found(redis, "new", new) == (True, "m: new 100%")


async def test_routers_that_spread_requests_differently_are_told(redis):
    old = (await worker(redis, "old", "m")).info
    await worker(redis, "new", "m")
    await router(redis, "old", "r1", "old=3,new=1")
    await router(redis, "new", "r2", "")
    assert await found(redis, "old", old) == (
        False,
        "routers have different --namespace-weights: 'old=3,new=1' (r1); none (r2)",
    )
