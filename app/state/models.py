"""The models that workers announce, in a directory that outlives them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from app.core.keys import MODELS, NAMESPACE
from app.state.client import RedisClient
from app.state.connect import deadline

TIMEOUT_S = 1.0
KEPT_S = 24 * 3600
"""How long a model is known that nobody announces any more."""
MOST = 10_000
"""Entries that are read: anybody may write there."""


async def announce(redis: RedisClient, namespace: str, names: Iterable[str]) -> None:
    """Say that workers of `namespace` serve models and adapters of these names, and forget those
    that nobody has announced for KEPT_S. Raises RedisUnavailable."""
    members = [f"{namespace} {name}" for name in names]
    async with deadline(TIMEOUT_S):
        seconds, _ = await redis.time()
        await redis.zremrangebyscore(MODELS, "-inf", seconds - KEPT_S)
        if members:
            await redis.zadd(MODELS, dict.fromkeys(members, seconds))


async def directory(redis: RedisClient) -> dict[str, list[str]]:
    """The names of models and adapters by namespace, latest announced first. Raises
    RedisUnavailable."""
    found: dict[str, list[str]] = {}
    async with deadline(TIMEOUT_S):
        members: Any = await redis.zrevrange(MODELS, 0, MOST - 1)
    for member in members:
        namespace, _, name = member.decode(errors="replace").partition(" ")
        if name and NAMESPACE.fullmatch(namespace):
            found.setdefault(namespace, []).append(name)
    return found


async def forget(redis: RedisClient, namespace: str) -> None:
    """Forget the models of `namespace`, until workers announce them again. Raises
    RedisUnavailable."""
    async with deadline(TIMEOUT_S):
        members: Any = await redis.zrange(MODELS, 0, -1)
    gone = [member for member in members if member.startswith(f"{namespace} ".encode())]
    if gone:
        async with deadline(TIMEOUT_S):
            await redis.zrem(MODELS, *gone)
