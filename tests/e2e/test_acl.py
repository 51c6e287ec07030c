"""The users in deploy/users.acl may do what their part of a cluster needs, and no more."""

import asyncio
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError
from redis.retry import Retry

from app.cli import main
from app.core.keys import SHARD_KEY_TYPES
from app.core.settings.router import RouterSettings
from app.core.trust import Rung, Trust
from app.core.types import SequenceHash
from app.local.redis_server import LOOPBACK, EmbeddedRedis
from app.policy.cost import IN_FLIGHT_TOKENS
from app.policy.decision import RouteRequest
from app.router.fleet import Fleet
from app.router.metrics import Telemetry
from app.router.router import Router
from app.state.connect import check_server, connect
from app.state.scripts import ScriptRunner, load_script
from tests import fake_worker
from tests.e2e.test_healing import (
    CHAINS,
    INDEX_BLOCKS,
    KEYS,
    PROMPTS,
    SHARDS,
    agent_of,
    losses,
    short_intervals,
    world,
)
from tests.edge.conftest import started_replica
from tests.eventually import eventually
from tests.fake_worker import fake_agent
from tests.redis_servers import ClusterServers, default_kind, each_kind, require_redis

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "redis.md"
FILE = ROOT / "deploy" / "users.acl"
LUA = ROOT / "lua"
ROLES = ("worker", "router", "operator")
EVERY_RELEASES_MODELS = "kvroute:1:models*"
"""Each version of the data model has a list of its own, and during an upgrade two are in use."""
WHOLE_TEST_S = 30.0
"""A lease that no pause of a busy machine lets lapse."""

SCRIPTS = {
    "worker": {
        "activate",
        "announce",
        "apply",
        "audit",
        "claim",
        "drain",
        "fetched_late",
        "renew",
        "open_shard",
        "register",
        "retire",
    },
    "router": {
        "announce",
        "beat",
        "admit",
        "count",
        "drain",
        "sample",
        "lead",
        "propose",
        "expire",
        "extend",
        "predicted",
        "confirm_predicted",
        "withdraw_predicted",
        "retire_lapsed",
        "leave",
        "loads",
        "match",
        "answers_again",
        "predict",
        "prefill_complete",
        "prune",
        "release",
        "remember",
        "reserve",
        "suspend",
        "sweep",
        "turns",
        "vouch",
        "wait",
    },
    "operator": set(),
}
ALWAYS = {"ping", "select", "info", "cluster|slots", "asking"}
TO_RUN_SCRIPTS = {"evalsha", "script|load"}
OUTSIDE_SCRIPTS = {
    "worker": {"hgetall", "xadd", "zrangebyscore"},
    "router": {
        "exec",
        "hdel",
        "hgetall",
        "hlen",
        "hmget",
        "hset",
        "multi",
        "pexpire",
        "readonly",
        "scan",
        "unlink",
        "xadd",
        "xread",
        "xrevrange",
        "zrem",
    },
    "operator": {
        "exec",
        "hget",
        "hgetall",
        "hkeys",
        "hlen",
        "hmget",
        "hscan",
        "lrange",
        "multi",
        "readonly",
        "scan",
        "smembers",
        "time",
        "type",
        "unlink",
        "xrevrange",
        "zrange",
        "zrangebyscore",
        "zscan",
    },
}

short_intervals = short_intervals  # a fixture, which pytest finds by its name


def granted(role):
    """Key patterns and commands that the file grants a role."""
    [line] = [
        line.split()
        for line in FILE.read_text().splitlines()
        if line.startswith(f"user kvroute-{role} ")
    ]
    assert line[2:4] == ["on", "resetpass"]
    keys = {word[1:] for word in line[4:] if word.startswith("~")}
    commands = {word[1:] for word in line[4:] if word.startswith("+")}
    assert len(keys) + len(commands) == len(line) - 4
    return keys, commands


def test_every_script_belongs_to_a_role():
    assert set().union(*SCRIPTS.values()) == {path.stem for path in LUA.glob("*.lua")}


