"""What a worker's cache holds, as plain sets, to compare the index with."""

import asyncio

from app.core.events import Cleared, Ends, Removed, Stored
from app.core.types import Tier, TierOverlap


class CacheModel:
    """The tiers that each block is in, gaps included."""

    def __init__(self):
        self._held = {}
        self._ends = None
        """None: it can go on after all blocks."""
        self._lookahead = self._recomputed = 0

    def take(self, event):
        match event:
            case Stored():
                for block in event.blocks:
                    self._held.setdefault(block, set()).add(event.tier)
            case Removed():
                for block in event.blocks:
                    self.tiers_of(block).discard(event.tier)
            case Cleared():
                self._held.clear()
                self._ends = None
            case Ends():
                ends = set() if self._ends is None else self._ends
                self._ends = ends.union(event.blocks) if event.are_ends else ends - {*event.blocks}
                self._lookahead, self._recomputed = event.lookahead, event.recomputed

    def reused(self, chain, most, rule):
        """Leading blocks of `chain` that are reused, `most` at most."""
        held = self.scan(chain).total
        if self._ends is None:
            return rule.reused(held, most)
        ends = [n for n in range(1, held - self._lookahead + 1) if chain[n - 1] in self._ends]
        return max((n - self._recomputed for n in ends if n <= most), default=0)

    def tiers_of(self, block):
        return self._held.get(block, set())

    def scan(self, chain):
        """Longest unbroken owned prefix, each block in the slowest tier on its path."""
        published = {}
        slowest = Tier.DEVICE
        for block in chain:
            if not self.tiers_of(block):
                break
            slowest = max(slowest, min(self.tiers_of(block)))
            published[block] = slowest
        return leading(published, chain)


class FakePublisher:
    """Stands in for an agent. It confirms at once, unless a test clears `confirms`."""

    def __init__(self):
        self.shown = CacheModel()
        self.confirms = asyncio.Event()
        self.confirms.set()

    def notify(self, events):
        for event in events:
            self.shown.take(event)

    async def published(self):
        await self.confirms.wait()
        return True


def leading(published, chain):
    """The overlap of `chain`, from its first block on, with `published`."""
    counts = [0, 0, 0]
    for block in chain:
        tier = published.get(block)
        if tier is None:
            break
        counts[tier] += 1
    return TierOverlap(*counts)
