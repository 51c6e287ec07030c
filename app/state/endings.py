"""What came of requests that ended after their decision was recorded, as those who carried them
say: a stream in Redis, which Redis trims."""

from __future__ import annotations

from app.core.keys import Keyspace
from app.core.outcomes import Ending
from app.state.client import RedisClient
from app.state.scripts import Call, command
from app.state.streams import id_ms, pages_backwards

PAGE = 1024


def record(keyspace: Keyspace, request_id: str, ending: Ending, kept: int) -> Call[bytes]:
    """Add an entry to the stream, which keeps about the newest `kept`; returns its id, whose time
    is when the request ended."""
    ttft = "" if ending.ttft_ms is None else ending.ttft_ms
    fields = ("request_id", request_id, "output_tokens", ending.output_tokens, "ttft_ms", ttft)
    limit = ("MAXLEN", "~", kept, "*")
    return command("record", "XADD", keyspace["endings"], *limit, *fields, parse=bytes)


async def read(
    redis: RedisClient, keyspace: Keyspace, since_ms: int, most: int
) -> dict[str, Ending]:
    """Request id -> how it ended: the newest `most` since then. Corrupted entries are left out.
    Raises RedisUnavailable."""
    endings: dict[str, Ending] = {}
    async for page in pages_backwards(redis, keyspace["endings"], PAGE, oldest=str(since_ms)):
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
    """Raises LookupError, ValueError."""
    ttft = entry[b"ttft_ms"]
    output_tokens = int(entry[b"output_tokens"])
    return Ending(output_tokens, int(ttft) if ttft else None, id_ms(entry_id))
