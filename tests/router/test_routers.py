"""The namespaces that a replica serves, as the directory of models has them."""

import asyncio
from contextlib import asynccontextmanager
from functools import partial

import pytest

from app.core.errors import NoWorkers
from app.core.keys import MODELS, Keyspace
from app.router import routers as routers_module
from app.router.router import Router
from app.router.routers import Routers
from app.state import models
from app.state.client import RedisClient
from app.state.connect import connect
from app.state.scripts import ScriptRunner
from tests.eventually import eventually
from tests.fake_worker import NAMESPACE, FakeWorker, worker_info
from tests.router.test_router import Replica, request

OTHER = "other"


@asynccontextmanager
async def serving(redis_url, **settings):
    def router(namespace, client):
        return Replica(client, keyspace=Keyspace(namespace), **settings)

    routers = Routers(NAMESPACE, partial(connect, redis_url), router, 5.0)
    running = asyncio.create_task(routers.run())
    try:
        yield routers
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def live_worker(redis, namespace, max_requests=256):
    info = worker_info("w", max_requests=max_requests)
    worker = FakeWorker(ScriptRunner(redis, 5.0), Keyspace(namespace), info)
    await worker.register()
    await worker.activate()
    return worker


async def announce(redis, namespace, names=("m",)):
    await ScriptRunner(redis, 5.0).one(models.announce(namespace, names))


async def served(routers):
    return {*routers.by_namespace}


async def read_twice(redis):
    """Returns once the directory, as it is now, has been read."""

    async def num_reads():
        stats = await redis.info("commandstats")
        return int(stats.get("cmdstat_hscan", {"calls": 0})["calls"])

    before = await num_reads()
    await eventually(num_reads, lambda now: now >= before + 3)


@pytest.fixture
def impatient(monkeypatch):
    """The directory is read all the time, and nothing that it lacks is remembered."""
    monkeypatch.setattr(routers_module, "DIRECTORY_INTERVAL_S", 0.01)
    monkeypatch.setattr(routers_module, "KEPT_S", 0.0)


async def test_a_directory_that_redis_has_lost_ends_nothing(one_redis_server, redis, monkeypatch):
    monkeypatch.setattr(routers_module, "DIRECTORY_INTERVAL_S", 0.01)
    await live_worker(redis, OTHER)
    await announce(redis, OTHER)
    async with serving(one_redis_server.url) as routers:
        await eventually(lambda: served(routers), lambda names: names == {NAMESPACE, OTHER})
        await redis.delete(MODELS)
        await read_twice(redis)
        assert routers.claims == {"m": (OTHER,)}
        assert await served(routers) == {NAMESPACE, OTHER}
        await announce(redis, "another")  # who comes first is the first
        await eventually(lambda: claims(routers), lambda found: found == {"m": ("another", OTHER)})


async def claims(routers):
    return {**routers.claims}


@pytest.mark.usefixtures("impatient")
async def test_a_namespace_is_left_once_nobody_waits_there_and_nothing_is_carried(
    one_redis_server, redis
):
    await live_worker(redis, OTHER, max_requests=1)
    await announce(redis, OTHER)
    async with serving(one_redis_server.url, wait_queue=10, wait_timeout_s=600.0) as routers:
        await eventually(lambda: served(routers), lambda names: names == {NAMESPACE, OTHER})
        router = routers.by_namespace[OTHER]
        carried = await router.route(request("carried", carried=True))
        waiting = asyncio.create_task(router.route(request("waiting", carried=True)))
        await eventually(partial(waits_in, redis, OTHER))
        await redis.delete(MODELS)
        await read_twice(redis)
        assert routers.by_namespace[OTHER] is router
        router.end(carried.reservation_id)
        decision = await waiting
        await read_twice(redis)
        assert routers.by_namespace[OTHER] is router
        router.end(decision.reservation_id)
        await eventually(lambda: served(routers), lambda names: names == {NAMESPACE})
        with pytest.raises(NoWorkers, match="namespace other is not served here any more"):
            await asyncio.wait_for(router.route(request("late")), 30)
        await announce(redis, OTHER)
        await eventually(lambda: served(routers), lambda names: names == {NAMESPACE, OTHER})
        assert await routers.by_namespace[OTHER].route(request("again"))


