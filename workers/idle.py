"""How long blocks are not used before they are evicted."""

from __future__ import annotations

from collections.abc import Callable

WINDOW = 200
"""So many of the last blocks make most of the mean."""


class IdleBeforeEvict:
    """A moving mean over evicted blocks: seconds since each was used. now: seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._mean_s: float | None = None
        self._last_s = 0.0

    def add(self, since_s: float) -> None:
        """A block that was not used since then is evicted now."""
        self._last_s = self._now()
        idle_s = self._last_s - since_s
        if self._mean_s is None:
            self._mean_s = idle_s
        self._mean_s += (idle_s - self._mean_s) / WINDOW

    @property
    def value_s(self) -> float:
        """0 while none was evicted. While none is, those that would be grow older."""
        return 0.0 if self._mean_s is None else self._mean_s + self._now() - self._last_s
