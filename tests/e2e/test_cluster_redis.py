"""Scripts and commands on a real Redis Cluster: healthy, resharded, and with nodes that die."""

import asyncio
import time
from contextlib import AsyncExitStack

import httpx
import pytest
from click.testing import CliRunner
from redis import Redis as BlockingRedis
from redis.asyncio import Redis
from redis.crc import key_slot

from app.cli import main
from app.core.errors import ConfigError, RedisUnavailable
from app.core.keys import Keyspace
from app.core.settings.router import RouterSettings
from app.core.settings.worker import WorkerSettings
from app.core.types import Incarnation, SequenceHash, TierOverlap, WorkerKey
from app.local import cluster as kvroute
from app.local.redis_server import free_port
from app.state import overlap
from app.state.connect import check_server, connect
from app.state.index import open_shard
from app.state.leases import Registration, activate
from app.state.scripts import ScriptRunner
from loadtest.topologies import NUM_SHARDS
from tests.e2e.conftest import prompt
from tests.eventually import eventually
from tests.fake_worker import register, registered
from tests.redis_servers import ClusterServers, default_kind, stopped

TIMEOUT_S = 5.0
FAILOVER_S = 15.0
"""More than a cluster takes to promote a replica."""


@pytest.fixture(scope="module")
def shared_servers():
    with ClusterServers(default_kind()) as servers:
        yield servers


@pytest.fixture
def servers(shared_servers):
    """A shared cluster, found empty; do not kill its nodes."""
    for master in shared_servers.masters:
        with BlockingRedis(port=master.port) as client:
            client.flushall()
    return shared_servers


@pytest.fixture
def own_servers():
    """A cluster for this test alone, which may kill its nodes."""
    with ClusterServers(default_kind()) as servers:
        yield servers


@pytest.fixture
async def redis(servers):
    async with connect(servers.url) as client:
        yield client


class CountingRunner(ScriptRunner):
    """sent: for each pipeline, the port that it went to and how many calls it had."""

    def __init__(self, redis, **options):
        super().__init__(redis, TIMEOUT_S, **options)
        self.sent = []

    async def _send(self, node, calls, until_s):
        self.sent.append((port_of(node.client), len(calls)))
        return await super()._send(node, calls, until_s)


def port_of(client):
    return client.connection_pool.connection_kwargs["port"]


def keyspaces(servers):
    """One keyspace on each master, in the order of the masters."""
    found = {}
    for number in range(100):
        keyspace = Keyspace(f"test{number}")
        found.setdefault(servers.shard_of(keyspace["meta"]), keyspace)
    return [found[shard] for shard in range(NUM_SHARDS)]


async def test_calls_are_sent_in_one_pipeline_per_node_and_answered_in_order(redis, servers):
    first, second, third = keyspaces(servers)
    runner = CountingRunner(redis)
    await runner.run([register(keyspace) for keyspace in keyspaces(servers)])
    await runner.run([registered(keyspace) for keyspace in keyspaces(servers)])
    runner.sent.clear()
    replies = await runner.run(
        [
            register(third, "b"),
            register(first, "b"),
            registered(third),
            register(first, "c"),
            registered(second),
            registered(first),
        ]
    )
    assert [int(reply.incarnation) for reply in (replies[0], replies[1], replies[3])] == [2, 2, 3]
    assert [len(replies[i]) for i in (2, 4, 5)] == [2, 1, 3]
    assert sorted(runner.sent) == sorted(
        zip([server.port for server in servers.masters], (3, 1, 2), strict=True)
    )


async def test_calls_succeed_after_one_node_has_forgotten_its_scripts(redis, servers):
    runner = ScriptRunner(redis, TIMEOUT_S)
    calls = [register(keyspace) for keyspace in keyspaces(servers)]
    await runner.run(calls)
    async with Redis(port=servers.masters[1].port) as client:
        await client.script_flush()
    assert [int(reply.incarnation) for reply in await runner.run(calls)] == [2, 2, 2]


async def test_plain_commands_of_agents_and_routers_reach_the_right_node(redis, servers):
    for keyspace in keyspaces(servers):
        stream = keyspace["metrics"]
        entry = await redis.xadd(stream, {"worker": "a:0"})
        assert await redis.xrevrange(stream) == [(entry, {b"worker": b"a:0"})]
        assert await redis.xread({stream: "0"}) == [
            [stream.encode(), [(entry, {b"worker": b"a:0"})]]
        ]
        await redis.hset(keyspace["workers"], mapping={"1": "x", "2": "y"})
        assert await redis.hmget(keyspace["workers"], ["2", "3"]) == [b"y", None]
        assert await redis.hgetall(keyspace["workers"]) == {b"1": b"x", b"2": b"y"}
    assert (await redis.info("cluster"))["cluster_enabled"] == 1


