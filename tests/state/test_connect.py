from __future__ import annotations

import asyncio
import subprocess
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import (
    ConnectionError,  # noqa: A004
    ResponseError,
)

from app.core.errors import ConfigError, RedisUnavailable
from app.local.redis_server import LOOPBACK, EmbeddedRedis, free_port
from app.state.connect import check_server, connect, deadline
from loadtest.topologies import SERVICE
from tests.redis_servers import default_kind, require_binary, require_redis

USER, PASSWORD = "router", "p@ss/w?rd#1:%"
IN_URL = "router:p%40ss%2Fw%3Frd%231%3A%25@"


@dataclass(frozen=True, slots=True)
class Certificate:
    """Self-signed, for 127.0.0.1. key, certificate: PEM files."""

    key: Path
    certificate: Path

    def options(self, port):
        """Options with which a server also takes TLS connections, on `port`."""
        of_server = f"--tls-port {port} --tls-auth-clients no --tls-replication yes"
        files = f"--tls-key-file {self.key} --tls-cert-file {self.certificate}"
        return f"{of_server} {files} --tls-ca-cert-file {self.certificate}".split()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    made = Certificate(folder / "key.pem", folder / "certificate.pem")
    command = [require_binary("openssl"), "req", "-x509", "-nodes", "-days", "1"]
    command += ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    command += ["-subj", "/CN=kvroute test", "-addext", f"subjectAltName=IP:{LOOPBACK}"]
    command += ["-keyout", made.key, "-out", made.certificate]
    subprocess.run(command, check=True, capture_output=True)
    return made


@pytest.fixture
async def guarded(redis, one_redis_server):
    """A server with the user USER."""
    await redis.acl_setuser(
        USER, enabled=True, passwords=[f"+{PASSWORD}"], keys="*", categories=["+@all"]
    )
    yield one_redis_server
    await redis.acl_deluser(USER)


@pytest.mark.parametrize("database", ["", "/", "/0"])
async def test_a_server_is_reached_by_its_url(one_redis_server, database):
    async with connect(f"redis://{LOOPBACK}:{one_redis_server.port}{database}") as redis:
        assert await redis.ping()


async def test_a_database_is_chosen_in_the_path(one_redis_server):
    async with (
        connect(f"redis://{LOOPBACK}:{one_redis_server.port}/3") as three,
        connect(f"redis://{LOOPBACK}:{one_redis_server.port}/?db=3") as also_three,
        connect(one_redis_server.url) as zero,
    ):
        await three.set("a", "1")
        assert await also_three.get("a") == b"1"
        assert await zero.get("a") is None


async def test_a_unix_socket_is_reached_by_its_url(tmp_path):
    path = tmp_path / "redis.sock"
    options = ["--unixsocket", str(path)]
    with EmbeddedRedis(require_redis(default_kind()), options=options):
        async with connect(f"unix://{path}?db=2") as redis:
            assert await redis.ping()


async def test_user_and_password_are_percent_decoded(guarded):
    async with connect(f"redis://{IN_URL}{LOOPBACK}:{guarded.port}/0") as redis:
        assert await redis.acl_whoami() == USER


async def test_a_wrong_password_is_reported_without_showing_it(guarded):
    async with connect(f"redis://router:secret@{LOOPBACK}:{guarded.port}/0") as redis:
        with pytest.raises(RedisUnavailable, match="AuthenticationError") as refused:
            await check_server(redis, timeout_s=5)
    assert "secret" not in str(refused.value)


async def test_tls_connects_only_to_a_server_with_a_trusted_certificate(certificate):
    port = free_port()
    with EmbeddedRedis(require_redis("redis-7"), options=certificate.options(port)):
        url = f"rediss://{LOOPBACK}:{port}/0"
        async with connect(f"{url}?ssl_ca_certs={certificate.certificate}") as redis:
            assert await redis.ping()
        async with connect(url) as redis:
            with pytest.raises(RedisUnavailable, match="certificate verify failed"):
                await check_server(redis, timeout_s=5)


