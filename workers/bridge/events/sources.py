"""Where an engine's ranks publish their KV events."""

from __future__ import annotations

import re
from collections.abc import Iterable

from workers.bridge.http.facts import EventSource, NotExact, Overrides

_TCP = re.compile(r"tcp://(\*|\[[^\]]*\]|::|[^:/]+):(\d{1,5})")
_WILDCARDS = frozenset({"*", "0.0.0.0", "::", "[::]", "[*]"})  # noqa: S104 - what engines say
MAX_PORT = 65_535


NONE = "none"
"""The events endpoint of an engine whose events are not listened to."""


def reachable(endpoint: str, host: str, rank: int = 0) -> str:
    """The address to connect to for a socket that the engine on `host` has bound to `endpoint`.

    rank: added to the port. Raises NotExact for a bad address.
    """
    if endpoint.startswith("ipc://") and not rank:
        return endpoint
    match = _TCP.fullmatch(endpoint)
    port = int(match[2]) + rank if match else 0
    if match is None or not 0 < port <= MAX_PORT:
        raise NotExact(f"the events endpoint {endpoint!r} is not tcp://HOST:PORT")
    return f"tcp://{host if match[1] in _WILDCARDS else match[1]}:{port}"


def binds(endpoint: str) -> bool:
    """Does an engine bind this address? It would connect to any other."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc://")


def overridden(ranks: Iterable[int], host: str, overrides: Overrides) -> tuple[EventSource, ...]:
    """The sources of these ranks at `overrides.events_endpoint`. Raises NotExact if it is NONE."""
    events, replay = overrides.events_endpoint, overrides.replay_endpoint
    assert events is not None
    if events == NONE:
        raise NotExact("its agent listens to no KV events: take away --events-endpoint none")
    return tuple(
        EventSource(
            rank,
            reachable(events, host, rank),
            reachable(replay, host, rank) if replay else None,
        )
        for rank in ranks
    )
