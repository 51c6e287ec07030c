from __future__ import annotations

import pytest

from app.core.keys import MODELS
from app.state import models
from tests.lua.conftest import Namespace


async def announce(space: Namespace, namespace: str, *names: str) -> dict[str, str]:
    return await space.do(models.announce(namespace, names))


async def age(space: Namespace, name: str, by_s: int) -> None:
    namespace, at_s = (await space.redis.hget(MODELS, name)).split()
    await space.redis.hset(MODELS, name, f"{namespace.decode()} {int(at_s) - by_s}")


@pytest.mark.oldest_too
async def test_the_first_namespace_to_announce_a_name_has_it_until_it_is_gone(
    space: Namespace,
) -> None:
    assert await announce(space, "chat", "llama", "sql, an adapter") == {}
    assert await announce(space, "other", "llama", "own") == {"llama": "chat"}
    expected = {"llama": "chat", "sql, an adapter": "chat", "own": "other"}
    assert await models.directory(space.redis) == expected
    await age(space, "llama", models.GONE_S - 5)
    assert await announce(space, "other", "llama") == {"llama": "chat"}
    assert await announce(space, "chat", "llama") == {}
    await age(space, "llama", models.GONE_S)
    assert await announce(space, "other", "llama") == {}
    assert await announce(space, "chat", "llama") == {"llama": "other"}


async def test_a_name_is_forgotten_a_day_after_it_was_last_announced(space: Namespace) -> None:
    await announce(space, "chat", "llama", "stays")
    await age(space, "llama", models.KEPT_S + 1)
    await announce(space, "other")
    assert await models.directory(space.redis) == {"stays": "chat"}


async def test_only_so_many_names_are_kept(
    space: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "MOST", 2)
    assert await announce(space, "chat", "a", "b", "c") == {"c": ""}
    assert await announce(space, "chat", "a", "b") == {}
    assert await models.directory(space.redis) == {"a": "chat", "b": "chat"}


async def test_what_an_earlier_release_or_anybody_else_wrote_is_replaced(space: Namespace) -> None:
    await space.redis.zadd(MODELS, {"chat llama": 1})
    assert await announce(space, "chat", "llama") == {}
    await space.redis.hset(MODELS, mapping={"llama": "spoilt", "x": "", "y": "{a} 1"})
    assert await models.directory(space.redis) == {"llama": "spoilt"}
    assert await announce(space, "chat", "llama") == {}
    assert (await models.directory(space.redis))["llama"] == "chat"
