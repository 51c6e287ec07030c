"""A namespace in Redis for the commands of operators, and how to run them on it."""

import asyncio
import json

import pytest
from click.testing import CliRunner
from redis import Redis

from app.cli import main
from app.core.chains import GROUP_BLOCKS
from app.core.hashing import compute_hashes
from app.core.loads import Reservation
from app.core.types import Tier
from app.state import reservations
from app.state.connect import connect
from app.state.scripts import ScriptRunner
from tests.fake_worker import BLOCK_SIZE, KEYS, NAMESPACE, SHARD, FakeWorkers

PROMPT = list(range(1, 4 * 40 + 1))
"""Forty full blocks of four."""
CHAIN = compute_hashes(PROMPT, BLOCK_SIZE)[1]


@pytest.fixture
def url(one_redis_server):
    """URL of a Redis where w1 holds the prompt, and w2 its first ten blocks in host memory."""

    async def fill():
        async with connect(one_redis_server.url) as redis:
            workers = FakeWorkers(redis)
            first = await workers.register("w1")
            await workers.register("w2:1")
            await workers.publish("w1", PROMPT)
            await workers.publish("w2:1", PROMPT[:40], Tier.HOST)
            promised = Reservation("req-7", 100, 5000, 7, incarnation=first, max_requests=256)
            made = reservations.reserve(KEYS, [promised], ttl_ms=60_000)
            assert await ScriptRunner(redis, 5).one(made) == [None]

    asyncio.run(fill())
    return one_redis_server.url


@pytest.fixture
def raw(url):
    with Redis.from_url(url) as client:
        yield client


def kvroute(url, *arguments, namespace=NAMESPACE, **options):
    where = ["--redis-url", url, "--namespace", namespace]
    return CliRunner().invoke(main, [*arguments, *where], **options)


def said(url, *arguments):
    """The exit status and what is printed."""
    result = kvroute(url, *arguments)
    return result.exit_code, result.output


def as_json(url, *arguments):
    result = kvroute(url, *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def bucket_of(position):
    leader = CHAIN[position - position % GROUP_BLOCKS]
    return SHARD[f"blocks:{leader:016x}"[: len("blocks:") + 1]]


def in_redis(url, work):
    async def run():
        async with connect(url) as redis:
            return await work(ScriptRunner(redis, 5))

    return asyncio.run(run())
