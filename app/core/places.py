"""Who has how much of what all callers share, who is served next where only so many can be at once,
and who has to go when too many wait."""

from __future__ import annotations

from collections import Counter
from typing import Generic, TypeVar

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


T = TypeVar("T")


class Places(Generic[T]):
    """Calls that wait for a place, and those that have one. No I/O, and no waiting.

    num: places. max_calls, max_size: calls that may be there at once, waiting or at work, and what
    all of them may be worth; a call of any worth may be there alone.

    A place goes to the holder who has fewest, of those the one who was served longest ago. When
    there are too many calls, the latest of the holder with most of them makes room.
    """

    def __init__(self, num: int, max_calls: int, max_size: float = float("inf")) -> None:
        self.num_free = num
        self._calls = Shares(max_calls)
        self._sizes = Shares(max_size)
        self._waiting: dict[str, dict[T, float]] = {}
        """By holder, the one served longest ago first, in the order in which they came."""
        self._at_work: Counter[str] = Counter()

    @property
    def num_calls(self) -> int:
        return int(self._calls.total)

    @property
    def size(self) -> float:
        """Of all calls together."""
        return self._sizes.total

    def waiting(self) -> list[T]:
        """Calls without a place."""
        return [call for calls in self._waiting.values() for call in calls]

    def enter(self, holder: str, call: T, size: float = 1.0) -> list[T]:
        """Wait for a place. Returns the calls that have to go, `call` perhaps among them."""
        self._waiting.setdefault(holder, {})[call] = size
        self._calls.take(holder, 1)
        self._sizes.take(holder, size)
        gone: list[T] = []
        for shares in (self._calls, self._sizes):
            while shares.total > shares.capacity and self._waiting and self._calls.total > 1:
                greediest = max(self._waiting, key=lambda one: (shares.of(one), one == holder))
                latest = next(reversed(self._waiting[greediest]))
                self.withdraw(greediest, latest)
                gone.append(latest)
        return gone

    def next(self) -> T | None:
        """The call that has a place from now on; None: there is no place, or nobody waits."""
        if not self.num_free or not self._waiting:
            return None
        holder = min(self._waiting, key=self._at_work.__getitem__)
        calls = self._waiting.pop(holder)
        call = next(iter(calls))
        del calls[call]
        if calls:
            self._waiting[holder] = calls
        self.num_free -= 1
        self._at_work[holder] += 1
        return call

    def withdraw(self, holder: str, call: T) -> bool:
        """A call waits no longer; False: it did not wait."""
        size = self._waiting.get(holder, {}).pop(call, None)
        if size is None:
            return False
        if not self._waiting[holder]:
            del self._waiting[holder]
        self._calls.give_back(holder, 1)
        self._sizes.give_back(holder, size)
        return True

    def leave(self, holder: str, size: float = 1.0) -> None:
        """A call that had a place has ended."""
        self.num_free += 1
        self._at_work[holder] -= 1
        if not self._at_work[holder]:
            del self._at_work[holder]
        self._calls.give_back(holder, 1)
        self._sizes.give_back(holder, size)

    def check(self) -> None:
        """Raises AssertionError if what is counted cannot be."""
        assert self.num_calls == len(self.waiting()) + sum(self._at_work.values())
        assert self.num_calls <= max(1, self._calls.capacity)
        assert self.num_free >= 0
        self._calls.check()
        self._sizes.check()
