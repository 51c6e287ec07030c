"""Places where sessions last went, so that they may go there again."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from app.core.keys import Keyspace
from app.core.types import Incarnation
from app.state.scripts import Call, call, command

SESSIONS_KEPT = 65_536
"""Sessions kept, about 7 MB in Redis."""
_VISIT = re.compile(rb"([1-9]\d{0,14}) (\d{1,15})")


class Visit(NamedTuple):
    """A session's last place, and when, by the Redis clock. The incarnation may have ended; the
    worker's next one holds nothing of the session."""

    incarnation: Incarnation
    at_ms: int


def recall(keyspace: Keyspace, sessions: Sequence[str]) -> Call[list[Visit | None]]:
    """Returns the last visit of each of `sessions`, at least one; None if none is known. A visit
    may be older than the lifetime of a session: its reader passes it over."""

    def parse(reply: list[bytes | None]) -> list[Visit | None]:
        found = (_VISIT.fullmatch(text or b"") for text in reply)
        return [visit and Visit(Incarnation(int(visit[1])), int(visit[2])) for visit in found]

    return command("recall", "HMGET", keyspace["sessions"], *sessions, parse=parse)


def remember(
    keyspace: Keyspace,
    session: str,
    incarnation: Incarnation,
    ttl_ms: int,
    limit: int = SESSIONS_KEPT,
) -> Call[int]:
    """Records that `session` went to `incarnation`; returns how many others were forgotten."""
    return call("remember", keyspace, session, incarnation, ttl_ms, limit, parse=int)