def test_operators_can_look_inside_a_redis_cluster(servers):
    keyspace = keyspaces(servers)[-1]  # on a master that the URL does not name

    async def work():
        async with connect(servers.url) as client:
            runner = ScriptRunner(client, TIMEOUT_S)
            inc = (await runner.one(register(keyspace))).incarnation
            assert await runner.one(open_shard(keyspace.of_shard(0), inc, "nonce", 4))
            assert await runner.one(activate(keyspace, WorkerKey("a"), inc, "nonce"))

    asyncio.run(work())
    where = ["--redis-url", servers.url, "--namespace", keyspace.namespace]
    for command in ("inspect verify", "inspect worker a", "inspect waiting"):
        result = CliRunner().invoke(main, [*command.split(), *where])
        assert result.exit_code == 0, (command, result.output, result.exception)


async def test_calls_that_find_all_connections_in_use_wait_for_one(redis, servers):
    [keyspace, *_] = keyspaces(servers)
    runner = ScriptRunner(redis, TIMEOUT_S)
    await runner.one(register(keyspace))
    call = registered(keyspace)
    answers = await asyncio.gather(*(runner.one(call) for _ in range(200)))
    assert {len(answer) for answer in answers} == {1}


async def test_a_slot_that_moved_is_followed(redis, servers):
    keyspace, other, _ = keyspaces(servers)
    slot = key_slot(keyspace["meta"].encode())
    runner = CountingRunner(redis)
    await runner.run([register(other)])
    old, new = servers.masters[:2]
    try:
        await move_slot(slot, to=new, servers=servers)
        runner.sent.clear()
        assert (await runner.one(register(keyspace))).incarnation == 1
        ports = [port for port, _ in runner.sent]
        assert ports[0] == old.port
        assert set(ports[1:]) == {new.port}
        await redis.xadd(keyspace["metrics"], {"worker": "a:0"})
        runner.sent.clear()
        assert (await runner.one(register(keyspace, "b"))).incarnation == 2
        assert runner.sent == [(new.port, 1)], "the move was not remembered"
        async with Redis(port=new.port) as client:
            await client.flushall()
    finally:
        await move_slot(slot, to=old, servers=servers)


async def test_no_script_runs_on_half_of_its_keys_while_their_slot_moves(redis, servers):
    keyspace, _, _ = keyspaces(servers)
    slot = key_slot(keyspace["meta"].encode())
    runner = ScriptRunner(redis, TIMEOUT_S)
    await runner.one(register(keyspace))
    old, new = servers.masters[:2]
    async with Redis(port=old.port) as source, Redis(port=new.port) as target:
        await target.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", await node_id(source))
        await source.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", await node_id(target))
        try:
            # The source lacks some keys of the script, which may be on the target already.
            with pytest.raises(RedisUnavailable, match="Multiple keys request during rehashing"):
                await runner.one(register(keyspace, "b"))
            # A key that the source lacks is on the target, if anywhere.
            await redis.xadd(keyspace["metrics"], {"worker": "a:0"})
            assert await target.execute_command("CLUSTER COUNTKEYSINSLOT", slot) == 1
            assert len(await redis.xrevrange(keyspace["metrics"])) == 1
        finally:
            await target.flushall()
            for client in (source, target):
                await client.execute_command("CLUSTER SETSLOT", slot, "STABLE")
    assert (await runner.one(register(keyspace, "b"))).incarnation == 2


async def test_the_index_is_read_on_replicas_if_configured(redis, servers):
    [keyspace, *_] = keyspaces(servers)
    shard = keyspace.of_shard(0)
    at_master, at_replica = (servers.masters[0].port, 1), (servers.replicas[0].port, 1)
    runner = CountingRunner(redis, on_replicas=["match"])
    await runner.one(register(keyspace))
    chain = [SequenceHash(n) for n in range(600)]
    await redis.hset(shard["shard"], "bucket_bits", "1")
    await redis.hset(shard["blocks:0"], mapping={f"{n:016x}": "1d" for n in range(100)})
    await eventually(
        lambda: keys_of(servers.replicas[0]), lambda keys: shard["blocks:0"].encode() in keys
    )
    await overlap.match(runner, keyspace, [chain])
    runner.sent.clear()
    found, _ = await overlap.match(runner, keyspace, [chain])
    assert found == [{Incarnation(1): TierOverlap(device=100)}]
    assert runner.sent == [at_replica] * 2, "a script, then the group in which the overlap ends"
    await runner.one(registered(keyspace))
    assert runner.sent[-1] == at_master, "this script is not in on_replicas"


async def test_the_master_answers_where_its_replica_does_not(redis, servers):
    [keyspace, *_] = keyspaces(servers)
    runner = CountingRunner(redis, on_replicas=["match"])
    await runner.one(register(keyspace))
    # Loads the script into the master.
    await overlap.match(ScriptRunner(redis, TIMEOUT_S), keyspace, [[SequenceHash(1)]])
    runner.sent.clear()
    replica = redis.node_of(keyspace["meta"], replica=True)
    assert port_of(replica.client) == servers.replicas[0].port
    pool = replica.client.connection_pool
    pool.connection_kwargs["port"] = nowhere = free_port()
    await pool.disconnect()
    assert await overlap.match(runner, keyspace, [[SequenceHash(1)]]) == ([{}], [])
    assert [port for port, _ in runner.sent] == [nowhere, servers.masters[0].port]


