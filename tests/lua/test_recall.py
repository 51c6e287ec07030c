from __future__ import annotations

import pytest

from app.core.types import Incarnation
from tests.lua.conftest import LONG_MS, Namespace

ONE, TWO = Incarnation(1), Incarnation(2)


@pytest.mark.oldest_too
async def test_a_session_is_where_it_last_went(space: Namespace) -> None:
    await space.remember("a", ONE)
    await space.remember("b", ONE)
    await space.remember("a", TWO)
    assert await space.recall("a", "b", "c", "a") == [TWO, ONE, None, TWO]


async def test_a_session_past_its_ttl_is_unknown(space: Namespace) -> None:
    await space.redis.hset(space.key("sessions"), "a", f"1 {await space.now_ms() - 1000}")
    assert await space.recall("a", ttl_ms=LONG_MS) == [ONE]
    assert await space.recall("a", ttl_ms=1000) == [None]


async def test_a_session_with_a_corrupt_entry_is_unknown(space: Namespace) -> None:
    await space.remember("good", ONE)
    spoilt = {"a": "", "b": "1", "c": "x 99999999999999", "d": "1 2 3", "e": "-1 99999999999999"}
    spoilt["f"] = f"{'9' * 5000} 99999999999999"
    await space.redis.hset(space.key("sessions"), mapping=spoilt)
    assert await space.recall("good", *spoilt) == [ONE, *[None] * len(spoilt)]
