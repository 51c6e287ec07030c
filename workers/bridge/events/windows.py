"""Ends of an engine that cannot go on after every block that it holds: the blocks after which it
can.

vLLM reuses a prefix only if each group of layers holds what it needs to go on there: attention over
all of it every block, with a window those within it, a recurrent state the block that ends there.
Groups give the end of the same prefix the same name, whatever the sizes of their blocks: a name
that each of them can go on after is an end that suits all of them, and nothing has to be hashed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat

from app.core.events import Ends
from app.core.types import SequenceHash, Tier
from workers.bridge.events.events import (
    STATE_KINDS,
    WINDOW_KINDS,
    BlockHash,
    BlockRemoved,
    BlockStored,
    key_of,
)
from workers.bridge.events.window import ALL, ROOT, Window, WindowBlock

MASKED = 256
"""Events with gaps that wait for what tells where these are; older ones count for nothing."""
Chain = tuple[tuple[SequenceHash, ...], SequenceHash | None]
"""Blocks of the index in prompt order, and the one before them; None: they begin a prompt."""


class Windows:
    """Blocks of the groups of layers that do not stand for all.

    chain_of: returns the blocks of the index in the engine's block of that name, and the one before
    them, if that is known. copies: announces_copies of EngineBlocks. block_size: tokens per block
    of the index. recomputed: how many of these the engine drops of what it finds, for its drafter.
    """

    def __init__(
        self,
        chain_of: Callable[[BlockHash], Chain | None],
        *,
        copies: bool,
        block_size: int,
        recomputed: int,
    ) -> None:
        self._chain_of = chain_of
        self._block_size = block_size
        self._copies = copies
        self._recomputed = recomputed
        self._windows: list[Window] = []
        self._by_group: dict[int | None, Window] = {}
        self._lookahead = 0
        self._names: dict[SequenceHash, tuple[BlockHash, ...]] = {}
        """Blocks of the engine, by the block of the index that they end with. An engine that looks
        ahead has one for each way to go on, and a prompt is on one of them: only if all are ends,
        the block of the index is."""
        self._ends: set[SequenceHash] = set()
        self._masked: deque[tuple[Window, list[BlockHash]]] = deque(maxlen=MASKED)
        """Blocks that events left others out between, none of which was known."""

    @property
    def are_any(self) -> bool:
        return bool(self._windows)

    def concern(self, group: int | None) -> bool:
        return group in self._by_group

    def learn(self, event: BlockStored, lookahead: int = 0) -> list[Ends]:
        """Requires what the group of this event needs. lookahead: of all ends, from now on."""
        group = event.group_idx
        needed = self._needed(event)
        window = next((w for w in self._windows if w.shape == (event.block_size, needed)), None)
        if window is None:
            window = Window(event.block_size, needed, copies=self._copies)
            self._windows.append(window)
        window.admit(group)
        self._by_group[group] = window
        self._lookahead = max(self._lookahead, lookahead)
        gone, self._ends = tuple(self._ends), set()
        return [self._told(gone, are_ends=False)]

    def store(self, event: BlockStored, tier: Tier) -> list[Ends]:
        window = self._by_group[event.group_idx]
        is_own_size = event.block_size == window.block_size
        if window.num_blocks == ALL and tier is Tier.DEVICE and not is_own_size:
            # The part of a block at the end of a prompt.
            return []
        names: list[BlockHash] = [key_of(name) for name in event.block_hashes]
        place = (tier, event.group_idx)
        turned: list[WindowBlock] = []
        for name, above in zip(names, self._each_above(event, names, window), strict=True):
            block = window.store(name, place, above)
            self._name(block, self._end_of(name))
            turned += [block, *window.gained(block)]
        return self._turned(turned)

    def remove(self, event: BlockRemoved, tier: Tier) -> list[Ends]:
        window = self._by_group[event.group_idx]
        counts: Iterable[int | None] = event.remaining_copy_counts or repeat(None)
        turned: list[WindowBlock] = []
        for name, left in zip(map(key_of, event.block_hashes), counts, strict=False):
            turned += window.remove(name, (tier, event.group_idx), left)
        return self._turned(turned)

    def locate(self, names: Sequence[BlockHash]) -> list[Ends]:
        """Takes in that the engine's blocks of these names are known from now on."""
        turned: list[WindowBlock] = []
        for window in self._windows:
            for name in names:
                block = window.blocks.get(name)
                if block is not None:
                    turned += self._name(block, self._end_of(name))
        if self._masked:
            turned += self._link_masked(set(names))
        return self._turned(turned)

    def clear(self) -> list[Ends]:
        """Forgets what is held; what the groups need stays known."""
        self._names.clear()
        self._ends.clear()
        self._masked.clear()
        for window in self._windows:
            window.blocks.clear()
        return [self._told((), are_ends=False)] if self._windows else []

    def _needed(self, event: BlockStored) -> int:
        """Returns how many blocks before an end the group of this event has to hold. All, if events
        do not say that fewer suffice: they do not tell how long the chunks of chunked attention
        are."""
        kind, seen = (event.kv_cache_spec_kind or "").lower(), event.kv_cache_spec_sliding_window
        if kind in STATE_KINDS:
            return 1
        if kind in WINDOW_KINDS and seen is not None:
            return max(1, -(-(seen - 1) // event.block_size)) + (self._recomputed > 0)
        return ALL

    def _end_of(self, name: BlockHash) -> SequenceHash | None:
        chain = self._chain_of(name)
        return chain and chain[0][-1]

    def _each_above(
        self, event: BlockStored, names: list[BlockHash], window: Window
    ) -> Sequence[BlockHash | None]:
        """Returns what precedes each block of an event; None: that is not known."""
        if event.block_size != window.block_size or not event.token_ids:
            return [None] * len(names)
        if len(names) * event.block_size == len(event.token_ids):
            first = ROOT if event.parent_block_hash is None else key_of(event.parent_block_hash)
            return [first, *names[:-1]]
        if window.num_blocks > 1 and all(self._end_of(name) is None for name in names):
            self._masked.append((window, names))
        return self._between_masked(window, names)

    def _between_masked(self, window: Window, names: list[BlockHash]) -> Sequence[BlockHash | None]:
        """Returns what precedes each of some blocks of an event that leaves others out. The group
        that stands for all knows it, if its blocks are of that size. If they are longer, others
        were left out before the first one and after those that it has, too: no prompt is reused up
        to these others."""
        chains = [self._chain_of(name) for name in names]
        sizes = {len(chain[0]) * self._block_size for chain in chains if chain}
        if sizes == {window.block_size}:
            own = {chain[0][-1]: name for name, chain in zip(names, chains, strict=True) if chain}
            above = [chain[1] if chain else None for chain in chains]
            return [
                chain and (own.get(end) or self._only_name(end) if end is not None else ROOT)
                for chain, end in zip(chains, above, strict=True)
            ]
        if self._recomputed or not sizes:
            return [None] * len(names)
        pairs = zip(names, chains[:-1], strict=False)
        return [None, *(None if chain else above for above, chain in pairs)]

    def _only_name(self, end: SequenceHash) -> BlockHash | None:
        names = self._names.get(end, ())
        return names[0] if len(names) == 1 else None

    def _link_masked(self, known: set[BlockHash]) -> Iterator[WindowBlock]:
        for _ in range(len(self._masked)):
            window, names = self._masked.popleft()
            if known.isdisjoint(names):
                self._masked.append((window, names))
                continue
            for name, above in zip(names, self._between_masked(window, names), strict=True):
                block = window.blocks.get(name)
                if block is not None and block.references:
                    window.link(block, above)
                    yield from window.gained(block)

    def _name(self, block: WindowBlock, end: SequenceHash | None) -> list[WindowBlock]:
        """Notes that `block` ends with this block of the index; returns the block before and
        after."""
        if end is None or block.end == end:
            return []
        before = WindowBlock(block.name)
        before.end, block.end = block.end, end
        if block.name not in self._names.get(end, ()):
            self._names[end] = (*self._names.get(end, ()), block.name)
        return [before, block]

    def _turned(self, blocks: Iterable[WindowBlock]) -> list[Ends]:
        begun: list[SequenceHash] = []
        ended: list[SequenceHash] = []
        for end in dict.fromkeys(block.end or self._end_of(block.name) for block in blocks):
            if end is None or self._is_end(end) == (end in self._ends):
                continue
            (ended if end in self._ends else begun).append(end)
        self._ends.update(begun)
        self._ends.difference_update(ended)
        both = ((ended, False), (begun, True))
        return [self._told(tuple(ends), are_ends=are_ends) for ends, are_ends in both if ends]

    def _is_end(self, end: SequenceHash) -> bool:
        present = tuple(
            name
            for name in self._names.get(end, ())
            if self._end_of(name) in (end, None)
            and any(name in window.blocks for window in self._windows)
        )
        if present:
            self._names[end] = present
        else:
            self._names.pop(end, None)
        return bool(present) and all(
            window.is_ready(name) for name in present for window in self._windows
        )

    def _told(self, ends: tuple[SequenceHash, ...], *, are_ends: bool) -> Ends:
        if not self._recomputed:
            return Ends(ends, are_ends, self._lookahead)
        if all(window.num_blocks == 1 for window in self._windows):
            # Drafters have no states: only the group that stands for all drops blocks.
            return Ends(ends, are_ends, self._recomputed)
        dropped = self._recomputed * self._block_size
        if any((w.block_size, w.num_blocks > 1) != (dropped, True) for w in self._windows):
            # A state is needed where it goes on, a window where what it drops ends: no block tells
            # of both. So there are no ends.
            ends = () if are_ends else ends
        return Ends(ends, are_ends, 0, self._recomputed)
