"""A limit on how often something is done or logged."""

from __future__ import annotations

import math
import time


class Pace:
    """Lets through up to `per_s` events a second, evenly spaced; large ones count as several."""

    def __init__(self, per_s: float) -> None:
        self._pause_s = 1 / per_s if per_s else math.inf
        self._due = 0.0 if per_s else math.inf

    def lets_through(self, size: float = 1.0) -> bool:
        now = time.monotonic()
        if now < self._due:
            return False
        self._due = now + size * self._pause_s
        return True
