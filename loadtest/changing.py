"""Loads that change all the time, as they do where other replicas reserve."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from redis.asyncio import Redis

from app.core.keys import Keyspace
from app.core.loads import LOAD_FIELDS

EVERY_S = 0.01
"""Some two batches of 32 requests at once."""
CHANGE = """
local time = redis.call('TIME')
local version = string.format('%.0f', time[1] * 1e6 + time[2])
local as_before = '^(' .. string.rep('%d+ ', ARGV[1]) .. ')%d+'
for i = 2, #ARGV, 2 do
  local load = redis.call('HGET', KEYS[1], ARGV[i])
  redis.call('HSET', KEYS[1], ARGV[i], (string.gsub(load, as_before, '%1' .. ARGV[i + 1])))
  redis.call('ZADD', KEYS[2], version, ARGV[i])
end
"""
"""Changes what was routed to a worker lately: the one figure that nothing else rests on."""


@asynccontextmanager
async def changing(redis: Redis, keyspace: Keyspace, first: int, count: int) -> AsyncIterator[None]:
    """Changes `count` loads every EVERY_S, of incarnations from `first` on.

    By a script that is sent each time, which counts for none of the time of the others.
    """
    task = asyncio.create_task(_change(redis, keyspace, first, count))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _change(redis: Redis, keyspace: Keyspace, first: int, count: int) -> None:
    rng = random.Random(1)
    others = [inc for inc in map(int, await redis.hkeys(keyspace["load"])) if inc >= first]
    while others and count:
        some = rng.sample(others, min(count, len(others)))
        args = [arg for inc in some for arg in (inc, rng.randrange(1_000_000))]
        keys = keyspace["load"], keyspace["versions"]
        await redis.eval(CHANGE, 2, *keys, LOAD_FIELDS.index("routed_us"), *args)
        await asyncio.sleep(EVERY_S)