@pytest.mark.slow
async def test_routers_and_workers_run_on_a_redis_cluster(servers):
    tokens = {
        "content": prompt(1, 256),
        "headers": {"content-type": "application/octet-stream"},
        "timeout": 10,
    }
    with kvroute.Cluster(
        num_workers=2,
        num_replicas=2,
        haproxy=False,
        redis_url=servers.url,
        router=RouterSettings(log_level="error"),
        worker=WorkerSettings(speedup=20.0, block_size=16, log_level="error"),
    ) as cluster:
        async with httpx.AsyncClient() as client:

            async def route():
                response = await client.post(f"{cluster.balancer_url}/v1/route", **tokens)
                return response.json()

            first = await route()
            assert not first["degraded"]
            asked = {"max_tokens": "4", "request_id": first["request_id"]}
            served = await client.post(f"{first['address']}/v1/completions", params=asked, **tokens)
            assert served.status_code == 200
            then = await eventually(route, lambda found: found["overlap_blocks"]["device"] > 0)
            assert then["worker_id"] == first["worker_id"]


async def test_all_masters_are_found_and_checked(redis, servers):
    assert sorted(map(port_of, await redis.masters())) == sorted(s.port for s in servers.masters)
    await check_server(redis, TIMEOUT_S)
    for server in servers.masters:
        with BlockingRedis.from_url(server.url) as master:
            master.config_set("maxmemory-policy", "allkeys-lru")
            try:
                with pytest.raises(ConfigError, match="allkeys-lru"):
                    await check_server(redis, TIMEOUT_S)
            finally:
                master.config_set("maxmemory-policy", "noeviction")


async def test_a_killed_master_affects_only_its_shard_until_its_replica_takes_over(own_servers):
    first, second, third = keyspaces(own_servers)
    async with connect(own_servers.url) as redis:
        runner = ScriptRunner(redis, TIMEOUT_S)
        await runner.run([register(keyspace) for keyspace in (first, second, third)])
        calls = [registered(keyspace) for keyspace in (first, second, third)]
        await eventually(
            lambda: keys_of(own_servers.replicas[1]), lambda keys: second["meta"].encode() in keys
        )
        own_servers.masters[1].kill()

        began = time.monotonic()
        one, lost, three = await runner.run_each(calls)
        took_s = time.monotonic() - began
        assert len(one) == len(three) == 1
        assert isinstance(lost, RedisUnavailable)
        assert took_s < TIMEOUT_S / 2, "a node that refuses connections was waited for"
        with pytest.raises(RedisUnavailable):
            await runner.run(calls)

        async def look():
            answers = await runner.run_each(calls)
            assert not isinstance(answers[0], RedisUnavailable)
            assert not isinstance(answers[2], RedisUnavailable)
            return answers

        answers = await eventually(
            look, lambda found: not isinstance(found[1], RedisUnavailable), within_s=FAILOVER_S
        )
        assert [len(answer) for answer in answers] == [1, 1, 1]
        assert (await runner.one(register(second, "b"))).incarnation == 2
        await redis.xadd(second["metrics"], {"worker": "a:0"})


@pytest.mark.slow
async def test_a_master_that_hangs_affects_only_its_shard_until_its_replica_takes_over(own_servers):
    first, second, third = keyspaces(own_servers)
    async with connect(own_servers.url, timeout_s=0.3) as redis:
        runner = ScriptRunner(redis, timeout_s=0.3)
        calls = [register(keyspace) for keyspace in (first, second, third)]
        await ScriptRunner(redis, TIMEOUT_S).run(calls)
        with stopped(own_servers.masters[1].pid):
            one, lost, three = await runner.run_each(calls)
            assert {type(one), type(three)} == {Registration}
            assert isinstance(lost, RedisUnavailable)
            assert str(lost) == "no answer within 300 ms"

            async def look():
                return (await runner.run_each(calls))[1]

            await eventually(look, lambda r: isinstance(r, Registration), within_s=FAILOVER_S)
            await redis.xadd(second["metrics"], {"worker": "a:0"})


async def keys_of(server):
    async with Redis(port=server.port) as client:
        return await client.keys()


async def node_id(client):
    found = await client.execute_command("CLUSTER MYID")
    return found.decode()


async def move_slot(slot, *, to, servers):
    """Move a slot that has no keys, as resharding does."""
    async with AsyncExitStack() as stack:
        masters = {
            server: await stack.enter_async_context(Redis(port=server.port))
            for server in servers.masters
        }
        owners = {await node_id(client): client for client in masters.values()}
        [old] = [name for name, client in owners.items() if await owns(client, slot)]
        new = await node_id(masters[to])
        # The importing node takes the slot over in a new epoch, which all nodes accept.
        await owners[new].execute_command("CLUSTER SETSLOT", slot, "IMPORTING", old)
        for name in (new, *(name for name in owners if name != new)):
            await owners[name].execute_command("CLUSTER SETSLOT", slot, "NODE", new)


async def owns(client, slot):
    ranges = await client.execute_command("CLUSTER NODES")
    [slots] = [node["slots"] for node in ranges.values() if "myself" in node["flags"]]
    return any(int(part[0]) <= slot <= int(part[-1]) for part in slots)
