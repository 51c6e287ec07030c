"""Redis servers and clients. Each test that asks for a server finds it empty."""

import asyncio
import faulthandler
import gc
import os
import random
import sys
import threading
from contextlib import ExitStack
from functools import cache
from itertools import cycle

import pytest
from hypothesis import HealthCheck, settings
from redis import Redis

from app.http.server import collect_seldom
from app.local import redis_server as servers_here
from app.local.redis_server import EmbeddedRedis
from app.state.connect import connect
from tests.redis_servers import OLDEST_KIND, default_kind, each_kind, require_redis

WAITING = 2
"""Tests spend half of their time waiting for processes that they start."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    return (os.cpu_count() or 1) + WAITING


# What collecting tests makes stays to the end: looking for garbage there took a third of the time.
gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
    collect_seldom()
    gc.enable()


@pytest.hookimpl
def pytest_timeout_set_timer(item, settings):
    """End the process of a test that hangs, wherever it stands, with the stacks of all its tasks.

    An exception out of a signal is lost where the loop calls back, as asyncio logs and drops it.
    """

    def end():
        capture = item.config.pluginmanager.getplugin("capturemanager")
        if capture:
            capture.suspend_global_capture(in_=True)
        sys.stderr.write(f"{item.nodeid} has not ended in {settings.timeout:g} s\n")
        for task in (each for each in gc.get_objects() if isinstance(each, asyncio.Task)):
            task.print_stack(file=sys.stderr)
        faulthandler.dump_traceback(file=sys.__stderr__)
        os._exit(1)

    timer = threading.Timer(settings.timeout, end)
    timer.daemon = True
    item.cancel_timeout = timer.cancel
    timer.start()
    return True


@pytest.fixture(scope="session")
def started_server():
    """The running server of a kind: started for the first test that needs it, shared by all."""
    with ExitStack() as servers:

        @cache
        def start(kind):
            return servers.enter_context(EmbeddedRedis(require_redis(kind)))

        yield start


def emptied(server):
    with Redis.from_url(server.url) as client:
        client.flushall()
    return server


# How fast a machine is that others use as well is no property of the code.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


def pytest_configure(config):
    """Keep test processes that run side by side out of each other's way."""
    worker = getattr(config, "workerinput", None)
    if worker is not None:
        # Else one process would take a port on which a server of another one is yet to listen.
        number, count = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
        own = servers_here.PORTS[number::count]
        servers_here._next_port = cycle(random.sample(own, len(own)))
        # Read once torch is loaded. More threads than cores cost half as much CPU again.
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_generate_tests(metafunc):
    if "redis_server" in metafunc.fixturenames:
        oldest_too = metafunc.definition.get_closest_marker("oldest_too")
        kinds = each_kind(*([OLDEST_KIND] if oldest_too else []))
        metafunc.parametrize("redis_server", kinds, indirect=True)


@pytest.fixture
def redis_server(request, started_server):
    """A server of each kind in turn; do not stop it.

    `make test` runs only the default one, and the oldest in tests marked `oldest_too`.
    """
    return emptied(started_server(request.param))


@pytest.fixture
async def redis_client(redis_server):
    """A client of `redis_server`; replies are bytes."""
    async with connect(redis_server.url) as client:
        yield client


@pytest.fixture
def one_redis_server(started_server):
    """A server of the default kind, for tests that need only one kind; do not stop it."""
    return emptied(started_server(default_kind()))


@pytest.fixture
async def redis(one_redis_server):
    """A client of `one_redis_server`; replies are bytes."""
    async with connect(one_redis_server.url) as client:
        yield client


@pytest.fixture
def own_redis_server():
    """A server for this test alone, which may kill, stop and restart it."""
    with EmbeddedRedis(require_redis(default_kind())) as server:
        yield server
