from __future__ import annotations

import pytest
from redis.asyncio import Redis

from app.state.scripts import call
from tests.lua.conftest import Namespace


async def record(space: Namespace, *values: str, kept: int = 1000) -> int:
    """Append entries of two fields each."""
    return await space.do(call("record", space.keys, kept, 2, "a", "b", *values, parse=int))


async def entries(redis: Redis, key: str) -> list[dict[bytes, bytes]]:
    return [entry for _, entry in await redis.xrange(key)]


@pytest.mark.oldest_too
async def test_each_request_becomes_an_entry_in_order(space: Namespace) -> None:
    assert await record(space, "1", "2", "3", "") == 2
    assert await entries(space.redis, space.key("decisions")) == [
        {b"a": b"1", b"b": b"2"},
        {b"a": b"3", b"b": b""},
    ]


async def test_the_oldest_entries_are_trimmed_when_there_are_too_many(space: Namespace) -> None:
    for n in range(40):
        await record(space, *map(str, range(n * 20, n * 20 + 20)), kept=100)
    assert 100 <= await space.redis.xlen(space.key("decisions")) < 250
    assert (await entries(space.redis, space.key("decisions")))[-1] == {b"a": b"798", b"b": b"799"}


@pytest.mark.parametrize("spoilt", ["a string", "a stream that takes no more"])
async def test_a_key_that_takes_no_entries_is_replaced_by_a_stream(
    space: Namespace, spoilt: str
) -> None:
    key = space.key("decisions")
    if spoilt == "a string":
        await space.redis.set(key, "x")
    else:
        last = 2**64 - 1
        await space.redis.xadd(key, {"x": "x"}, id=f"{last}-{last}")
    assert await record(space, "1", "2") == 1
    assert await entries(space.redis, key) == [{b"a": b"1", b"b": b"2"}]
