from __future__ import annotations

import pytest
from redis.asyncio import Redis

from app.core.errors import RedisUnavailable
from app.core.keys import Keyspace
from app.local.redis_server import EmbeddedRedis
from app.state import strays
from app.state.client import Client
from app.state.connect import connect
from app.state.scripts import ScriptRunner
from app.state.strays import Strays
from tests.lua.conftest import A, B, Namespace
from tests.redis_servers import stopped


@pytest.fixture
def space(redis: Client) -> Namespace:
    return Namespace(redis)


def strays_of(space: Namespace) -> Strays:
    return Strays(space.runner, space.keys, timeout_s=2)


async def names(redis: Redis) -> set[str]:
    return {key.decode() for key in await redis.keys()}


async def test_keys_in_use_and_keys_of_others_stay(space: Namespace) -> None:
    inc = await space.worker("a", bucket_bits=6)
    await space.hold(inc, [A, B])
    await space.reserve(inc, "r1")
    await space.redis.set("kvroute:1:{test}:mine", "x")
    await space.redis.set("kvroute:1:{tester#9}:blocks:zz", "x")
    before = await names(space.redis)
    await strays_of(space).drop_some(shards=1)
    assert await names(space.redis) == before


async def test_members_of_families_that_belong_to_nothing_are_removed(space: Namespace) -> None:
    inc = await space.worker("a", bucket_bits=6)
    await space.hold(inc, [A])
    await space.reserve(inc, "r1")
    # Members of no family, though named like one.
    await space.redis.set(space.shard["blocks"], "x")
    await space.redis.set(space.keys["requests"], "x")
    before = await names(space.redis)
    stray = [
        space.key("blocks:aa"),
        space.key("blocks:a8.bak"),
        space.keys["requests:77"],
        space.keys["prefills:junk"],
        space.keys.of_shard(1)["shard"],
        space.keys.of_shard(1)["applied"],
        space.keys.of_shard(900)["blocks:a8"],
    ]
    await space.redis.mset(dict.fromkeys(stray, "x"))
    await strays_of(space).drop_some(shards=1)
    assert await names(space.redis) == before


async def test_steps_are_bounded_and_start_over_at_the_end(
    space: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strays, "SCAN_KEYS", 10)
    await space.worker("a")
    steps = strays_of(space)
    for _ in range(2):
        junk = [space.keys[f"requests:{n}"] for n in range(100, 200)]
        await space.redis.mset(dict.fromkeys(junk, "x"))
        await steps.drop_some(shards=1)
        assert await space.redis.exists(*junk) > 70
        for _ in range(30):
            await steps.drop_some(shards=1)
        assert await space.redis.exists(*junk) == 0


async def test_without_redis_a_step_raises_redis_unavailable() -> None:
    async with connect("redis://127.0.0.1:1/0") as nowhere:
        runner = ScriptRunner(nowhere, timeout_s=1)
        with pytest.raises(RedisUnavailable):
            await Strays(runner, Keyspace("test"), timeout_s=1).drop_some(shards=1)


async def test_a_redis_that_hangs_is_not_waited_for_longer_than_the_timeout(
    space: Namespace, one_redis_server: EmbeddedRedis
) -> None:
    with stopped(one_redis_server.pid), pytest.raises(RedisUnavailable, match="within 20 ms"):
        await Strays(space.runner, space.keys, timeout_s=0.02).drop_some(shards=1)
