"""What an engine reports of its prefix cache: its hits, and how soon it evicts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

HIT_RATE_WINDOW = 1000
"""Requests over which the prefix cache hit rate is measured."""
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


class HitRate:
    """What share of the last prompts was cached when they were admitted."""

    def __init__(self) -> None:
        self._admitted: deque[tuple[float, float]] = deque()
        self._cached = self._tokens = 0.0

    def add(self, cached: float, tokens: float) -> None:
        self._admitted.append((cached, tokens))
        self._cached += cached
        self._tokens += tokens
        if len(self._admitted) > HIT_RATE_WINDOW:
            cached, tokens = self._admitted.popleft()
            self._cached -= cached
            self._tokens -= tokens

    @property
    def value(self) -> float:
        return self._cached / max(1, self._tokens)