async def test_a_cluster_over_tls_is_unavailable_until_its_slots_are_assigned(certificate):
    port = free_port()
    options = [*certificate.options(port), "--tls-cluster", "yes", "--cluster-enabled", "yes"]
    options += ["--cluster-port", str(free_port())]
    with EmbeddedRedis(require_redis("redis-7"), options=options) as server:
        url = f"rediss+cluster://{LOOPBACK}:{port}?ssl_ca_certs={certificate.certificate}"
        async with connect(url) as redis:
            with pytest.raises(RedisUnavailable, match=f"{LOOPBACK}:{port} knows no slots"):
                await check_server(redis, timeout_s=5)
            async with Redis(port=server.port) as node:
                await node.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
            await redis.refresh()
            [master] = await redis.masters()
            assert master.connection_pool.connection_kwargs["port"] == port
            assert await master.ping()


async def test_a_sentinel_and_its_master_are_reached_over_tls_with_different_passwords(
    certificate, tmp_path
):
    binary = require_redis("redis-7")
    port, sentinel_port = free_port(), free_port()
    config = tmp_path / "sentinel.conf"
    config.write_text(
        f"sentinel monitor {SERVICE} {LOOPBACK} {port} 1\nsentinel auth-pass {SERVICE} master-pw\n"
    )
    master = EmbeddedRedis(binary, options=certificate.options(port))
    sentinel = EmbeddedRedis(
        binary, options=[str(config), "--sentinel", *certificate.options(sentinel_port)]
    )
    with master, sentinel:
        for server, password in ((master, "master-pw"), (sentinel, "sentinel-pw")):
            async with Redis(port=server.port) as client:
                await client.execute_command("ACL SETUSER", "default", "resetpass", f">{password}")
        options = f"ssl_ca_certs={certificate.certificate}&sentinel_password=sentinel-pw"
        hosts = f"{LOOPBACK}:{sentinel_port}"
        async with connect(f"rediss+sentinel://:master-pw@{hosts}/{SERVICE}?{options}") as redis:
            assert await redis.ping()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nonsense", "'nonsense': must begin with one of redis://, rediss://, unix://, "),
        ("redis", "'redis': must begin with one of "),
        ("http://host", "'http://host': must begin with one of "),
        ("unix+cluster:///path", "must begin with one of "),
        (
            "redis+sentinel://host:26379",
            "'redis+sentinel://host:26379': the service name is missing",
        ),
        ("redis+sentinel://a,b/service/x", "database 'x' is not a number"),
        (
            "redis+cluster://a,b:7001/2",
            "'redis+cluster://a,b:7001/2': a Cluster has no numbered databases",
        ),
        ("redis://a,b/0", "redis:// takes one host"),
        ("redis://host/zero", "'redis://host/zero': database 'zero' is not a number"),
        ("redis://host:0/0", "redis://...: write hosts as name or name:port"),
        ("redis://host:65536/0", "redis://...: write hosts as name or name:port"),
        ("redis+cluster://a,,b", r"redis+cluster://...: write hosts as name or name:port"),
        ("redis://host?socket_keepalive_options=x&nonsense=1", "argument 'nonsense'"),
        ("redis+cluster://host?nonsense=1", "argument 'nonsense'"),
        ("redis+sentinel://host/service?nonsense=1", "argument 'nonsense'"),
        ("redis://host?max_connections=many", "Invalid value for 'max_connections'"),
    ],
)
def test_a_bad_url_is_refused_with_the_reason(url, message):
    with pytest.raises(ConfigError, match="REDIS_URL") as refused:
        connect(url)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "router:secret@host:6379",
        "http://router:secret@host",
        "redis://router:secret@host/zero",
        "redis://:secret?@host/0",
        "redis://:secret/0",
        "redis+cluster://:sec/secret@a:7000,b:x",
        "redis+sentinel://router:secret@host",
        "redis+sentinel://host?sentinel_password=secret",
        "redis+cluster://router:secret@host/1?password=secret",
        "redis://router:secret@host?nonsense=secret",
    ],
)
def test_a_bad_url_is_refused_without_showing_its_password(url):
    with pytest.raises(ConfigError) as refused:
        connect(url)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("a", ("a", 6379)),
        ("a:7000", ("a", 7000)),
        ("[::1]", ("::1", 6379)),
        ("[::1]:7000", ("::1", 7000)),
        ("", ("localhost", 6379)),
    ],
)
async def test_hosts_may_be_names_or_ipv6_addresses(host, address):
    for scheme in ("redis", "redis+cluster"):
        async with connect(f"{scheme}://{host}") as redis:
            chosen = redis.connection_pool.connection_kwargs
            assert (chosen["host"], chosen["port"]) == address


