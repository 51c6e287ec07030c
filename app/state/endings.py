"""What came of requests, as those who carried them say: a stream in Redis, which Redis trims."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from app.core.keys import Keyspace
from app.state.client import Client
from app.state.connect import deadline
from app.state.scripts import Call, command

PAGE = 1024
PAGE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
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
    redis: Client, keyspace: Keyspace, since_ms: int, most: int
) -> dict[str, tuple[int, Ending]]:
    """Request id -> when it ended, by the Redis clock in ms, and how: the newest `most` since then.
    Corrupted entries are left out. Raises RedisUnavailable."""
    found: dict[str, tuple[int, Ending]] = {}
    newest = "+"
    while len(found) < most:
        async with deadline(PAGE_TIMEOUT_S):
            page: Any = await redis.xrevrange(
                keyspace["endings"], max=newest, min=str(since_ms), count=PAGE
            )
        for entry_id, entry in page:
            try:
                ending = _ending(entry)
                request_id = entry[b"request_id"].decode()
            except (LookupError, ValueError):
                continue
            found.setdefault(request_id, (int(entry_id.partition(b"-")[0]), ending))
        if len(page) < PAGE:
            break
        newest = f"({page[-1][0].decode()}"
    return found


def _ending(entry: dict[bytes, bytes]) -> Ending:
    """Raises LookupError, ValueError."""
    ttft = entry[b"ttft_ms"]
    ending = Ending(int(entry[b"output_tokens"]), int(ttft) if ttft else None)
    if ending.output_tokens < 1 or (ending.ttft_ms or 0) < 0:
        raise ValueError(f"{ending}")
    return ending
