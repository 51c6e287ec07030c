"""What came of requests, as those who carried them say: a stream in Redis, which Redis trims."""

from __future__ import annotations

from dataclasses import dataclass

from app.core.keys import Keyspace
from app.state.client import RedisClient
from app.state.scripts import Call, command
from app.state.streams import id_ms, pages_backwards

PAGE = 1024


@dataclass(slots=True)
class Ending:
    """output_tokens: at least 1. ttft_ms: from the request to its first token; None: unknown."""

    output_tokens: int
    ttft_ms: int | None = None


def record(keyspace: Keyspace, request_id: str, ending: Ending, kept: int) -> Call[bytes]:
    """Add an entry to the stream, which keeps about the newest `kept`; returns its id, whose time
    is when the request ended."""
    ttft = "" if ending.ttft_ms is None else ending.ttft_ms
    fields = ("request_id", request_id, "output_tokens", ending.output_tokens, "ttft_ms", ttft)
    limit = ("MAXLEN", "~", kept, "*")
    return command("record", "XADD", keyspace["endings"], *limit, *fields, parse=bytes)


async def read(
    redis: RedisClient, keyspace: Keyspace, since_ms: int, most: int
) -> dict[str, tuple[int, Ending]]:
    """Request id -> when it ended, by the Redis clock in ms, and how: the newest `most` since then.
    Corrupted entries are left out. Raises RedisUnavailable."""
    endings: dict[str, tuple[int, Ending]] = {}
    async for page in pages_backwards(redis, keyspace["endings"], PAGE, oldest=str(since_ms)):
        for entry_id, entry in page:
            try:
                ending = _ending(entry)
                request_id = entry[b"request_id"].decode()
            except (LookupError, ValueError):
                continue
            endings.setdefault(request_id, (id_ms(entry_id), ending))
        if len(endings) >= most:
            break
    return endings


def _ending(entry: dict[bytes, bytes]) -> Ending:
    """Raises LookupError, ValueError."""
    ttft = entry[b"ttft_ms"]
    ending = Ending(int(entry[b"output_tokens"]), int(ttft) if ttft else None)
    if ending.output_tokens < 1 or (ending.ttft_ms or 0) < 0:
        raise ValueError(f"{ending}")
    return ending
