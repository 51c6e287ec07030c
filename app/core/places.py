"""Fair shares of a capacity, and fair turns at a few places."""

from __future__ import annotations

from collections import Counter
from typing import Generic, TypeVar

TIMES_WHAT_IS_LEFT = 3
"""Largest share of a holder, as a multiple of what nobody has: alone three quarters, two that want
all of it three sevenths each. So the next holder always finds room."""

_NOTHING = 1e-6


class Shares:
    """Parts that holders have of `capacity`, in any one unit. A holder is a key, or an address."""

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.total = 0.0
        self._of: dict[str, float] = {}

    def of(self, holder: str) -> float:
        return self._of.get(holder, 0.0)

    def left_for(self, holder: str) -> float:
        """Returns how much more a holder may have; negative if it has too much."""
        left = self.capacity - self.total
        return (TIMES_WHAT_IS_LEFT * left - self.of(holder)) / (TIMES_WHAT_IS_LEFT + 1)

    def take(self, holder: str, more: float) -> None:
        """Counts `more` for a holder, allowed or not."""
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
        """Returns the holder with the largest part; `holder`, if nobody has more."""
        return max(self._of, key=lambda other: (self._of[other], other == holder), default=holder)

    def check(self) -> None:
        assert all(part > 0 for part in self._of.values())
        assert abs(self.total - sum(self._of.values())) < 1e-6


T = TypeVar("T")


class Places(Generic[T]):
    """Calls that wait for a place, and those that have one. No I/O, and no waiting.

    num: places. max_calls, max_size: calls, waiting or at work, and the sum of their sizes; one
    call alone may be of any size.

    A free place goes to the holder with the fewest, among these to the one served longest ago. If
    there are too many calls, the latest call of the holder with most of them is dropped.
    """

    def __init__(self, num: int, max_calls: int, max_size: float = float("inf")) -> None:
        self.num_free = num
        self._calls = Shares(max_calls)
        self._sizes = Shares(max_size)
        self._waiting: dict[str, dict[T, float]] = {}
        """Waiting calls in order of arrival, by holder, the one served longest ago first."""
        self._at_work: Counter[str] = Counter()

    @property
    def num_calls(self) -> int:
        return int(self._calls.total)

    @property
    def size(self) -> float:
        return self._sizes.total

    def waiting(self) -> list[T]:
        return [call for calls in self._waiting.values() for call in calls]

    def enter(self, holder: str, call: T, size: float = 1.0) -> list[T]:
        """Queues a call. Returns the calls that have to go, `call` perhaps among them."""
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
        """Returns the call that has a place from now on; None if no place is free or nobody
        waits."""
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
        """Takes a waiting call out of the queue; False if it did not wait."""
        size = self._waiting.get(holder, {}).pop(call, None)
        if size is None:
            return False
        if not self._waiting[holder]:
            del self._waiting[holder]
        self._calls.give_back(holder, 1)
        self._sizes.give_back(holder, size)
        return True

    def leave(self, holder: str, size: float = 1.0) -> None:
        self.num_free += 1
        self._at_work[holder] -= 1
        if not self._at_work[holder]:
            del self._at_work[holder]
        self._calls.give_back(holder, 1)
        self._sizes.give_back(holder, size)

    def check(self) -> None:
        assert self.num_calls == len(self.waiting()) + sum(self._at_work.values())
        assert self.num_calls <= max(1, self._calls.capacity)
        assert self.num_free >= 0
        self._calls.check()
        self._sizes.check()
