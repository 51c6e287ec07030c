"""Who is served next where only so many can be at once, and who has to go when too many wait."""

from __future__ import annotations

from collections import Counter
from typing import Generic, TypeVar

from app.core.shares import Shares

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
