"""After which blocks an engine's sliding windows and recurrent states let it resume.

vLLM reuses a prefix only if each group of layers holds what it needs to go on there: with a window,
the blocks within it; with a recurrent state, the block that ends there. Groups give the end of the
same prefix the same name, whatever the sizes of their blocks: a name that each of them holds is an
end that suits all of them, and nothing has to be hashed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import repeat

from app.core.types import SequenceHash, Tier
from workers.bridge.engine_events import (
    STATE_KINDS,
    WINDOW_KINDS,
    BlockHash,
    BlockRemoved,
    BlockStored,
    key_of,
)
from workers.bridge.references import Place, References, with_copy, without_copy

Turn = tuple[SequenceHash, int]
"""A block of the index, and 1 or -1: the engine can resume after it from now on, or no longer."""


class Windows:
    """What the groups with a window or a state hold.

    end_of: the last block of the index in the engine's block of that name, if that is known.
    copies: as EngineBlocks' announces_copies.
    """

    def __init__(self, end_of: Callable[[BlockHash], SequenceHash | None], *, copies: bool) -> None:
        self._end_of = end_of
        self._copies = copies
        self._windows: list[_Window] = []
        """One for all groups alike."""
        self._by_group: dict[int, _Window] = {}

    def concern(self, event: BlockStored | BlockRemoved) -> bool:
        kind = event.kv_cache_spec_kind if isinstance(event, BlockStored) else None
        is_of_kind = (kind or "").lower() in WINDOW_KINDS | STATE_KINDS
        return event.group_idx is not None and (is_of_kind or event.group_idx in self._by_group)

    def learn(self, event: BlockStored, tier: Tier) -> bool:
        """Require what the event's group needs. False: it was required already, or cannot be."""
        group, kind = event.group_idx, event.kv_cache_spec_kind
        if group is None or kind is None or group in self._by_group:
            return False
        # Blocks of offloads may be larger than the group's.
        if tier is not Tier.DEVICE or event.block_size < 1:
            return False
        seen = event.kv_cache_spec_sliding_window
        if seen is None or kind.lower() in STATE_KINDS:
            seen = 1
        shape = event.block_size, max(1, -(-(seen - 1) // event.block_size))
        window = next((w for w in self._windows if (w.block_size, w.num_blocks) == shape), None)
        if window is None:
            self._windows.append(window := _Window(*shape, copies=self._copies))
        window.admit(group)
        self._by_group[group] = window
        return True

    def store(self, event: BlockStored, tier: Tier) -> Iterator[Turn]:
        window = self._window_of(event)
        if window is None:
            return
        # Beyond a block that an event leaves out lies nothing that the engine means to resume with.
        is_chain = bool(event.token_ids) and event.block_size == window.block_size
        above = None if event.parent_block_hash is None else key_of(event.parent_block_hash)
        for name in map(key_of, event.block_hashes):
            block = window.store(name, (tier, event.group_idx), above if is_chain else None)
            block.end = block.end or self._end_of(name)
            yield from self._turns(window, window.gained(block), 1)
            above = name

    def remove(self, event: BlockRemoved, tier: Tier) -> Iterator[Turn]:
        window = self._window_of(event)
        counts: Iterable[int | None] = event.remaining_copy_counts or repeat(None)
        for name, left in zip(map(key_of, event.block_hashes), counts, strict=False):
            if window is not None:
                lost = window.remove(name, (tier, event.group_idx), left)
                yield from self._turns(window, lost, -1)

    def locate(self, names: Iterable[BlockHash]) -> Iterator[Turn]:
        """The engine's blocks of these names are known from now on."""
        for name in names if self._windows else ():
            block, end = self._windows[0].blocks.get(name), self._end_of(name)
            if block is None or block.end == end:
                continue
            turns = ((block.end, -1), (end, 1))
            block.end = end
            if all(window.is_ready(name) for window in self._windows):
                yield from ((one, change) for one, change in turns if one is not None)

    def clear(self) -> None:
        """Nothing is held any more; what the groups need stays known."""
        for window in self._windows:
            window.blocks.clear()

    def _window_of(self, event: BlockStored | BlockRemoved) -> _Window | None:
        return None if event.group_idx is None else self._by_group.get(event.group_idx)

    def _turns(self, window: _Window, blocks: Iterable[_Block], change: int) -> Iterator[Turn]:
        """What it means that these blocks of one window are ready, or no longer."""
        others = [other for other in self._windows if other is not window]
        for block in blocks:
            if all(other.is_ready(block.name) for other in others):
                # The first window's block knows its end if any does.
                first = block if window is self._windows[0] else others[0].blocks[block.name]
                if first.end is not None:
                    yield first.end, change


class _Block:
    """A block of groups alike. It is kept while any of them holds it, or one that follows it."""

    __slots__ = ("above", "below", "end", "is_held", "is_ready", "name", "references")

    def __init__(self, name: BlockHash) -> None:
        self.name = name
        self.references: References = ()
        self.end: SequenceHash | None = None
        """The last block of the index in it."""
        self.above: BlockHash | None = None
        """The block before it; None at the beginning of a chain, or if that is not known."""
        self.below: BlockHash | set[BlockHash] | None = None
        """Those after it that have references: most often one, stored without a set."""
        self.is_held = False
        """By each of the groups?"""
        self.is_ready = False
        """Is the whole window before its end held?"""

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


class _Window:
    """What groups with the same window hold.

    num_blocks: how many blocks before an end each group has to hold, if there are so many.
    """

    def __init__(self, block_size: int, num_blocks: int, *, copies: bool) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.blocks: dict[BlockHash, _Block] = {}
        self._copies = copies
        self._groups: set[int] = set()

    def admit(self, group: int) -> None:
        self._groups.add(group)
        for block in self.blocks.values():
            block.is_held = block.is_ready = False

    def is_ready(self, name: BlockHash) -> bool:
        block = self.blocks.get(name)
        return block is not None and block.is_ready

    def store(self, name: BlockHash, place: Place, above: BlockHash | None) -> _Block:
        block = self._block(name)
        if self.num_blocks > 1 and above is not None and not block.references:
            block.above = above
            self._block(above).adopt(name)
        elif above is not None and block.above not in (None, above):
            # One of them lies before a gap. Take neither, and look again at what is ready.
            self._leave(block)
            block.is_held = False
        block.references = with_copy(block.references, place, copies=self._copies)
        return block

    def gained(self, block: _Block) -> Iterator[_Block]:
        """The blocks that are ready once `block` is held, if it was not and is now."""
        if block.is_held or not self._is_held(block):
            return
        block.is_held = True
        num_held = 1
        above = block.above
        while num_held < self.num_blocks and above is not None:
            before = self.blocks[above]
            if not before.is_held:
                break
            num_held = self.num_blocks if before.is_ready else num_held + 1
            above = before.above
        if above is None:
            num_held = self.num_blocks
        for distance, following in self._held_from(block):
            if num_held + distance >= self.num_blocks and not following.is_ready:
                following.is_ready = True
                yield following

    def remove(self, name: BlockHash, place: Place, left: int | None) -> list[_Block]:
        """The blocks that are no longer ready."""
        block = self.blocks.get(name)
        if block is None:
            return []
        block.references = without_copy(block.references, place, left)
        lost: list[_Block] = []
        if block.is_held and not self._is_held(block):
            block.is_held = False
            for _, following in self._held_from(block):
                if following.is_ready:
                    following.is_ready = False
                    lost.append(following)
        if not block.references:
            self._leave(block)
            if block.below is None:
                self.blocks.pop(name, None)
        return lost

    def _block(self, name: BlockHash) -> _Block:
        return self.blocks.get(name) or self.blocks.setdefault(name, _Block(name))

    def _is_held(self, block: _Block) -> bool:
        return {group for (_, group), _ in block.references} == self._groups

    def _held_from(self, block: _Block) -> Iterator[tuple[int, _Block]]:
        """`block` and the held ones after it whose windows contain it, with their distance."""
        level = [block]
        for distance in range(self.num_blocks):
            for one in level:
                yield distance, one
            below = [self.blocks[name] for one in level for name in one.each_below()]
            level = [one for one in below if one.is_held]
            if not level:
                return

    def _leave(self, block: _Block) -> None:
        if block.above is not None:
            above, block.above = self.blocks[block.above], None
            above.disown(block.name)
            if not above.references and above.below is None:
                self.blocks.pop(above.name, None)