async def waits_in(redis, namespace):
    return int(await redis.zcard(Keyspace(namespace)["flows"]))


@pytest.mark.usefixtures("impatient")
async def test_a_namespace_that_is_left_with_a_surprise_ends_no_other(
    one_redis_server, redis, monkeypatch
):
    await live_worker(redis, NAMESPACE)
    await live_worker(redis, OTHER)
    await announce(redis, OTHER)
    async with serving(one_redis_server.url) as routers:
        await eventually(lambda: served(routers), lambda names: names == {NAMESPACE, OTHER})

        async def surprise():
            raise LookupError("while it ends")

        monkeypatch.setattr(routers.by_namespace[OTHER]._reports, "finish", surprise)
        await redis.delete(MODELS)
        await eventually(lambda: served(routers), lambda names: names == {NAMESPACE})
        assert await asyncio.wait_for(routers.own.route(request("r1")), 30)
        await announce(redis, OTHER)
        await eventually(lambda: served(routers), lambda names: names == {NAMESPACE, OTHER})
        assert await routers.by_namespace[OTHER].route(request("r2"))


async def test_a_router_that_fails_is_begun_anew_and_ends_no_other(
    one_redis_server, redis, monkeypatch
):
    monkeypatch.setattr("app.http.supervisor.FIRST_PAUSE_S", 0.01)
    await live_worker(redis, NAMESPACE)
    await live_worker(redis, OTHER)
    await announce(redis, OTHER)
    runs = Router.run
    failed = []

    async def run(router):
        if router.namespace == OTHER and not failed:
            failed.append(OTHER)
            raise LookupError("once")
        await runs(router)

    monkeypatch.setattr(Router, "run", run)
    async with serving(one_redis_server.url) as routers:
        await eventually(lambda: served(routers), lambda names: names == {NAMESPACE, OTHER})
        for router in routers.by_namespace.values():
            assert await asyncio.wait_for(router.route(request("r")), 30)
        assert failed


async def test_a_directory_of_another_type_ends_nothing(one_redis_server, redis, monkeypatch):
    monkeypatch.setattr(routers_module, "DIRECTORY_INTERVAL_S", 0.01)
    monkeypatch.setattr("app.http.supervisor.FIRST_PAUSE_S", 0.01)
    await live_worker(redis, OTHER)
    await announce(redis, OTHER)
    async with serving(one_redis_server.url) as routers:
        await eventually(lambda: served(routers), lambda names: names == {NAMESPACE, OTHER})
        await redis.set(MODELS, "spoilt")
        await read_twice(redis)
        assert routers.claims == {"m": (OTHER,)}
        assert await routers.by_namespace[OTHER].route(request("r"))
        await announce(redis, "another")
        await eventually(lambda: claims(routers), lambda found: "another" in found["m"])


async def test_whoever_waits_at_a_router_that_ends_gets_an_error(one_redis_server, redis):
    await live_worker(redis, NAMESPACE, max_requests=1)
    async with serving(one_redis_server.url, wait_queue=10, wait_timeout_s=600.0) as routers:
        await routers.own.route(request("carried", carried=True))
        waiting = asyncio.create_task(routers.own.route(request("waiting")))
        await eventually(partial(waits_in, redis, NAMESPACE))
    with pytest.raises(NoWorkers):
        await asyncio.wait_for(waiting, 30)


async def test_all_other_namespaces_share_their_connections_and_each_client_follows_redis(
    one_redis_server, redis, monkeypatch
):
    followed = []

    async def follow(client):
        followed.append(client)

    monkeypatch.setattr(RedisClient, "follow", follow)
    others = [f"other-{n}" for n in range(40)]
    for name in (NAMESPACE, *others):
        await live_worker(redis, name)
        await announce(redis, name, [name])
    async with serving(one_redis_server.url) as routers:
        await eventually(lambda: _settled(routers), lambda settled: settled == 41)
        assert len(await redis.client_list()) <= 2 * 16 + 1
        assert len(set(followed)) == 2


async def _settled(routers):
    """How many have asked Redis for their workers."""
    seen = (router.fleet.redis_now_ms for router in routers.by_namespace.values())
    return sum(now_ms is not None for now_ms in seen)
