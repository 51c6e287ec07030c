import re
from unittest.mock import ANY

import pytest

from app.core.errors import RedisFull, RedisUnavailable
from app.core.keys import Keyspace
from app.core.loads import Reservation
from app.core.types import Incarnation, SequenceHash, Tier, WorkerKey
from app.core.worker_report import WorkerInfo
from app.http.server import listen
from app.local.redis_server import EmbeddedRedis, free_port
from app.state import index, leases, reservations
from app.state.connect import connect
from app.state.index import Change
from app.state.scripts import ScriptRunner, call, command, load_script
from tests.redis_servers import each_kind, require_redis, stopped

KEYS = Keyspace("test")
REGISTER = leases.register(
    KEYS, WorkerInfo(WorkerKey("a"), "http://a", 4, 1000, 256), "nonce", ttl_ms=60_000
)
ACTIVATE = leases.activate(KEYS, WorkerKey("a"), Incarnation(1), "nonce")
LOADS = reservations.loads(KEYS)
WISH = Reservation(
    "r1",
    prefill_tokens=100,
    prefill_us=5000,
    blocks=7,
    incarnation=Incarnation(1),
    max_requests=256,
)
RESERVE = reservations.reserve(KEYS, [WISH], ttl_ms=60_000)
BLOCK = SequenceHash(7)
RELEASE = reservations.release(KEYS, [reservations.Release("r1")])


@pytest.fixture
async def own_redis(own_redis_server):
    async with connect(own_redis_server.url) as client:
        yield client


async def test_no_calls_ask_no_server():
    with listen("127.0.0.1", 0) as listening:
        listening.setblocking(False)
        async with connect(f"redis://127.0.0.1:{listening.getsockname()[1]}") as client:
            assert await ScriptRunner(client, timeout_s=0.1).run([]) == []
        with pytest.raises(BlockingIOError):
            listening.accept()


def test_includes_are_pasted_into_a_script():
    text = load_script("renew").text
    assert "@include" not in text
    assert text.count("local function now_ms()") == 1
    assert text.startswith("-- renew: ")


def test_a_call_passes_the_keys_of_the_scripts_header_in_its_order():
    one = call("apply", KEYS.of_shard(3), 7, "nonce", 1, "", parse=bool)
    assert one.keys == (
        "kvroute:1:{test#3}:shard",
        "kvroute:1:{test#3}:applied",
        "kvroute:1:{test#3}:blocks:",
    )
    assert one.args == (7, "nonce", 1, "")


async def test_replies_come_in_the_order_of_the_calls(redis):
    runner = ScriptRunner(redis, timeout_s=5)
    replies = await runner.run([REGISTER, ACTIVATE, RESERVE, RELEASE, RELEASE])
    assert replies == [
        leases.Registration(Incarnation(1), predecessor_lives=False, shards=1),
        True,
        [None],
        ["-"],
        [None],
    ]
    assert await runner.run([]) == []


async def test_calls_succeed_after_redis_has_lost_its_scripts(redis):
    runner = ScriptRunner(redis, timeout_s=5)
    await runner.run([REGISTER, ACTIVATE, RESERVE, LOADS, RELEASE])
    await redis.script_flush()
    assert (await runner.one(LOADS)).loads[Incarnation(1)].requests == 0


async def test_every_call_runs_once_even_if_redis_lacks_some_scripts(redis):
    runner = ScriptRunner(redis, timeout_s=5)
    await runner.run([REGISTER, ACTIVATE])
    await redis.script_flush()
    await runner.one(LOADS)
    seen, reserved, seen_too, released, again = await runner.run(
        [LOADS, RESERVE, LOADS, RELEASE, RESERVE]
    )
    assert seen.loads.keys() == seen_too.loads.keys() == {Incarnation(1)}
    assert (reserved, released, again) == ([None], ["-"], [None])
    load = (await runner.one(LOADS)).loads[Incarnation(1)]
    assert (load.requests, load.total) == (1, 2)


async def test_a_plain_command_is_sent_in_the_same_round_trip_as_scripts(redis):
    sent = []

    class Recording(ScriptRunner):
        async def _send(self, node, calls, until_s):
            sent.append([c.name for c in calls])
            return await super()._send(node, calls, until_s)

    runner = Recording(redis, timeout_s=5)
    await runner.one(REGISTER)
    await runner.one(ACTIVATE)
    await redis.script_flush()
    sent.clear()
    absent = leases.absent(KEYS, [Incarnation(1), Incarnation(2)])
    seen, found, seen_too = await runner.run([LOADS, absent, LOADS])
    assert seen.loads.keys() == seen_too.loads.keys() == {Incarnation(1)}
    assert found == [2]
    assert sent == [["loads", "absent", "loads"], ["loads", "loads"]]


async def test_a_plain_command_s_error_names_its_operation(redis):
    await redis.set(KEYS["writers"], "no hash")
    with pytest.raises(RedisUnavailable, match=r"^absent: .*WRONGTYPE"):
        await ScriptRunner(redis, timeout_s=5).one(leases.absent(KEYS, [Incarnation(1)]))


