"""Parts of a release with another version of the data model beside this one's.

The newer say so, and disturb nobody. The older release is what it left in Redis, recorded here.
"""

import asyncio
import json
from contextlib import asynccontextmanager

from redis import Redis

from app.core.keys import DATA_VERSION
from app.core.types import Incarnation
from app.router.maintenance import MAINTENANCE_INTERVAL_S
from app.state.scripts import ScriptRunner
from tests.edge.conftest import started_replica
from tests.eventually import eventually
from tests.fake_worker import KEYS, NAMESPACE, FakeWorkers, fake_agent, running
from tests.ops.conftest import kvroute

OLD_META = {"block_size": "4", "shards": "1", "incarnations": "1", "workers_ms": "1795476033353"}
OLD_LOAD = "0 0 0 0 0 0 0 0"
OLD_INFO = {
    "worker": "old:0",
    "address": "http://127.0.0.1:35093",
    "block_size": 4,
    "kv_total_blocks": 100000,
    "max_requests": 256,
    "accelerator": "cpu",
    "reuse_blocks": 1,
    "recomputed_blocks": 0,
    "lease_ttl_ms": 3000,
}
WRONG = (
    f"namespace {NAMESPACE!r} holds version 1 of the data model, "
    f"but this release of kvroute speaks version {DATA_VERSION}"
)
STRANGER = f"worker old:0 speaks version 1 of the data model, not {DATA_VERSION}"


def record_old_worker(server):
    with Redis.from_url(server.url) as redis:
        for field, text in OLD_META.items():
            if field != "incarnations":
                redis.hsetnx(KEYS["meta"], field, text)
        inc = redis.hincrby(KEYS["meta"], "incarnations", 1)
        now_ms = redis.time()[0] * 1000
        redis.hset(KEYS["meta"], "workers_ms", now_ms)
        redis.hset(KEYS["workers"], str(inc), json.dumps(OLD_INFO, separators=(",", ":")))
        redis.hset(KEYS["current"], "old:0", inc)
        redis.hset(KEYS["writers"], str(inc), "740f1a50")
        redis.hset(KEYS["load"], str(inc), OLD_LOAD)
        redis.zadd(KEYS["leases"], {str(inc): now_ms + 60_000})


def new_agent(redis):
    return fake_agent(ScriptRunner(redis, 5.0), KEYS, "new", lease_ttl_s=0.6)


@asynccontextmanager
async def refused_agent(redis, why=WRONG):
    agent = new_agent(redis)

    async def refused():
        return agent.refused

    starting = asyncio.create_task(agent.start())
    try:
        assert why in await eventually(refused)
        yield
    finally:
        starting.cancel()
        await asyncio.wait([starting])


async def test_a_router_in_an_older_namespace_says_so_and_leaves_it_alone(one_redis_server, redis):
    record_old_worker(one_redis_server)
    await redis.zadd(KEYS["expiry"], {"overdue": 1})
    async with started_replica(one_redis_server.url) as client:
        ready = await client.get("/readiness")
        assert ready.status_code == 503
        [missing] = ready.json()["missing"]
        assert missing.startswith(f"namespace: {WRONG}")
        for answer in (
            await client.post("/v1/route", json={"token_ids": [1] * 8}),
            await client.post("/v1/requests/r1/prefill_complete"),
            await client.delete("/v1/requests/r1"),
            await client.get("/v1/workers"),
        ):
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "wrong_version"
            assert answer.json()["error"]["message"].startswith(WRONG)
        assert (await client.get("/metrics")).status_code == 200
        await asyncio.sleep(3 * MAINTENANCE_INTERVAL_S)
        assert await redis.zscore(KEYS["expiry"], "overdue") == 1


async def test_an_agent_in_an_older_namespace_waits_and_says_so(one_redis_server, redis):
    record_old_worker(one_redis_server)
    before = await redis.hgetall(KEYS["meta"])
    async with refused_agent(redis):
        assert await redis.hgetall(KEYS["meta"]) == before


def test_operators_are_told_which_version_an_older_namespace_has(one_redis_server):
    record_old_worker(one_redis_server)
    for command in ("inspect summary", "inspect verify", "drain old", "drain old --undo"):
        result = kvroute(one_redis_server.url, *command.split())
        assert (command, result.exit_code) == (command, 1)
        assert WRONG in result.stderr
    result = kvroute(one_redis_server.url, "reset", "--yes")
    assert result.exit_code == 0
    assert "6 keys deleted" in result.stdout


async def test_nothing_is_routed_to_an_older_worker_and_routers_name_it(one_redis_server, redis):
    workers = FakeWorkers(redis)
    await workers.register("w1")
    async with started_replica(one_redis_server.url) as client:
        record_old_worker(one_redis_server)
        for n in range(8):
            asked = {"token_ids": [n] * 8, "exclude": []}
            routed = (await client.post("/v1/route", json=asked)).json()
            assert routed["worker_id"] == "w1"
        assert (await client.get("/readiness")).json() == {"ready": True, "missing": []}
        await workers.retire("w1")

        async def ready():
            return await client.get("/readiness")

        refused = await eventually(ready, lambda answer: answer.status_code == 503)
        assert refused.json()["missing"] == ["workers: none is alive", f"workers: {STRANGER}"]


async def test_a_namespace_of_a_later_release_is_left_alone_too(one_redis_server, redis):
    later = DATA_VERSION + 1
    await redis.hset(KEYS["meta"], mapping={"version": later, "what": "nobody knows"})
    async with started_replica(one_redis_server.url) as client:
        [missing] = (await client.get("/readiness")).json()["missing"]
        assert f"holds version {later}" in missing
        async with refused_agent(redis, f"holds version {later} "):
            assert await redis.keys() == [KEYS["meta"].encode()]
        await redis.flushall()
        await FakeWorkers(redis).register("w1")

        async def is_ready():
            return (await client.get("/readiness")).is_success

        await eventually(is_ready)


async def test_a_version_that_was_lost_comes_back_with_a_renewal(redis):
    async with running(new_agent(redis)) as agent:
        await redis.hdel(KEYS["meta"], "version")

        async def version():
            return await redis.hget(KEYS["meta"], "version")

        assert await eventually(version) == str(DATA_VERSION).encode()
        assert agent.incarnation == Incarnation(1)


async def test_a_running_worker_waits_until_its_namespace_is_of_its_version_again(redis, caplog):
    async with running(new_agent(redis)) as agent:
        await redis.hset(KEYS["meta"], "version", "1")

        async def complaints():
            return [r.message for r in caplog.records if WRONG in r.message]

        assert (await eventually(complaints))[0].startswith("new:0 is not routed to")
        await redis.hset(KEYS["meta"], "version", DATA_VERSION)

        async def incarnation():
            return agent.incarnation

        assert await eventually(incarnation, lambda inc: inc != Incarnation(1)) == Incarnation(2)