@pytest.mark.parametrize("role", ROLES)
def test_a_role_is_granted_the_commands_of_its_scripts_and_a_few_more(role):
    called = {
        command.lower().replace("', '", "|")
        for name in SCRIPTS[role]
        for command in re.findall(
            r"redis\.p?call\('([A-Z]+(?:', '[A-Z]+)?)'", load_script(name).text
        )
    }
    to_run_them = TO_RUN_SCRIPTS if SCRIPTS[role] else set()
    assert granted(role)[1] == called | to_run_them | ALWAYS | OUTSIDE_SCRIPTS[role]


def test_a_worker_is_granted_the_keys_of_its_scripts_and_the_metrics():
    named = {key for name in SCRIPTS["worker"] for key in load_script(name).key_names}
    assert granted("worker")[0] == {
        "kvroute:1:{*" + "#*" * (key in SHARD_KEY_TYPES) + "}:" + key + "*" * key.endswith(":")
        for key in (named - {"models"}) | {"metrics"}
    } | {EVERY_RELEASES_MODELS}


def test_one_substitution_confines_every_user_to_a_namespace():
    """The docs and deploy/redis.sh make it. The names of models are everybody's."""
    for role in ROLES:
        patterns = {
            pattern.replace("{*", "{prod") for pattern in granted(role)[0] - {EVERY_RELEASES_MODELS}
        }
        assert all(re.match(r"kvroute:1:\{prod(#\*)?\}:", pattern) for pattern in patterns)
    assert r"sed 's/{\*/{prod/g' deploy/users.acl" in PAGE.read_text()


def test_an_operator_may_run_every_command_of_the_questions_in_the_docs():
    asked = {c.lower() for c in re.findall(r"\brc ([A-Z]+)", PAGE.read_text())}
    assert len(asked) > 8
    assert asked <= granted("operator")[1]


class Guarded:
    """A server with the users from the file; `admin` may do everything."""

    def __init__(self, server):
        self.server = server
        self.admin = Redis.from_url(server.url)

    def url(self, role):
        return f"redis://kvroute-{role}:{role}-secret@{LOOPBACK}:{self.server.port}"


def add_users(admin, namespace="*"):
    """namespace: that the users are confined to."""
    for line in FILE.read_text().replace("{*", "{" + namespace).splitlines():
        _, name, *rules = line.split()
        if name != "default":
            role = name.removeprefix("kvroute-")
            admin.execute_command("ACL", "SETUSER", name, *rules, f">{role}-secret")


def denials(admin):
    return [
        f"{entry['username']}: {entry['reason']} {entry['object']} ({entry['context']})"
        for entry in admin.acl_log()
    ]


@pytest.fixture(params=each_kind(), scope="module")
def guarded_server(request):
    with EmbeddedRedis(require_redis(request.param)) as server:
        found = Guarded(server)
        add_users(found.admin)
        yield found
        found.admin.close()


@pytest.fixture
def guarded(guarded_server):
    guarded_server.admin.flushall()
    guarded_server.admin.acl_log_reset()
    return guarded_server


@pytest.fixture
def confined(guarded):
    for role in ROLES:
        guarded.admin.acl_setuser(f"kvroute-{role}", reset=True)
    add_users(guarded.admin, KEYS.namespace)
    yield guarded
    for role in ROLES:
        guarded.admin.acl_setuser(f"kvroute-{role}", reset=True)
    add_users(guarded.admin)


def test_redis_loads_the_file_and_then_lets_nobody_in_without_a_password(tmp_path):
    """`resetpass` keeps the roles out until they are given a password."""
    file = tmp_path / "users.acl"
    admin = "user admin on >secret ~* &* +@all\n"
    file.write_text(admin)
    server = EmbeddedRedis(require_redis(default_kind()), options=["--aclfile", str(file)])
    with server, Redis(port=server.port, retry=Retry(NoBackoff(), 0)) as nobody:
        assert nobody.ping()
        file.write_text(admin + FILE.read_text())
        with Redis(port=server.port, username="admin", password="secret") as redis:
            redis.acl_load()
        nobody.connection_pool.disconnect()
        with pytest.raises(AuthenticationError):
            nobody.ping()
        for role in ROLES:
            with pytest.raises(AuthenticationError):
                nobody.execute_command("AUTH", f"kvroute-{role}", "")


