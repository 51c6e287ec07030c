"""The stream of decisions in Redis, which Redis trims."""

from __future__ import annotations

from collections.abc import AsyncIterator

from app.core.keys import Keyspace
from app.policy.record import DecisionRecord, decode, encode
from app.state.client import RedisClient
from app.state.scripts import Call, command
from app.state.streams import pages_backwards

FIELD = b"decision"
"""The one field of an entry: its record as JSON."""
PAGE = 64
"""A few of them may hold all candidates: with a thousand workers, 160 KB each."""
MAX_WRITTEN = 64
"""How many go in one round trip, which takes Redis a millisecond."""


def record(keyspace: Keyspace, decision: DecisionRecord, kept: int) -> Call[bytes]:
    """Add a decision to the stream, which keeps about the newest `kept`; returns its entry's id."""
    limit = ("MAXLEN", "~", kept, "*")
    entry = (FIELD, encode(decision))
    return command("record", "XADD", keyspace["decisions"], *limit, *entry, parse=bytes)


async def read(redis: RedisClient, keyspace: Keyspace) -> AsyncIterator[DecisionRecord]:
    """All records that are kept, latest first. Raises RedisUnavailable.

    Corrupted entries are left out.
    """
    async for page in pages_backwards(redis, keyspace["decisions"], PAGE):
        for _, entry in page:
            try:
                decision = decode(entry[FIELD])
            except (LookupError, ValueError):
                continue
            yield decision
