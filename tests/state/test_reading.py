"""What operators' commands read from a Redis that does not answer."""

from __future__ import annotations

import asyncio

import pytest

from app.core.errors import RedisUnavailable
from app.local.redis_server import EmbeddedRedis
from app.state import reading
from app.state.connect import connect
from tests.fake_worker import KEYS
from tests.redis_servers import stopped


@pytest.mark.parametrize("what", ["control", "promised", "contents", "scan"])
async def test_reading_from_a_redis_that_hangs_ends_with_an_error(
    what: str, own_redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "STEP_TIMEOUT_S", 0.05)
    async with connect(own_redis_server.url) as redis:
        await redis.masters()

        async def read() -> object:
            if what == "control":
                return await reading.read_control(redis, KEYS)
            if what == "promised":
                return await reading.read_promised(redis, KEYS, [b"1"])
            if what == "contents":
                return await reading.contents(redis, [b"a"])
            return [keys async for _, keys in reading.scan(redis, "*")]

        await read()
        with stopped(own_redis_server.pid):
            async with asyncio.timeout(10.0):
                with pytest.raises(RedisUnavailable):
                    await read()
