"""What a connection to Redis learns by itself, such as another master, each process asks once."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from app.core.settings.agent import EngineAgentSettings
from app.core.settings.worker import WorkerSettings
from app.state.client import RedisClient
from tests.workers.discovery.fleets import KEYS, engines, until_live
from workers import engine_agent, main


@pytest.fixture
def followed(monkeypatch):
    """The connections of which something is asked."""
    found = []

    async def follow(self):
        found.append(self)
        await asyncio.Event().wait()

    monkeypatch.setattr(RedisClient, "follow", follow)
    return found


@asynccontextmanager
async def running(serving):
    task = asyncio.ensure_future(serving)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_by_an_agent_of_many_engines(redis, one_redis_server, tmp_path, followed):
    async with engines(2) as some:
        file = tmp_path / "engines.toml"
        file.write_text("".join(f'[e{i}]\nengine-url = "{e.url}"\n' for i, e in enumerate(some)))
        settings = EngineAgentSettings(
            redis_url=one_redis_server.url,
            namespace=KEYS.namespace,
            engines=str(file),
            port=0,
            memory_folder=str(tmp_path),
        )
        async with running(engine_agent.serve(settings)):
            await until_live(redis, "e0", "e1")
            assert len(followed) == 1


async def test_by_a_worker(redis, one_redis_server, followed):
    settings = WorkerSettings(
        redis_url=one_redis_server.url, namespace=KEYS.namespace, port=0, worker_id="w"
    )
    async with running(main.serve(settings)):
        await until_live(redis, "w")
        assert len(followed) == 1
