"""The stream of decisions in Redis, which Redis trims."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from itertools import chain
from typing import Any

from app.core.keys import Keyspace
from app.policy.record import ENTRY, Record, decode, encode
from app.state.client import Client
from app.state.connect import deadline
from app.state.scripts import Call, call

PAGE = 64
"""A few of them may hold all candidates: with a thousand workers, 160 KB each."""
PAGE_TIMEOUT_S = 5.0
MAX_WRITTEN = 64
"""How many go in one call, which takes Redis a millisecond."""


def record(keyspace: Keyspace, records: Iterable[Record], kept: int) -> Call[int]:
    """Add at most MAX_WRITTEN records, of which about the newest `kept` stay."""
    values = chain.from_iterable(map(encode, records))
    return call("record", keyspace, kept, len(ENTRY), *ENTRY, *values, parse=int)


async def read(redis: Client, keyspace: Keyspace) -> AsyncIterator[Record]:
    """All records that are kept, latest first. Raises RedisUnavailable.

    Corrupted entries are left out.
    """
    newest = "+"
    while True:
        async with deadline(PAGE_TIMEOUT_S):
            page: Any = await redis.xrevrange(keyspace["decisions"], max=newest, count=PAGE)
        for _, entry in page:
            try:
                found = decode(entry)
            except (LookupError, TypeError, ValueError):
                continue
            yield found
        if len(page) < PAGE:
            return
        newest = f"({page[-1][0].decode()}"