async def test_an_error_reply_means_that_redis_is_unavailable(redis):
    runner = ScriptRunner(redis, timeout_s=5)
    await runner.one(REGISTER)
    await redis.set(KEYS["leases"], "no zset")
    with pytest.raises(RedisUnavailable, match=r"loads: .*WRONGTYPE"):
        await runner.one(LOADS)


async def test_a_full_redis_answers_redis_full_and_stores_no_blocks(redis_client):
    runner, shard, inc = ScriptRunner(redis_client, timeout_s=5), KEYS.of_shard(0), Incarnation(1)
    await runner.run([REGISTER, index.open_shard(shard, inc, "nonce", 4), ACTIVATE])
    store = index.apply(shard, inc, "nonce", 1, [Change(BLOCK, Tier.DEVICE, BLOCK)])
    await redis_client.config_set("maxmemory", "1")
    try:
        made, refused, released = await runner.run_each([RESERVE, store, RELEASE])
        assert made == [None]
        assert isinstance(refused, RedisFull)
        assert "apply: " in str(refused)
        assert "maxmemory" in str(refused)
        assert released
        assert await redis_client.keys(shard["blocks:*"]) == []
    finally:
        await redis_client.config_set("maxmemory", "0")


async def test_a_call_that_fails_does_not_affect_the_answers_to_the_others(redis):
    runner = ScriptRunner(redis, timeout_s=5)
    await runner.run([REGISTER, ACTIVATE])
    await redis.set(KEYS["metrics"], "no script touches this")
    await redis.set(KEYS["reservations"], "no hash")
    seen, lost, seen_too = await runner.run_each([LOADS, RELEASE, LOADS])
    assert seen.loads.keys() == seen_too.loads.keys() == {Incarnation(1)}
    assert isinstance(lost, RedisUnavailable)
    # Up to 6.2, Redis puts the place in the script first.
    assert re.match("release: .*WRONGTYPE", str(lost))


@pytest.mark.parametrize("kind", each_kind())
async def test_a_write_that_a_replica_refuses_is_resent_once_it_is_master(kind):
    class Promoting(ScriptRunner):
        promote = False

        async def _send(self, node, calls, until_s):
            replies = await super()._send(node, calls, until_s)
            if self.promote:
                await node.client.replicaof("NO", "ONE")
            return replies

    with EmbeddedRedis(require_redis(kind)) as server:
        async with connect(server.url) as redis:
            runner = Promoting(redis, timeout_s=5)
            await runner.run([REGISTER, ACTIVATE, RESERVE, RELEASE, LOADS])
            await redis.replicaof("127.0.0.1", str(free_port()))
            seen, refused = await runner.run_each([LOADS, RESERVE])
            assert seen.loads.keys() == {Incarnation(1)}
            assert isinstance(refused, RedisUnavailable)
            assert "read only replica" in str(refused)
            runner.promote = True
            remember = command("remember", "HSET", KEYS["sessions"], "a", "1 7", parse=int)
            assert await runner.run([LOADS, remember, RESERVE]) == [ANY, 1, [None]]
            assert (await runner.one(LOADS)).loads[Incarnation(1)].requests == 1


def test_only_scripts_that_do_not_write_may_be_sent_to_replicas(redis):
    ScriptRunner(redis, timeout_s=5, on_replicas=["match", "loads"])
    with pytest.raises(AssertionError, match="reserve writes"):
        ScriptRunner(redis, timeout_s=5, on_replicas=["match", "reserve"])


async def test_without_a_replica_the_master_is_read(redis):
    runner = ScriptRunner(redis, timeout_s=5, on_replicas=["loads"])
    await runner.run([REGISTER, ACTIVATE])
    assert (await runner.one(LOADS)).loads.keys() == {Incarnation(1)}


async def test_a_redis_that_does_not_answer_in_time_is_unavailable(own_redis_server, own_redis):
    await ScriptRunner(own_redis, timeout_s=5).run([REGISTER, ACTIVATE])
    with (
        stopped(own_redis_server.pid),
        pytest.raises(RedisUnavailable, match="no answer within 100 ms"),
    ):
        await ScriptRunner(own_redis, timeout_s=0.1).run([LOADS, LOADS])
    # The late answers must not be taken for answers to a later call.
    assert await ScriptRunner(own_redis, timeout_s=5).run([RESERVE, RELEASE]) == [[None], ["-"]]


async def test_a_redis_that_cannot_be_reached_is_unavailable():
    async with connect(f"redis://127.0.0.1:{free_port()}/0") as nowhere:
        with pytest.raises(RedisUnavailable, match="ConnectionError"):
            await ScriptRunner(nowhere, timeout_s=5).one(LOADS)


async def test_a_redis_that_was_killed_is_used_again_once_it_is_back(own_redis_server, own_redis):
    runner = ScriptRunner(own_redis, timeout_s=5)
    await runner.one(REGISTER)
    own_redis_server.kill()
    with pytest.raises(RedisUnavailable):
        await runner.one(LOADS)
    own_redis_server.start()
    registered = leases.Registration(Incarnation(1), predecessor_lives=False, shards=1)
    assert await runner.one(REGISTER) == registered
