"""Figures of an engine's prefix cache: its hit rate, and how soon it evicts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

HIT_RATE_WINDOW = 1000
WINDOW = 200
"""Blocks, about so many of the latest ones, that make up most of the mean."""


class IdleBeforeEvict:
    """Moving mean over evicted blocks of the seconds since each was last used. now: a clock,
    seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._mean_s: float | None = None
        self._last_s = 0.0

    def add(self, since_s: float) -> None:
        """Counts a block that is evicted now and was last used at `since_s`."""
        self._last_s = self._now()
        idle_s = self._last_s - since_s
        if self._mean_s is None:
            self._mean_s = idle_s
        self._mean_s += (idle_s - self._mean_s) / WINDOW

    @property
    def value_s(self) -> float:
        """Mean in seconds; 0 until a block is evicted. The value grows while no further block
        is evicted."""
        return 0.0 if self._mean_s is None else self._mean_s + self._now() - self._last_s


class HitRate:
    """Share of the tokens of the last prompts that was cached when they were admitted."""

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
