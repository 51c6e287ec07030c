"""Who has how much of something that all callers share, so that nobody takes it from the others."""

from __future__ import annotations

TIMES_WHAT_IS_LEFT = 3
"""Nobody may have more than so many times what nobody has: alone three quarters, two that want all
of it three sevenths each. So whoever comes next finds room, however much the others want."""

_NOTHING = 1e-6
"""What sums of parts leave by rounding."""


class Shares:
    """What its holders have of `capacity`, in any one unit. A holder: a key, or an address."""

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.total = 0.0
        self._of: dict[str, float] = {}

    def of(self, holder: str) -> float:
        return self._of.get(holder, 0.0)

    def left_for(self, holder: str) -> float:
        """How much more a holder may have, as then less is left; negative: that it has too
        much."""
        left = self.capacity - self.total
        return (TIMES_WHAT_IS_LEFT * left - self.of(holder)) / (TIMES_WHAT_IS_LEFT + 1)

    def take(self, holder: str, more: float) -> None:
        """Count what a holder has, whether it may or not; nothing counts for nothing."""
        self.total += more
        if more:
            self._of[holder] = self.of(holder) + more

    def give_back(self, holder: str, less: float) -> None:
        self.total -= less
        left = self.of(holder) - less
        if left < _NOTHING:
            self._of.pop(holder, None)
        else:
            self._of[holder] = left
        if not self._of:
            self.total = 0.0

    def greediest(self, holder: str) -> str:
        """Who has most; `holder`, if nobody has more than that one."""
        return max(self._of, key=lambda other: (self._of[other], other == holder), default=holder)

    def check(self) -> None:
        """Raises AssertionError if what is counted cannot be."""
        assert all(part > 0 for part in self._of.values())
        assert abs(self.total - sum(self._of.values())) < 1e-6
