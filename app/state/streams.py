"""Streams in Redis, read backwards."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from redis.asyncio import Redis

from app.state.connect import deadline

Page = list[tuple[bytes, dict[bytes, bytes]]]
PAGE_TIMEOUT_S = 5.0


async def pages_backwards(
    redis: Redis, key: str, size: int, *, oldest: str = "-", timeout_s: float | None = None
) -> AsyncIterator[Page]:
    """Yields the entries of a stream, the newest first, one round trip for each `size` of them.
    oldest: the id of the last entry to read. timeout_s: for each round trip; None: PAGE_TIMEOUT_S.
    Raises RedisUnavailable."""
    newest = "+"
    while True:
        async with deadline(timeout_s or PAGE_TIMEOUT_S):
            page: Any = await redis.xrevrange(key, max=newest, min=oldest, count=size)
        yield page
        if len(page) < size:
            return
        newest = f"({page[-1][0].decode()}"


def id_ms(entry_id: bytes) -> int:
    return int(entry_id.partition(b"-")[0])
