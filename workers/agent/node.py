"""A block of a worker's cache among its relatives, and as Redis shows it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from app.core.overlaps import Back
from app.core.types import SequenceHash, Tier


class Node:
    """A block that is held, or a hole: the missing ancestor of a held block.

    One object per block: with millions of them, whatever the garbage collector has to traverse is
    time in which nothing is published.
    """

    __slots__ = (
        "back",
        "children",
        "depth",
        "held",
        "leader",
        "linked",
        "parent",
        "published",
        "published_back",
        "root",
        "since_end",
        "wanted",
    )

    def __init__(self) -> None:
        self.parent: SequenceHash | None = None
        self.linked = False
        self.children: SequenceHash | set[SequenceHash] | None = None
        """Most nodes have one child, which is stored here without a set."""
        self.held = 0
        """Bit 1 << tier for each tier that holds the block."""
        self.wanted: Tier | None = None
        self.published: Tier | None = None
        """Tier that Redis shows the block in, once it has all that was drained."""
        self.depth = 0
        """Blocks before this one in its chain; valid whenever it is wanted or published."""
        self.root: SequenceHash | None = None
        self.leader: SequenceHash | None = None
        """First blocks of its chain (root) and of its group (leader); valid whenever depth is."""
        self.since_end = 0
        """Blocks after the last one of its chain after which the engine can go on; valid whenever
        it is wanted and not all are such."""
        self.back: Back = 0
        self.published_back: Back = 0
        """Ways back that Redis should say (back), and says, if a prompt leaves its chain here."""

    def each_child(self) -> Iterable[SequenceHash]:
        children = self.children
        if children is None:
            return ()
        return children if isinstance(children, set) else (children,)

    def adopt(self, child: SequenceHash) -> None:
        if self.children is None:
            self.children = child
        elif isinstance(self.children, set):
            self.children.add(child)
        else:
            self.children = {self.children, child}

    def disown(self, child: SequenceHash) -> None:
        if isinstance(self.children, set) and len(self.children) > 1:
            self.children.remove(child)
        else:
            self.children = None

    def fastest(self) -> Tier | None:
        return FASTEST[self.held]

    @property
    def is_pending(self) -> bool:
        if self.wanted != self.published:
            return True
        return self.wanted is not None and self.back != self.published_back

    def as_published(self, tier: Tier) -> ShownBlock:
        assert self.root is not None
        assert self.leader is not None
        return ShownBlock(tier, self.published_back, self.depth, self.root, self.leader)


FASTEST = (None, *(next(t for t in Tier if held >> t & 1) for held in range(1, 1 << len(Tier))))


class ShownBlock(NamedTuple):
    """A block as Redis shows it."""

    tier: Tier
    back: Back
    depth: int
    root: SequenceHash
    leader: SequenceHash
