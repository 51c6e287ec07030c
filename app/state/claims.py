"""Claims of agent processes on engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app.core.keys import Keyspace
from app.state.scripts import Call, call


def claim(
    keyspace: Keyspace,
    source: str,
    holder: str,
    ready: Sequence[str],
    others: Sequence[str] = (),
    *,
    ttl_ms: int,
    room: int,
) -> Call[tuple[frozenset[str], frozenset[str]]]:
    """Claims engines for the process `holder`, for `ttl_ms` (0: it leaves). Returns the engines
    that it is the agent of, and those that have no agent.

    source: of the engines; processes with the same one share them. ready, others: all engines that
    the process sees; `others` are claimed only if somebody had claimed them before. room: most
    engines of a process.
    """

    def parse(reply: list[Any]) -> tuple[frozenset[str], frozenset[str]]:
        claimed, free = (frozenset(name.decode(errors="replace") for name in one) for one in reply)
        return claimed, free

    args = (source, holder, ttl_ms, room, len(ready), *ready, *others)
    return call("claim", keyspace, *args, parse=parse)
