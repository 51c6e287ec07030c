"""Connections to Redis: one server, Sentinel or Cluster, with or without TLS; their deadline."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, cast
from urllib.parse import unquote

from redis.asyncio.connection import SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoPermissionError, RedisError

from app.core.errors import ConfigError, RedisUnavailable
from app.state.client import Address, RedisClient
from app.state.cluster import ClusterClient
from app.state.round_trip import SharingPool
from app.state.sentinel import SentinelClient, Sentinels

log = logging.getLogger(__name__)

SCHEMES = (
    "redis",
    "rediss",
    "unix",
    "redis+sentinel",
    "rediss+sentinel",
    "redis+cluster",
    "rediss+cluster",
)
OLDEST = (6, 2)
"""Oldest version of Redis that knows all commands of the scripts."""
DEFAULT_PORT = {"sentinel": 26379}
HOST = re.compile(r"(?:\[(?P<ipv6>[0-9A-Fa-f:.]+)\]|(?P<name>[^:\[\]]+))(?::(?P<port>\d{1,5}))?")
PATIENCE = 0.1
"""Fraction of the timeout for which one node or sentinel is waited for before others will do."""


@dataclass(frozen=True, slots=True)
class _Target:
    """Parts of a URL. topology: "", "sentinel" or "cluster". path: without slashes around it.
    options: for redis-py's connections."""

    topology: str
    hosts: list[Address]
    path: str
    options: dict[str, Any]


def connect(url: str, *, max_connections: int = 16, timeout_s: float = 2.0) -> RedisClient:
    """Returns a client of the Redis at `url`, which connects when first used.

        redis://[user:password@]host[:6379][/db], rediss:// with TLS, unix:///path
        redis+sentinel://[user:password@]host[:26379],.../service[/db], rediss+sentinel://
        redis+cluster://[user:password@]host[:6379],..., rediss+cluster://

    Options may follow a `?`: those of redis-py's connections (ssl_ca_certs, ssl_certfile, ...), and
    sentinel_username and sentinel_password, without which the sentinels are asked anonymously.

    max_connections: to each server, beside the one that scripts share; when all are in use, callers
    wait for one. timeout_s: bounds connecting and waiting for a free connection; a caller's own
    deadline bounds the rest. After that deadline, no command is resent behind the caller's back.
    Raises ConfigError for an invalid URL, without showing the password.
    """
    target = _parse(url)
    options = {
        "max_connections": max_connections,
        "timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        # redis-py's own deadline, 5 s by default, uses asyncio.wait_for, which may swallow a
        # cancellation on Python 3.11.
        "socket_timeout": None,
        "socket_keepalive": True,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
        # Otherwise each connection begins with CLIENT SETINFO, which ACLs would have to allow.
        "driver_info": None,
        **target.options,
    }
    try:
        client = _client(target, options, timeout_s * PATIENCE)
        pool: Any = client.connection_pool
        pool.make_connection()  # refuses unknown options
    except (TypeError, ValueError, RedisError) as error:
        raise ConfigError(f"REDIS_URL {shown_url(url)!r}: {error}") from None
    return client


def _client(target: _Target, options: dict[str, Any], patience_s: float) -> RedisClient:
    if target.topology == "cluster":
        if target.path not in ("", "0"):
            raise ValueError("a Cluster has no numbered databases")
        return ClusterClient(target.hosts, options, patience_s)
    if target.topology == "sentinel":
        service, _, db = target.path.partition("/")
        if not service:
            raise ValueError("the service name is missing: redis+sentinel://host,host/service")
        return _sentinel_client(target.hosts, service, options | _db(db), patience_s)
    if "path" in options:
        del options["socket_keepalive"]
    pool = SharingPool(**(options | _db(target.path)))
    return cast(RedisClient, RedisClient.from_pool(pool))


def _sentinel_client(
    hosts: list[Address], service: str, options: dict[str, Any], patience_s: float
) -> RedisClient:
    tls = options.pop("connection_class", None) is SSLConnection
    login = {k: options.pop(f"sentinel_{k}", None) for k in ("username", "password")}
    alike = {k: v for k, v in options.items() if k.startswith(("socket_", "ssl_"))}
    alike |= {"ssl": tls, "retry": options["retry"], "protocol": options["protocol"]}
    sentinels = Sentinels(hosts, patience_s=patience_s, sentinel_kwargs=alike | login)
    return SentinelClient(sentinels, service, ssl=tls, **options)


