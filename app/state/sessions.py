"""Where sessions last went, so that they may go there again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app.core.keys import Keyspace
from app.core.types import Incarnation
from app.state.scripts import Call, call

SESSIONS_KEPT = 65_536
"""About 7 MB in Redis."""


def recall(
    keyspace: Keyspace, sessions: Sequence[str], ttl_ms: int
) -> Call[list[Incarnation | None]]:
    """Where each of `sessions`, at least one, went in the last `ttl_ms`; None: nowhere.

    The incarnation may have ended; the worker's next one holds nothing of the session.
    """

    def parse(reply: list[Any]) -> list[Incarnation | None]:
        return [Incarnation(int(inc)) if inc else None for inc in reply]

    return call("recall", keyspace, ttl_ms, *sessions, parse=parse)


def remember(
    keyspace: Keyspace,
    session: str,
    incarnation: Incarnation,
    ttl_ms: int,
    limit: int = SESSIONS_KEPT,
) -> Call[int]:
    """Record that `session` went to `incarnation`; returns how many others were forgotten."""
    return call("remember", keyspace, session, incarnation, ttl_ms, limit, parse=int)