@pytest.mark.parametrize(
    "families",
    [
        ("meta",),  # whose loss makes everything be written again
        pytest.param(("load", "prefills", "leases"), marks=pytest.mark.slow),
        pytest.param(("shard", "blocks"), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
async def test_workers_and_routers_are_refused_nothing_even_while_they_replace_what_was_lost(
    guarded, families
):
    async with world(
        guarded.server.url, agents_url=guarded.url("worker"), router_url=guarded.url("router")
    ) as cluster:
        for family in families:
            for name, loss in losses(family).items():
                await cluster.suffers(f"{family}, {name}", loss)
        agent = cluster.agents["w0"]
        await check_server(agent._runner.redis, 10.0)
        await check_server(cluster.router.fleet._redis, 10.0)
        await cluster.leave("w0")
    assert denials(guarded.admin) == []


async def test_a_routers_console_is_refused_nothing(guarded):
    api = "/console/api"
    async with (
        connect(guarded.url("worker")) as as_worker,
        started_replica(guarded.url("router")) as client,
    ):
        agent = fake_agent(ScriptRunner(as_worker, 10.0), fake_worker.KEYS, "w0")
        await agent.start()
        running = asyncio.ensure_future(agent.run())
        body = {"token_ids": list(range(64)), "request_id": "r1", "explain": True}

        async def routed():
            return (await client.post("/v1/route", json=body)).status_code

        await eventually(routed, lambda status: status == 200)
        for path in ("overview", "workers", "workers/w0:0", "history", "events", "funnel"):
            assert (await client.get(f"{api}/{path}")).status_code == 200, path

        async def explained():
            return (await client.get(f"{api}/explain/r1")).status_code

        await eventually(explained, lambda status: status == 200)
        headers = {"x-kvroute-console": "1"}
        drained = await client.post(f"{api}/drain", json={"worker": "w0"}, headers=headers)
        assert drained.status_code == 200, drained.text

        async def listed():
            return (await client.get(f"{api}/decisions")).json()["rows"]

        # What was read before the decision was recorded is kept for a moment.
        await eventually(listed, bool)
        assert (await client.get(f"{api}/waiting")).status_code == 200
        running.cancel()
        await asyncio.wait([running])
    assert denials(guarded.admin) == []


async def test_predictions_are_recorded_and_pruned(guarded):
    settings = RouterSettings(namespace=KEYS.namespace, prediction_ttl_s=1.0, reservation_ttl_s=1.0)
    async with connect(guarded.url("worker")) as as_worker, connect(guarded.url("router")) as redis:
        agents = [
            fake_agent(
                *(ScriptRunner(as_worker, timeout_s=10.0), KEYS, name),
                lease_ttl_s=WHOLE_TEST_S,
                index_blocks=INDEX_BLOCKS,
                shards=SHARDS,
                kv_total_blocks=IN_FLIGHT_TOKENS,
                rung=Rung(trust),
            )
            for name, trust in (("w0", Trust.APPROXIMATE), ("w1", Trust.EXACT))
        ]
        for agent in agents:
            await agent.start()
        fleet = Fleet(redis, KEYS, 10.0)
        router = Router(ScriptRunner(redis, 10.0), KEYS, settings, fleet, Telemetry())
        running = [asyncio.ensure_future(one.run()) for one in (*agents, router)]
        await router.refresh()
        chain = [SequenceHash(n) for n in range(1, IN_FLIGHT_TOKENS + 1)]

        async def told_of(worker, other, keys):
            async def found():
                return guarded.admin.keys(keys)

            without = frozenset({other})
            asks = RouteRequest(worker, chain, IN_FLIGHT_TOKENS, "latency", exclude=without)
            assert (await router.route(asks)).reserved
            await eventually(found)

        await told_of("w1", "w0", "*:computing:*")
        assert await router.release("w1")
        await told_of("w0", "w1", "*:predicted:*")

        async def predicted():
            return guarded.admin.keys("*:predicted:*")

        # Pruning visits all buckets within 32 s.
        await eventually(predicted, lambda keys: not keys, within_s=60.0)
        for task in running:
            task.cancel()
        await asyncio.wait(running)
    assert denials(guarded.admin) == []


async def test_requests_may_wait_and_sessions_are_remembered(guarded):
    settings = RouterSettings(namespace=KEYS.namespace, wait_queue=10, session_affinity=0.5)
    async with connect(guarded.url("worker")) as as_worker, connect(guarded.url("router")) as redis:
        agent = agent_of("w0", as_worker, WHOLE_TEST_S)
        await agent.start()
        fleet = Fleet(redis, KEYS, 10.0)
        router = Router(ScriptRunner(redis, 10.0), KEYS, settings, fleet, Telemetry())
        running = [asyncio.ensure_future(agent.run()), asyncio.ensure_future(router.run())]
        requests = [
            RouteRequest(f"r{n}", CHAINS[0], len(PROMPTS[0]), "latency", session="s")
            for n in range(agent.info.max_requests + 2)
        ]
        decisions = [asyncio.ensure_future(router.route(request)) for request in requests]

        async def waiting():
            return int(guarded.admin.zcard(KEYS["waiting:normal:"]))

        await eventually(waiting, lambda found: found == 2)
        for request in requests[:2]:
            await router.release(request.request_id)
        assert all(d.reserved for d in await asyncio.gather(*decisions))
        assert guarded.admin.hkeys(KEYS["sessions"]) == [b"s"]
        for task in running:
            task.cancel()
        await asyncio.wait(running)
    assert denials(guarded.admin) == []


async def test_an_operator_may_inspect_and_reset(guarded, tmp_path):
    text = tmp_path / "prompt.json"
    text.write_text(str(PROMPTS[0]))

    async def kvroute(role, *arguments):
        where = ["--redis-url", guarded.url(role), "--namespace", KEYS.namespace]
        result = await asyncio.to_thread(CliRunner().invoke, main, [*arguments, *where])
        assert result.exit_code == 0, result.output
        return result.output

    async with world(
        guarded.server.url, agents_url=guarded.url("worker"), router_url=guarded.url("router")
    ):
        assert "unique blocks" in await kvroute("operator", "inspect", "summary")
        assert "w1" in await kvroute("operator", "inspect", "block", f"{CHAINS[0][0]:016x}")
        assert "w1" in await kvroute("operator", "inspect", "worker", "w1")
        assert "w1" in await kvroute("operator", "inspect", "prefix", str(text))
        assert "no prompt was routed" in await kvroute("operator", "inspect", "funnel")
        assert "no requests are waiting" in await kvroute("operator", "inspect", "waiting")
        assert "no contradictions found" in await kvroute("operator", "inspect", "verify")
    await kvroute("operator", "reset", "--yes")
    assert guarded.admin.dbsize() == 0
    assert denials(guarded.admin) == []


async def test_users_may_be_confined_to_one_namespace(confined):
    url = confined.server.url
    as_worker, as_router = confined.url("worker"), confined.url("router")
    async with world(url, agents_url=as_worker, router_url=as_router) as cluster:
        for name, loss in losses("meta").items():
            await cluster.suffers(f"meta, {name}", loss)
    assert denials(confined.admin) == []
    confined.admin.hset("kvroute:1:{other}:meta", "block_size", "16")
    confined.admin.hset(f"kvroute:1:{{{KEYS.namespace}2}}:meta", "block_size", "16")
    for role in ROLES:
        with Redis.from_url(confined.url(role)) as client:
            assert client.hget(KEYS["meta"], "block_size")
            for key in (
                "kvroute:1:{other}:meta",
                "kvroute:1:{other#0}:blocks:0",
                f"kvroute:1:{{{KEYS.namespace}2}}:meta",
                f"kvroute:1:{{{KEYS.namespace}2#0}}:blocks:0",
            ):
                with pytest.raises(NoPermissionError):
                    client.hget(key, "block_size")


LOOP = "while true do end"


@pytest.mark.parametrize(
    "command",
    [
        ("EVAL", LOOP, "0"),
        ("EVAL_RO", LOOP, "0"),
        ("SCRIPT", "LOAD", LOOP),
        ("EVALSHA", load_script("match").sha, "0"),
        ("EVALSHA_RO", load_script("match").sha, "0"),
        ("FUNCTION", "LOAD", f"#!lua name=a\n{LOOP}"),
        ("FCALL", "a", "0"),
        ("FCALL_RO", "a", "0"),
        ("WAIT", "1", "0"),
        ("BLPOP", KEYS["prefills:1"], "0"),
        ("CLIENT", "PAUSE", "5000"),
    ],
    ids=lambda command: " ".join(command[:2]).lower()[:12],
)
def test_an_operator_runs_no_script_and_nothing_that_blocks(guarded, command):
    # Of COMMAND INFO, redis-py cannot read what an older Redis says of a command it does not have.
    refusal = NoPermissionError if command[0].lower() in guarded.admin.command() else ResponseError
    with Redis.from_url(guarded.url("operator")) as client, pytest.raises(refusal):
        client.execute_command(*command)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    "command",
    [
        "FLUSHALL",
        "CONFIG GET maxmemory",
        "ACL LIST",
        "KEYS *",
        "SHUTDOWN NOSAVE",
        "EVAL return(1) 0",
        "HGET sessions:1 a",
        "DEL sessions:1",
        "UNLINK sessions:1",
        "SCRIPT FLUSH",
        "CLIENT KILL 1.2.3.4:5",
    ],
)
def test_no_role_may_run_admin_commands_or_reach_other_keys(guarded, role, command):
    with (
        Redis.from_url(guarded.url(role)) as client,
        pytest.raises(NoPermissionError),
    ):
        client.execute_command(*command.split())


@pytest.mark.parametrize(
    ("role", "command"),
    [
        ("worker", "SCAN 0"),
        ("worker", "UNLINK kvroute:1:{default}:load"),
        ("worker", "HSET kvroute:1:{default#0}:predictions cutoff a"),
        ("worker", "DEL kvroute:1:{default#0}:sweep"),
        ("worker", "XADD kvroute:1:{default}:decisions * request_id r1"),
        ("operator", "HSET kvroute:1:{default}:load 1 x"),
        ("operator", "HDEL kvroute:1:{default#0}:blocks:0 00"),
        ("operator", "DEL kvroute:1:{default}:load"),
    ],
)
def test_no_role_may_do_the_work_of_another(guarded, role, command):
    with Redis.from_url(guarded.url(role)) as client, pytest.raises(NoPermissionError):
        client.execute_command(*command.split())


async def test_the_same_users_suffice_on_a_redis_cluster():
    with ClusterServers(default_kind()) as servers:
        admins = [Redis.from_url(server.url) for server in servers.servers]
        for admin in admins:
            add_users(admin)
        urls = {
            role: servers.url.replace("://", f"://kvroute-{role}:{role}-secret@") for role in ROLES
        }
        async with (
            connect(urls["worker"]) as as_worker,
            connect(urls["router"]) as redis,
        ):
            agent = agent_of("w0", as_worker, WHOLE_TEST_S)
            await agent.start()
            running = asyncio.ensure_future(agent.run())
            fleet = Fleet(redis, KEYS, 10.0)
            settings = RouterSettings(namespace=KEYS.namespace)
            runner = ScriptRunner(redis, 10.0, on_replicas=["match"])
            router = Router(runner, KEYS, settings, fleet, Telemetry())
            maintaining = asyncio.ensure_future(router.run())
            for n, chain in enumerate(CHAINS):
                request = RouteRequest(f"r{n}", chain, len(PROMPTS[0]), "latency")
                decision = await router.route(request)
                assert decision.reserved
                assert not decision.degraded
            running.cancel()
            maintaining.cancel()
            await asyncio.wait([running, maintaining])
        for admin in admins:
            assert denials(admin) == []
            admin.close()
