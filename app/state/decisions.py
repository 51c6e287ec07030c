"""Streams of decisions, and of how their requests ended; Redis trims them."""

from __future__ import annotations

from collections.abc import AsyncIterator

from app.core.keys import Keyspace
from app.core.outcomes import Ending
from app.policy.record import DecisionRecord, decode, encode
from app.state.client import RedisClient
from app.state.scripts import Call, command
from app.state.streams import id_ms, pages_backwards

FIELD = b"decision"
PAGE = 64
"""Entries read at a time: with all candidates of a thousand workers, one takes 160 KB."""
MAX_WRITTEN = 64
"""Entries of one round trip, which takes Redis a millisecond."""


def record(keyspace: Keyspace, decision: DecisionRecord, kept: int) -> Call[bytes]:
    """Adds a decision to the stream, which keeps about the newest `kept`; returns its entry's
    id."""
    limit = ("MAXLEN", "~", kept, "*")
    entry = (FIELD, encode(decision))
    return command("record", "XADD", keyspace["decisions"], *limit, *entry, parse=bytes)


async def read(redis: RedisClient, keyspace: Keyspace) -> AsyncIterator[DecisionRecord]:
    """Yields the records that are kept, latest first, without corrupted ones. Raises
    RedisUnavailable."""
    async for page in pages_backwards(redis, keyspace["decisions"], PAGE):
        for _, entry in page:
            try:
                decision = decode(entry[FIELD])
            except (LookupError, ValueError):
                continue
            yield decision


ENDINGS_PAGE = 1024


def record_ending(keyspace: Keyspace, request_id: str, ending: Ending, kept: int) -> Call[bytes]:
    """Adds an ending to the stream, which keeps about the newest `kept`; returns its id, which has
    the time at which the request ended."""
    ttft = "" if ending.ttft_ms is None else ending.ttft_ms
    fields = ("request_id", request_id, "output_tokens", ending.output_tokens, "ttft_ms", ttft)
    limit = ("MAXLEN", "~", kept, "*")
    return command("record_ending", "XADD", keyspace["endings"], *limit, *fields, parse=bytes)


async def read_endings(
    redis: RedisClient, keyspace: Keyspace, since_ms: int, most: int
) -> dict[str, Ending]:
    """Returns request id -> how it ended, of the newest `most` since then, without corrupted ones.
    Raises RedisUnavailable."""
    endings: dict[str, Ending] = {}
    async for page in pages_backwards(
        redis, keyspace["endings"], ENDINGS_PAGE, oldest=str(since_ms)
    ):
        for entry_id, entry in page:
            try:
                ending = _ending(entry_id, entry)
                request_id = entry[b"request_id"].decode()
            except (LookupError, ValueError):
                continue
            endings.setdefault(request_id, ending)
        if len(endings) >= most:
            break
    return endings


def _ending(entry_id: bytes, entry: dict[bytes, bytes]) -> Ending:
    ttft = entry[b"ttft_ms"]
    output_tokens = int(entry[b"output_tokens"])
    return Ending(output_tokens, int(ttft) if ttft else None, id_ms(entry_id))
