"""What is yet to happen, in virtual time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from itertools import count

Act = Callable[[float], None]
"""What happens at a time, which it is given."""


class Agenda:
    """A clock that several fleets may share."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Act]] = []
        self._order = count()

    def at(self, when_s: float, act: Act) -> None:
        heapq.heappush(self._due, (when_s, next(self._order), act))

    def run(self, until_s: float = math.inf) -> None:
        """Let happen all that is due until then, which is the time afterwards."""
        while self._due and self._due[0][0] <= until_s:
            self.now_s, _, act = heapq.heappop(self._due)
            act(self.now_s)
        if until_s < math.inf:
            self.now_s = max(self.now_s, until_s)
