"""How long blocks go unused before they are evicted."""

from __future__ import annotations

from collections.abc import Callable

WINDOW = 200
"""About this many of the latest blocks make up most of the mean."""


class IdleBeforeEvict:
    """A moving mean over evicted blocks: seconds since each was last used. now: seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._mean_s: float | None = None
        self._last_s = 0.0

    def add(self, since_s: float) -> None:
        """Count a block that is evicted now and was last used at `since_s`."""
        self._last_s = self._now()
        idle_s = self._last_s - since_s
        if self._mean_s is None:
            self._mean_s = idle_s
        self._mean_s += (idle_s - self._mean_s) / WINDOW

    @property
    def value_s(self) -> float:
        """0 until a block is evicted. While none is, it grows, as the next candidates age."""
        return 0.0 if self._mean_s is None else self._mean_s + self._now() - self._last_s
