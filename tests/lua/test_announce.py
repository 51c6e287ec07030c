import pytest

from app.core.keys import MODELS
from app.state import models


async def announce(space, namespace, *names):
    return await space.do(models.announce(namespace, names))


async def age(space, name, namespace, by_s):
    words = (await space.redis.hget(MODELS, name)).decode().split()
    at = words.index(namespace) + 1
    words[at] = str(int(words[at]) - by_s)
    await space.redis.hset(MODELS, name, " ".join(words))


@pytest.mark.oldest_too
async def test_namespaces_claim_a_name_in_the_order_in_which_they_announce_it(space):
    assert await announce(space, "chat", "llama", "sql, an adapter") == {}
    assert await announce(space, "other", "llama", "own") == {"llama": "chat"}
    assert await announce(space, "third", "llama") == {"llama": "chat"}
    expected = {
        "llama": ("chat", "other", "third"),
        "sql, an adapter": ("chat",),
        "own": ("other",),
    }
    assert await models.directory(space.redis) == expected
    for namespace in ("third", "other", "chat"):  # whoever speaks again keeps its place
        await announce(space, namespace, "llama")
    assert await models.directory(space.redis) == expected


async def test_who_has_been_silent_for_long_comes_after_all_others(space):
    await announce(space, "chat", "llama")
    await announce(space, "other", "llama")
    await age(space, "llama", "chat", models.GONE_S - 5)
    assert await announce(space, "other", "llama") == {"llama": "chat"}
    await age(space, "llama", "chat", 5)
    assert await announce(space, "other", "llama") == {}
    assert (await models.directory(space.redis))["llama"] == ("other", "chat")
    assert await announce(space, "chat", "llama") == {"llama": "other"}
    assert (await models.directory(space.redis))["llama"] == ("other", "chat")


async def test_a_claim_and_a_name_are_forgotten_a_day_after_they_were_last_announced(space):
    await announce(space, "chat", "llama", "stays")
    await announce(space, "other", "stays")
    await age(space, "llama", "chat", models.KEPT_S + 1)
    await age(space, "stays", "chat", models.KEPT_S + 1)
    await announce(space, "other", "stays")
    assert await models.directory(space.redis) == {"stays": ("other",)}


async def test_only_so_many_names_are_kept_and_claims_of_one(space, monkeypatch):
    monkeypatch.setattr(models, "MAX_MODELS", 2)
    monkeypatch.setattr(models, "MAX_NAMESPACES", 2)
    assert await announce(space, "chat", "a", "b", "c") == {"c": ""}
    assert await announce(space, "chat", "a", "b") == {}
    assert await models.directory(space.redis) == {"a": ("chat",), "b": ("chat",)}
    assert await announce(space, "second", "a") == {"a": "chat"}
    assert await announce(space, "third", "a") == {"a": ""}
    await age(space, "a", "second", models.GONE_S)  # who is gone makes room
    assert await announce(space, "third", "a") == {"a": "chat"}
    assert await models.directory(space.redis) == {"a": ("chat", "third"), "b": ("chat",)}


async def test_the_list_goes_with_the_last_worker_that_announces_anything(space):
    await announce(space, "chat", "llama")
    assert 0 < await space.redis.pttl(MODELS) <= 1000 * models.KEPT_S


async def test_what_anybody_else_wrote_is_replaced(space):
    await space.redis.hset(MODELS, mapping={"llama": "spoilt", "x": "", "y": "{a} 1", "z": "a 9 ?"})
    assert await models.directory(space.redis) == {"llama": ("spoilt",), "z": ("a",)}
    assert await announce(space, "chat", "llama") == {}
    assert (await models.directory(space.redis))["llama"] == ("chat",)