def _parse(url: str) -> _Target:
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in SCHEMES:
        known = ", ".join(f"{s}://" for s in SCHEMES)
        raise ConfigError(f"REDIS_URL {shown_url(url)!r}: must begin with one of {known}")
    transport, _, topology = scheme.partition("+")
    rest, _, query = rest.partition("?")
    login, _, rest = rest.rpartition("@")
    username, _, password = login.partition(":")
    try:
        options = dict(parse_url(f"{transport}://localhost?{query}"))
    except ValueError as error:
        raise ConfigError(f"REDIS_URL {shown_url(url)!r}: {error}") from None
    options.pop("host", None)
    options |= {"username": unquote(username)} if username else {}
    options |= {"password": unquote(password)} if password else {}
    if transport == "unix":
        return _Target("", [], "", {**options, "path": unquote(rest)})
    hosts, _, path = rest.partition("/")
    addresses = [_address(url, host, topology) for host in (hosts or "localhost").split(",")]
    if not topology:
        if len(addresses) > 1:
            raise ConfigError(f"REDIS_URL {shown_url(url)!r}: {scheme}:// takes one host")
        options |= {"host": addresses[0][0], "port": addresses[0][1]}
    return _Target(topology, addresses, path.rstrip("/"), options)


def _address(url: str, host: str, topology: str) -> Address:
    match = HOST.fullmatch(host)
    port = int(match["port"] or DEFAULT_PORT.get(topology, 6379)) if match else 0
    if not match or not 0 < port < 65536:
        # What looks like a host may be part of an unquoted password.
        raise ConfigError(
            f"REDIS_URL {url.partition('://')[0]}://...: write hosts as name or name:port, "
            "separated by commas; write / ? # @ in a password as %2F %3F %23 %40"
        )
    return match["name"] or match["ipv6"], port


def _db(text: str) -> dict[str, int]:
    if not re.fullmatch(r"\d*", text):
        raise ValueError(f"database {text!r} is not a number")
    return {"db": int(text)} if text else {}


def shown_url(url: str) -> str:
    """Returns `url` without user, password and options."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, rest = "", url
    return scheme + separator + rest.partition("?")[0].rpartition("@")[2]


@contextmanager
def naming(url: str) -> Iterator[None]:
    """Has a RedisUnavailable say which Redis it is about: the URL may be a default."""
    try:
        yield
    except RedisUnavailable as error:
        raise RedisUnavailable(f"REDIS_URL {shown_url(url)!r}: {error}") from error


@asynccontextmanager
async def deadline(timeout_s: float) -> AsyncIterator[None]:
    """Bounds the Redis commands inside. Raises RedisUnavailable if they fail or are late."""
    bound = asyncio.timeout(timeout_s)
    try:
        async with bound:
            yield
    except (RedisError, OSError) as error:
        if bound.expired():
            raise RedisUnavailable(f"no answer within {timeout_s * 1000:.0f} ms") from None
        raise RedisUnavailable(f"{type(error).__name__}: {error}") from error


@asynccontextmanager
async def connected(url: str, timeout_s: float) -> AsyncIterator[RedisClient]:
    """Yields a client of a Redis that `check_server` accepts or that is away. Raises
    ConfigError."""
    async with connect(url, timeout_s=timeout_s) as redis:
        try:
            await check_server(redis, timeout_s)
        except RedisUnavailable as error:
            log.warning("starting without Redis at %s: %s", shown_url(url), error)
        yield redis


async def check_server(redis: RedisClient, timeout_s: float) -> None:
    """Raises ConfigError if a master is too old, or would drop keys when its memory is full, and
    RedisUnavailable. A Redis that will not say is accepted."""
    async with deadline(timeout_s):
        for master in await redis.masters():
            try:
                info = await master.info()
            except NoPermissionError as error:
                log.warning("version and maxmemory-policy were not checked: %s", error)
                continue
            version = re.match(r"(\d+)\.(\d+)", str(info.get("redis_version", "")))
            if version and (int(version[1]), int(version[2])) < OLDEST:
                raise ConfigError(f"Redis has version {info['redis_version']}; needs 6.2 or newer")
            if danger := _danger_of_eviction(info):
                raise ConfigError(danger)


class Memory(NamedTuple):
    """Memory of all masters. danger: of an eviction policy; "": none, or none will say. fill: used
    share of maxmemory, or else of the machine's, on the fullest; 0.0: none says."""

    danger: str = ""
    fill: float = 0.0


async def memory_of(redis: RedisClient, timeout_s: float) -> Memory:
    """Returns the masters' Memory. Raises RedisUnavailable."""
    memory = Memory()
    async with deadline(timeout_s):
        for master in await redis.masters():
            with suppress(NoPermissionError):
                info: dict[str, Any] = await master.info("memory")
                most = info.get("maxmemory") or info.get("total_system_memory") or 0
                fill = info.get("used_memory", 0) / most if most else 0.0
                danger = memory.danger or _danger_of_eviction(info)
                memory = Memory(danger, max(memory.fill, fill))
    return memory


def _danger_of_eviction(info: dict[str, Any]) -> str:
    policy = str(info.get("maxmemory_policy", ""))
    if not policy.startswith("allkeys-"):
        return ""
    return (
        f"Redis has maxmemory-policy {policy}: once full, it would silently drop keys "
        "that routers must agree on; set it to noeviction"
    )