@pytest.fixture
def server_with_policy(request):
    options = ["--maxmemory-policy", request.param]
    with EmbeddedRedis(require_redis(default_kind()), options=options) as server:
        yield server


@pytest.mark.parametrize(
    "server_with_policy", ["allkeys-lru", "allkeys-lfu", "allkeys-random"], indirect=True
)
async def test_a_redis_that_would_evict_our_keys_is_refused(server_with_policy):
    async with connect(server_with_policy.url) as redis:
        with pytest.raises(ConfigError, match=r"maxmemory-policy allkeys-\w+: .* noeviction"):
            await check_server(redis, timeout_s=5)


@pytest.mark.parametrize("server_with_policy", ["noeviction", "volatile-lru"], indirect=True)
async def test_a_redis_that_evicts_no_keys_without_a_ttl_is_accepted(server_with_policy):
    async with connect(server_with_policy.url) as redis:
        await check_server(redis, timeout_s=5)


async def test_a_redis_that_does_not_disclose_its_policy_is_accepted_with_a_warning(
    guarded, redis, caplog
):
    await redis.acl_setuser(USER, enabled=True, commands=["-info"])
    async with connect(f"redis://{IN_URL}{LOOPBACK}:{guarded.port}/0") as client:
        await check_server(client, timeout_s=5)
    assert "version and maxmemory-policy were not checked" in caplog.text


@pytest.mark.parametrize(("version", "refused"), [("6.0.16", True), ("6.2.0", False)])
async def test_a_redis_that_is_too_old_is_refused(version, refused):
    async def serve(reader, writer):
        info = f"redis_version:{version}".encode()
        while await reader.read(1000):
            writer.write(b"$%d\r\n%b\r\n" % (len(info), info))
        writer.close()

    async with await asyncio.start_server(serve, LOOPBACK) as server:
        port = server.sockets[0].getsockname()[1]
        async with connect(f"redis://{LOOPBACK}:{port}/0") as redis:
            with (
                pytest.raises(ConfigError, match=r"6\.0\.16; needs 6\.2")
                if refused
                else nullcontext()
            ):
                await check_server(redis, timeout_s=5)


async def test_a_command_whose_connection_failed_is_not_sent_again():
    received = []

    async def serve(reader, writer):
        received.append(await reader.read(1000))
        writer.close()

    async with await asyncio.start_server(serve, LOOPBACK) as server:
        port = server.sockets[0].getsockname()[1]
        async with connect(f"redis://{LOOPBACK}:{port}/0") as redis:
            with pytest.raises(ConnectionError):
                await redis.execute_command("INCR", "a")
    assert received == [b"*2\r\n$4\r\nINCR\r\n$1\r\na\r\n"]


async def test_checking_an_unreachable_redis_raises_redis_unavailable():
    async with connect(f"redis://{LOOPBACK}:{free_port()}/0") as redis:
        with pytest.raises(RedisUnavailable, match="ConnectionError"):
            await check_server(redis, timeout_s=5)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ResponseError("no"), "ResponseError: no"),
        (ConnectionResetError("cut"), "ConnectionResetError: cut"),
        (TimeoutError("of a socket"), "TimeoutError: of a socket"),
    ],
)
async def test_a_deadline_reports_connection_and_redis_errors_as_redis_unavailable(error, message):
    with pytest.raises(RedisUnavailable, match=f"^{message}$"):
        async with deadline(60):
            raise error


async def test_a_deadline_leaves_other_errors_alone():
    with pytest.raises(ValueError, match="not Redis's"):
        async with deadline(60):
            raise ValueError("not Redis's")


async def test_of_two_nested_deadlines_the_earlier_one_applies():
    with pytest.raises(RedisUnavailable, match=r"^no answer within 20 ms$"):
        async with deadline(60), deadline(0.02):
            await asyncio.sleep(60)
    with pytest.raises(RedisUnavailable, match=r"^no answer within 20 ms$"):
        async with deadline(0.02), deadline(60):
            await asyncio.sleep(60)


async def test_a_deadline_that_has_already_passed_ends_a_wait_at_once():
    with pytest.raises(RedisUnavailable, match=r"^no answer within 0 ms$"):
        async with deadline(0):
            await asyncio.sleep(60)


async def test_a_cancellation_before_the_deadline_remains_a_cancellation():
    async def wait():
        async with deadline(60):
            await asyncio.sleep(60)

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
