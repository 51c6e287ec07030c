"""Numbers of free slots, given out so that blocks stored together lie together."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

MAX_STALE = 64
"""How many entries of runs that have changed FreeRuns keeps, beside as many as there are runs."""


class FreeRuns:
    """Numbers of free slots, as runs of consecutive ones.

    Those of the longest run are given out first: then blocks that are stored together lie together,
    and later move, and are freed, as runs.
    """

    def __init__(self) -> None:
        self._last: dict[int, int] = {}
        """Of each run, by its first."""
        self._first: dict[int, int] = {}
        """Of each run, by its last."""
        self._longest: list[tuple[int, int]] = []
        """Heap of negative length and first number: of each run, and of some that have changed."""
        self._num_free = 0

    def __len__(self) -> int:
        return self._num_free

    def __iter__(self) -> Iterator[int]:
        for first, last in self._last.items():
            yield from range(first, last + 1)

    def add(self, first: int, last: int) -> None:
        """Free the numbers from `first` to `last`."""
        self._num_free += last - first + 1
        if first - 1 in self._first:
            first = self._first.pop(first - 1)
        if last + 1 in self._last:
            last = self._last.pop(last + 1)
        self._last[first], self._first[last] = last, first
        heapq.heappush(self._longest, (first - last - 1, first))
        if len(self._longest) > 2 * len(self._last) + MAX_STALE:
            self._longest = [(a - b - 1, a) for a, b in self._last.items()]
            heapq.heapify(self._longest)

    def take(self, num: int) -> list[int]:
        """Give out `num` of the numbers, of which there must be as many."""
        taken: list[int] = []
        while len(taken) < num:
            minus_size, first = heapq.heappop(self._longest)
            last = first - minus_size - 1
            if self._last.get(first) != last:
                continue  # it has changed
            del self._last[first], self._first[last]
            self._num_free += minus_size
            end = min(last + 1, first + num - len(taken))
            taken += range(first, end)
            if end <= last:
                self.add(end, last)
        return taken
