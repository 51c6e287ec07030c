"""Parts that one router replica shares, and the tally of what its requests have used."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from app.core.keys import Keyspace
from app.core.settings.router import RouterSettings
from app.core.types import random_hex
from app.core.usage import HOUR_MS, OTHER, UsageSums, Who
from app.router.fleet import Fleet
from app.router.limiter import Limiter
from app.router.metrics import Telemetry
from app.state import usage
from app.state.scripts import Call, ScriptRunner

MAX_WAITING = 1024
"""Sums that wait for Redis; while it is away, more are counted as of others."""
EVERY_S = 0.02
"""Seconds between two calls, which take Redis 7 µs, and a µs or two for each key. A replica that is
killed loses what ended within that time."""
DAY_MS = 24 * HOUR_MS


class UsageTally:
    """Adds up what was used until Redis is told, which takes each sum once, however often it is
    sent. One for all namespaces of a replica; each round trip may take its call along."""

    def __init__(
        self, keyspace: Keyspace, kept_days: int, redis_now_ms: Callable[[], int | None]
    ) -> None:
        """redis_now_ms: the Redis clock, None: not known yet."""
        self._keyspace = keyspace
        self._kept_ms = kept_days * DAY_MS
        self._redis_now_ms = redis_now_ms
        self._process = random_hex(4)
        self._number = 0
        self._sums: dict[Who, UsageSums] = {}
        self._call: Call[bool] | None = None
        """Call that Redis is being told by, or has not answered."""
        self._is_away = False
        self._sent_s = 0.0

    @property
    def is_due(self) -> bool:
        """Whether there is anything to tell, no call is away, and the last one was not just now."""
        if self._is_away or not (self._call or self._sums):
            return False
        return time.monotonic() - self._sent_s >= EVERY_S

    def add(self, who: Who, used: UsageSums) -> None:
        if who not in self._sums and len(self._sums) >= MAX_WAITING:
            who = Who(OTHER, OTHER, who.model)
        self._sums[who] = self._sums.get(who, UsageSums()).plus(used)

    def take(self) -> Call[bool] | None:
        """Returns the call to send now, after which `told` must follow. None: nothing is to be
        told."""
        now_ms = self._redis_now_ms()
        if not self.is_due or now_ms is None:
            return None
        if self._call is None:
            self._number += 1
            sums, self._sums = self._sums, {}
            self._call = usage.count(
                *(self._keyspace, now_ms // HOUR_MS, self._process, self._number, sums),
                kept_ms=self._kept_ms,
            )
        self._is_away, self._sent_s = True, time.monotonic()
        return self._call

    def told(self, *, is_counted: bool) -> None:
        """Note whether Redis has answered the call, else it is sent again."""
        self._is_away = False
        if is_counted:
            self._call = None


@dataclass(frozen=True, slots=True)
class Replica:
    """One router replica: how it reaches Redis, its settings, the workers it knows, its metrics,
    what its requests have used, and the limits of their keys."""

    runner: ScriptRunner
    keyspace: Keyspace
    settings: RouterSettings
    fleet: Fleet
    telemetry: Telemetry
    tally: UsageTally
    limiter: Limiter
