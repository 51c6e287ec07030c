"""The directory of models, on a real Redis."""

from __future__ import annotations

from redis.asyncio import Redis

from app.core.keys import MODELS
from app.state import models


async def test_models_are_listed_by_namespace_until_a_day_after_they_were_last_announced(
    redis: Redis,
) -> None:
    await models.announce(redis, "chat", ["llama", "llama 8B, the small one"])
    await models.announce(redis, "code", ["coder", "sql"])
    await redis.zadd(MODELS, {"chat llama": 1.0, "old gone": 1.0})
    found = await models.directory(redis)
    assert {name: sorted(listed) for name, listed in found.items()} == {
        "chat": ["llama", "llama 8B, the small one"],
        "code": ["coder", "sql"],
        "old": ["gone"],
    }
    await models.announce(redis, "code", [])
    found = await models.directory(redis)
    assert found["chat"] == ["llama 8B, the small one"]
    assert "old" not in found


async def test_members_that_nobody_of_ours_wrote_are_passed_over(redis: Redis) -> None:
    await redis.zadd(MODELS, {"": 1, "x": 2, "{a} b": 3, b"\xff\xfe": 4, "chat ": 5})
    assert await models.directory(redis) == {}


async def test_a_namespace_is_forgotten_alone(redis: Redis) -> None:
    await models.announce(redis, "chat", ["llama"])
    await models.announce(redis, "chat2", ["llama"])
    await models.forget(redis, "chat")
    await models.forget(redis, "chat")
    assert await models.directory(redis) == {"chat2": ["llama"]}
