"""The prompts that workers have just answered: they hold those, also while the index has yet to be
told. Events come some 10 ms after an answer, and the next turn of a chat may be faster."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from app.core.types import NO_OVERLAP, Incarnation, SequenceHash, TierOverlap

KEPT_S = 1.0
"""An engine whose events have not come by then publishes nothing of the prompt."""
MAX_KEPT = 128
"""Beyond that the oldest are forgotten: a replica that ends so many in a second waits for none."""


class _RecentAnswer(NamedTuple):
    incarnation: Incarnation
    chain: list[SequenceHash]
    at_s: float


class Recent:
    """Times are monotonic seconds."""

    def __init__(self) -> None:
        self._answered: deque[_RecentAnswer] = deque()
        self._by_root: dict[SequenceHash, deque[_RecentAnswer]] = {}
        """The same, by their first block."""

    def add(self, incarnation: Incarnation, chain: list[SequenceHash], now_s: float) -> None:
        """A worker has answered a prompt with this chain."""
        if not chain:
            return
        if len(self._answered) == MAX_KEPT:
            self._forget_first()
        answered = _RecentAnswer(incarnation, chain, now_s)
        self._answered.append(answered)
        self._by_root.setdefault(chain[0], deque()).append(answered)

    def _forget_first(self) -> None:
        root = self._answered.popleft().chain[0]
        self._by_root[root].popleft()
        if not self._by_root[root]:
            del self._by_root[root]

    def held(
        self, chain: list[SequenceHash], published: Mapping[Incarnation, TierOverlap], now_s: float
    ) -> dict[Incarnation, int]:
        """Leading blocks of `chain` that workers hold, where that is more than is published."""
        while self._answered and now_s - self._answered[0].at_s > KEPT_S:
            self._forget_first()
        longer: dict[Incarnation, int] = {}
        reached: dict[Incarnation, int] = {}
        num_blocks = len(chain)
        for inc, answered, _ in self._by_root.get(chain[0], ()) if chain else ():
            known = reached.get(inc)
            if known is None:
                known = reached[inc] = published.get(inc, NO_OVERLAP).total
            # Each hash stands for all blocks before it too: most differ in the one after `known`.
            if known < num_blocks and known < len(answered) and chain[known] == answered[known]:
                longer[inc] = reached[inc] = _shared(chain, answered, known)
        return longer


def _shared(one: list[SequenceHash], other: list[SequenceHash], known: int) -> int:
    """How many leading blocks they share, of which `known` and one more are known to be."""
    last = min(len(one), len(other))
    return bisect_left(range(last), True, known + 1, key=lambda at: one[at] != other[at])
