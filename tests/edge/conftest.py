"""Router replicas in this process, on a real Redis with fake workers."""

from contextlib import asynccontextmanager
from typing import Protocol

import httpx
import pytest

from app.core.settings.router import RouterSettings
from app.edge.app import create_app
from tests.fake_worker import NAMESPACE, FakeWorkers


class StartReplica(Protocol):
    def __call__(self, redis_url, **settings): ...


@asynccontextmanager
async def started_replica(redis_url, **settings):
    """A client of a replica in this process."""
    chosen = {"seed": 7, "redis_timeout_ms": 5000, "wait_queue": 0} | settings
    app = create_app(RouterSettings(redis_url=redis_url, namespace=NAMESPACE, **chosen))
    # Exceptions in the application must appear as a client would see them.
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        yield client


@pytest.fixture
def replica():
    """Starts a replica and yields a client of it: `async with replica(redis_url, **settings)`."""
    return started_replica


@pytest.fixture
async def workers(redis):
    """A fleet, without workers so far, on the Redis of `client`."""
    return FakeWorkers(redis)


@pytest.fixture
async def client(one_redis_server, replica):
    """A client of one replica with a seed and otherwise default settings."""
    async with replica(one_redis_server.url) as client:
        yield client
