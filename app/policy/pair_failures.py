"""Pairs of workers between which KV does not arrive. Pure.

A target whose transfers fail computes the prompt itself, so nobody sees it but in its engine's
counters, and each prompt is computed twice. The counters are the target's: a failure is held
against a source if KV of none arrived in the same time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from app.core.types import WorkerKey

FAILURES = 3
"""In a row, until a pair is left alone."""
PAUSE_S = 60.0
LONGEST_S = 960.0
Pair = tuple[WorkerKey, WorkerKey]
"""Source and target."""


@dataclass(slots=True)
class _Failing:
    failures: int = 0
    pauses: int = 0
    until_s: float = 0.0


class PairFailures:
    """Times are of any one clock, in seconds."""

    def __init__(self) -> None:
        self._failing: dict[Pair, _Failing] = {}

    def note(
        self,
        target: WorkerKey,
        sources: Iterable[WorkerKey],
        failed: int,
        arrived: int,
        now_s: float,
    ) -> list[Pair]:
        """What became of transfers to `target` in some time. Returns the pairs that are left alone
        from now on."""
        pairs = [(source, target) for source in sources]
        if arrived and not failed:
            for pair in pairs:
                self._failing.pop(pair, None)
        if arrived or not failed:
            return []
        left = []
        for pair in pairs:
            known = self._failing.setdefault(pair, _Failing())
            known.failures += 1
            if known.failures >= FAILURES and known.until_s <= now_s:
                known.until_s = now_s + min(LONGEST_S, PAUSE_S * 2**known.pauses)
                known.pauses += 1
                known.failures = FAILURES - 1  # one more leaves it alone again
                left.append(pair)
        return left

    @property
    def are_well(self) -> bool:
        """Whether no pair has failed since KV last arrived."""
        return not self._failing

    def left_alone(self, now_s: float) -> frozenset[Pair]:
        return frozenset(pair for pair, known in self._failing.items() if known.until_s > now_s)
