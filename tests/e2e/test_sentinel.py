"""Redis behind Sentinel: its master is found through the sentinels, and failovers are followed."""

import asyncio

import pytest
from redis import Redis as BlockingRedis
from redis.asyncio import Redis
from redis.exceptions import RedisError

from app.core.errors import RedisUnavailable
from app.core.keys import Keyspace
from app.core.types import SequenceHash
from app.state import overlap, reservations
from app.state.connect import check_server, connect
from app.state.scripts import ScriptRunner
from loadtest.topologies import SERVICE
from tests.eventually import eventually
from tests.fake_worker import register, registered
from tests.redis_servers import (
    KINDS,
    OLDEST_KIND,
    SentinelServers,
    default_kind,
    each_kind,
    installed,
    scripts_run_by,
    stopped,
)

KEYS = Keyspace("test")
TIMEOUT_S = 5.0
FAILOVER_S = 15.0


REGISTERED = registered(KEYS)


async def replicated(servers):
    async with Redis(port=servers.replica.port) as client:
        return bool(await client.exists(KEYS["meta"]))


@pytest.fixture(scope="module")
def servers():
    """Shared servers of the oldest kind, whose sentinels find one another fastest; kill none."""
    with SentinelServers(OLDEST_KIND if installed(OLDEST_KIND) else default_kind()) as started:
        with BlockingRedis(port=started.master.port) as client:
            client.flushall()
        yield started


@pytest.fixture
async def redis(servers):
    async with connect(servers.url) as client:
        yield client
        await client.flushall()


async def port_of(redis):
    return (await redis.info("server"))["tcp_port"]


async def test_the_master_is_found_through_the_sentinels(redis, servers):
    assert await port_of(redis) == servers.master.port
    assert await port_of((await redis.masters())[0]) == servers.master.port
    await check_server(redis, TIMEOUT_S)
    runner = ScriptRunner(redis, TIMEOUT_S)
    assert (await runner.one(register(KEYS, "a"))).incarnation == 1
    entry = await redis.xadd(KEYS["metrics"], {"worker": "a:0"})
    assert await redis.xread({KEYS["metrics"]: "0"}) == [
        [KEYS["metrics"].encode(), [(entry, {b"worker": b"a:0"})]]
    ]


async def test_a_url_may_name_a_database_after_the_service(servers):
    async with connect(f"{servers.url}/5") as five, connect(servers.url) as zero:
        await five.set("a", "1")
        assert await zero.get("a") is None
        await five.flushdb()


async def test_calls_that_find_all_connections_in_use_wait_for_one(redis):
    runner = ScriptRunner(redis, TIMEOUT_S)
    await runner.one(register(KEYS, "a"))
    answers = await asyncio.gather(*(runner.one(REGISTERED) for _ in range(100)))
    assert {len(answer) for answer in answers} == {1}


async def test_calls_do_not_wait_for_a_sentinel_that_hangs(servers):
    for sentinel in servers.sentinels:
        with stopped(sentinel.pid):
            async with connect(servers.url, timeout_s=1.0) as redis:
                runner = ScriptRunner(redis, timeout_s=1.0, on_replicas=["match"])
                await runner.one(register(KEYS, "a"))
                await overlap.match(runner, KEYS, [[SequenceHash(1)]])


async def test_redis_is_unavailable_if_the_sentinels_do_not_know_the_service(servers):
    async with connect(f"{servers.url}-other") as redis:
        with pytest.raises(RedisUnavailable, match=f"no master of '{SERVICE}-other'"):
            await ScriptRunner(redis, TIMEOUT_S).one(REGISTERED)


async def test_scripts_that_only_read_run_on_replicas_if_configured(redis, servers):
    runner = ScriptRunner(redis, TIMEOUT_S, on_replicas=["match"])
    release = reservations.release(KEYS, [reservations.Release("r1")])
    await runner.run([register(KEYS, "a"), release])
    chains = [[SequenceHash(1)]]

    await eventually(lambda: replicated(servers))
    await overlap.match(runner, KEYS, chains)
    at_master, at_replica = (
        await scripts_run_by(servers.master),
        await scripts_run_by(servers.replica),
    )
    for _ in range(5):
        await overlap.match(runner, KEYS, chains)
    assert await scripts_run_by(servers.replica) == at_replica + 5
    await runner.one(release)
    assert await scripts_run_by(servers.master) == at_master + 1


@pytest.mark.parametrize("kind", each_kind())
async def test_a_failover_is_followed(kind):
    with SentinelServers(kind) as servers:
        async with connect(servers.url) as redis:
            runner = ScriptRunner(redis, TIMEOUT_S, on_replicas=["match"])
            await runner.run([register(KEYS, "a"), REGISTERED])
            await overlap.match(runner, KEYS, [[SequenceHash(1)]])
            await eventually(lambda: replicated(servers))
            servers.master.kill()
            with pytest.raises(RedisUnavailable):
                await runner.one(REGISTERED)

            async def look():
                return (await runner.run_each([REGISTERED]))[0]

            found = await eventually(
                look, lambda r: not isinstance(r, RedisUnavailable), within_s=FAILOVER_S
            )
            assert len(found) == 1
            assert (await runner.one(register(KEYS, "b"))).incarnation == 2
            # No replica is left.
            assert await overlap.match(runner, KEYS, [[SequenceHash(1)]]) == ([{}], [])


@pytest.mark.slow
async def test_the_sentinel_that_knows_of_the_latest_failover_is_believed(servers):
    with SentinelServers(default_kind()) as others:
        await others.hand_over(within_s=FAILOVER_S)
        behind, ahead = servers.url.removesuffix(f"/{SERVICE}"), others.url.partition("://")[2]
        async with connect(f"{behind},{ahead}") as redis:
            assert await port_of(redis) == others.replica.port


@pytest.mark.slow
async def test_a_replaced_master_is_abandoned_although_it_still_takes_writes():
    with SentinelServers(default_kind()) as servers:
        async with connect(servers.url) as redis:
            runner = ScriptRunner(redis, TIMEOUT_S)
            await runner.run([register(KEYS, "a"), REGISTERED])
            await servers.hand_over(within_s=FAILOVER_S)

            async def port_used_and_old_role():
                async with Redis(port=servers.master.port) as old:
                    return await port_of(redis), (await old.info("replication"))["role"]

            # No call failed, so nothing is noticed until the sentinels are asked.
            assert await port_used_and_old_role() == (servers.master.port, "master")
            following = asyncio.ensure_future(redis.follow())
            try:
                await eventually(
                    port_used_and_old_role,
                    lambda seen: seen == (servers.replica.port, "master"),
                )
            finally:
                following.cancel()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
async def test_a_master_that_becomes_a_replica_is_abandoned(kind):
    with SentinelServers(kind) as servers:
        async with connect(servers.url) as redis:
            runner = ScriptRunner(redis, TIMEOUT_S)
            await runner.run([register(KEYS, "a"), REGISTERED])
            async with Redis(port=servers.sentinels[0].port) as sentinel:
                await sentinel.execute_command("SENTINEL FAILOVER", SERVICE)

            async def moved():
                # A script that writes, so that a replica cannot pass for the master.
                await runner.run_each([register(KEYS, "b")])
                try:
                    return await port_of(redis) == servers.replica.port
                except RedisError:
                    return False

            await eventually(moved, within_s=FAILOVER_S)
            await runner.one(register(KEYS, "c"))
