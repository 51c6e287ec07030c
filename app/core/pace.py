"""Limits on how often something is done or logged."""

from __future__ import annotations

import math
from collections import Counter, defaultdict


class Pace:
    """Limit of `per_s` events a second, evenly spaced; a large event counts as several. per_s: 0
    allows none. Times are those of any one clock, in seconds."""

    def __init__(self, per_s: float) -> None:
        self._pause_s = 1 / per_s if per_s else math.inf
        self._due_s = -math.inf if per_s else math.inf

    def allows(self, now_s: float, size: float = 1.0) -> bool:
        """Whether an event may happen now; if so, it is counted."""
        if not self.is_due(now_s):
            return False
        self._due_s = now_s + size * self._pause_s
        return True

    def is_due(self, now_s: float) -> bool:
        return now_s >= self._due_s


OTHERS = ""


class Paces:
    """One Pace for each of a few causes. most: causes told apart; all others share one Pace."""

    def __init__(self, per_s: float, most: int = 1000) -> None:
        self._limits: defaultdict[str, Pace] = defaultdict(lambda: Pace(per_s))
        self._left_out: Counter[str] = Counter()
        self._most = most

    def allows(self, cause: str, now_s: float) -> int | None:
        """Returns the events of that cause that were left out since the last one, if this one may
        happen; None if it is left out too."""
        if cause not in self._limits and len(self._limits) >= self._most:
            self._forget(now_s)
            if len(self._limits) >= self._most:
                cause = OTHERS
        if self._limits[cause].allows(now_s):
            return self._left_out.pop(cause, 0)
        self._left_out[cause] += 1
        return None

    def _forget(self, now_s: float) -> None:
        for cause in [cause for cause, limit in self._limits.items() if limit.is_due(now_s)]:
            del self._limits[cause]
            self._left_out[OTHERS] += self._left_out.pop(cause, 0)
