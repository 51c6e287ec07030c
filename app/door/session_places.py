"""In which of several namespaces a session of a client has begun, so that it stays there."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Collection

from app.core.errors import RedisUnavailable
from app.core.keys import Keyspace
from app.router.history import SESSION_TTL_S
from app.router.routers import Routers
from app.state import sessions
from app.state.scripts import ScriptRunner

TIMEOUT_S = 0.25
MOST = 65_536
"""Sessions that a replica keeps in mind, in some 10 MB; the one that came longest ago makes
room."""


def point_of(session: str) -> float:
    """A number in [0, 1), the same at all replicas."""
    digest = hashlib.blake2b(session.encode(), digest_size=8).digest()
    return (int.from_bytes(digest) >> 11) / 2**53


class SessionPlaces:
    """What this replica has seen, and else what the routers of each namespace wrote down: a round
    trip for the first request of each session, and only where several namespaces serve its model.
    """

    def __init__(self, routers: Routers) -> None:
        self._routers = routers
        self._places: OrderedDict[str, tuple[str, float]] = OrderedDict()
        """Session -> its namespace, and when it was last there, monotonic seconds."""

    async def find(self, session: str, namespaces: Collection[str]) -> str | None:
        """Where it was last, of these; None: that is not known, or too long ago."""
        place, at_s = self._places.get(session, ("", 0.0))
        if place in namespaces and time.monotonic() - at_s < SESSION_TTL_S:
            return place
        own = self._routers.own
        calls = [sessions.recall(Keyspace(name), [session]) for name in namespaces]
        try:
            visits = await ScriptRunner(own.redis, TIMEOUT_S).run(calls)
        except RedisUnavailable:
            return None
        oldest_ms = (own.fleet.redis_now_ms or 0) - 1000 * SESSION_TTL_S
        latest = [
            (visit.at_ms, name)
            for name, (visit,) in zip(namespaces, visits, strict=True)
            if visit is not None and visit.at_ms > oldest_ms
        ]
        return max(latest)[1] if latest else None

    def note(self, session: str, namespace: str) -> None:
        """It is there now."""
        self._places[session] = namespace, time.monotonic()
        self._places.move_to_end(session)
        if len(self._places) > MOST:
            self._places.popitem(last=False)
