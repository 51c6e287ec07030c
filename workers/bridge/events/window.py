"""Blocks of groups of layers with the same window, and those of them after which it is whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from app.core.types import SequenceHash
from workers.bridge.events.block import Place, References, with_copy, without_copy
from workers.bridge.events.events import BlockHash

ROOT: BlockHash = -1
"""Name before the first block of a chain. No name is negative."""
ALL = 1 << 40
"""Blocks before an end, if all are needed: more than any prompt has."""


class WindowBlock:
    """A block of groups alike, kept while any of them holds it, or a block that follows it."""

    __slots__ = ("above", "below", "end", "is_held", "is_ready", "name", "references")

    def __init__(self, name: BlockHash) -> None:
        self.name = name
        self.references: References = ()
        self.end: SequenceHash | None = None
        """Last block of the index in it."""
        self.above: BlockHash | None = None
        """Name of the block before it, or ROOT; None: not known."""
        self.below: BlockHash | set[BlockHash] | None = None
        """Names of those after it that have references: most often one, stored without a set."""
        self.is_held = False
        self.is_ready = False

    def each_below(self) -> Iterable[BlockHash]:
        below = self.below
        return below if isinstance(below, set) else () if below is None else (below,)

    def adopt(self, name: BlockHash) -> None:
        if self.below is None:
            self.below = name
        elif isinstance(self.below, set):
            self.below.add(name)
        elif self.below != name:
            self.below = {self.below, name}

    def disown(self, name: BlockHash) -> None:
        if isinstance(self.below, set) and len(self.below) > 1:
            self.below.remove(name)
        else:
            self.below = None


class Window:
    """Blocks of groups with the same window.

    num_blocks: how many blocks before an end each group has to hold, if there are so many.
    """

    def __init__(self, block_size: int, num_blocks: int, *, copies: bool) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.blocks: dict[BlockHash, WindowBlock] = {}
        self._copies = copies
        self._groups: set[int | None] = set()

    @property
    def shape(self) -> tuple[int, int]:
        return self.block_size, self.num_blocks

    def admit(self, group: int | None) -> None:
        self._groups.add(group)
        for block in self.blocks.values():
            block.is_held = block.is_ready = False

    def is_ready(self, name: BlockHash) -> bool:
        block = self.blocks.get(name)
        return block is not None and block.is_ready

    def store(self, name: BlockHash, place: Place, above: BlockHash | None) -> WindowBlock:
        """above: None: not known, or not now."""
        block = self._block(name)
        self.link(block, above)
        block.references = with_copy(block.references, place, copies=self._copies)
        return block

    def link(self, block: WindowBlock, above: BlockHash | None) -> None:
        if self.num_blocks > 1 and above is not None and block.above is None:
            block.above = above
            if above != ROOT:
                self._block(above).adopt(block.name)
            # Look again at what is ready.
            block.is_held = False

    def gained(self, block: WindowBlock) -> Iterator[WindowBlock]:
        """Yields the blocks that are ready once `block` is held, if it was not and is now."""
        if block.is_held or not self._is_held(block):
            return
        block.is_held = True
        num_held = 1
        above = block.above
        while num_held < self.num_blocks and above is not None and above != ROOT:
            before = self.blocks[above]
            if not before.is_held:
                break
            num_held = self.num_blocks if before.is_ready else num_held + 1
            above = before.above
        if above == ROOT:
            num_held = self.num_blocks
        for distance, following in self._held_from(block):
            if num_held + distance >= self.num_blocks and not following.is_ready:
                following.is_ready = True
                yield following

    def remove(self, name: BlockHash, place: Place, left: int | None) -> list[WindowBlock]:
        """Returns the blocks that are no longer ready, or no longer known."""
        block = self.blocks.get(name)
        if block is None:
            return []
        block.references = without_copy(block.references, place, left)
        lost: list[WindowBlock] = []
        if block.is_held and not self._is_held(block):
            block.is_held = False
            for _, following in self._held_from(block):
                if following.is_ready:
                    following.is_ready = False
                    lost.append(following)
        if not block.references:
            lost += self._leave(block)
            if block.below is None and name in self.blocks:
                lost.append(self.blocks.pop(name))
        return lost

    def _block(self, name: BlockHash) -> WindowBlock:
        return self.blocks.get(name) or self.blocks.setdefault(name, WindowBlock(name))

    def _is_held(self, block: WindowBlock) -> bool:
        return {group for (_, group), _ in block.references} == self._groups

    def _held_from(self, block: WindowBlock) -> Iterator[tuple[int, WindowBlock]]:
        """Yields `block` and the held ones after it whose windows contain it, with their
        distance."""
        level, distance = [block], 0
        while level and distance < self.num_blocks:
            for one in level:
                yield distance, one
            below = [self.blocks[name] for one in level for name in one.each_below()]
            level = [one for one in below if one.is_held]
            distance += 1

    def _leave(self, block: WindowBlock) -> Iterator[WindowBlock]:
        name, block.above = block.above, None
        if name is not None and name != ROOT:
            above = self.blocks[name]
            above.disown(block.name)
            if not above.references and above.below is None:
                yield self.blocks.pop(name)
