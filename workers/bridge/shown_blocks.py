"""What of an engine's cache to show, if it cannot resume after every block that it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from app.core.events import CacheEvent, Cleared, Removed, Stored
from app.core.types import SequenceHash, Tier
from workers.bridge.engine_events import BlockHash, BlockRemoved, BlockStored
from workers.bridge.windows import Turn, Windows


class _Block:
    """A block that is held, or that leads to one to show."""

    __slots__ = ("held", "num_reasons", "parent")

    def __init__(self) -> None:
        self.parent: SequenceHash | None = None
        """Known only once the block has been stored."""
        self.held = 0
        """Bit 1 << tier for each tier that holds the block."""
        self.num_reasons = 0
        """Why to show it: how many of the engine's blocks it could resume after end with it, and
        how many of the blocks that follow it are shown."""

    @property
    def tiers(self) -> Iterator[Tier]:
        return (tier for tier in Tier if self.held >> tier & 1)


class ShownBlocks:
    """Shows a block that is held while it is an end to resume after, or one that follows it is
    shown: so with each block, all that are held of the prefix which ends there. It shows all blocks
    until an event names a group of layers with a window or a state.

    end_of and copies: as for Windows."""

    def __init__(self, end_of: Callable[[BlockHash], SequenceHash | None], *, copies: bool) -> None:
        self._windows = Windows(end_of, copies=copies)
        self.is_partial = False
        self._blocks: dict[SequenceHash, _Block] = {}

    def depends_on(self, event: BlockStored | BlockRemoved) -> bool:
        return self._windows.concern(event)

    def of(self, held: Iterable[Stored]) -> Iterable[Stored]:
        """What is shown of `held`, which is all that is held."""
        if not self.is_partial:
            return held
        return (
            Stored((name,), block.parent, tier)
            for name, block in self._blocks.items()
            if block.num_reasons
            for tier in block.tiers
        )

    def take_window(
        self, event: BlockStored | BlockRemoved, tier: Tier, held: Callable[[], Iterable[Stored]]
    ) -> list[CacheEvent]:
        """What to show after an event of a group with a window or a state. held: all that is."""
        if isinstance(event, BlockRemoved):
            return self._turned(self._windows.remove(event, tier))
        hidden: list[CacheEvent] = []
        if self._windows.learn(event, tier):
            hidden += [Removed(one.blocks, one.tier) for one in self.of(held())]
            self.is_partial = True
            self._blocks.clear()
            self.take([*held()])
        return hidden + self._turned(self._windows.store(event, tier))

    def take(self, changes: list[CacheEvent]) -> list[CacheEvent]:
        """What to show once this has happened to what is held."""
        if not self.is_partial:
            return changes
        return [shown for change in changes for shown in self._take(change)]

    def locate(self, names: Iterable[BlockHash]) -> list[CacheEvent]:
        """What to show once these blocks of the engine are known."""
        return self._turned(self._windows.locate(names))

    def clear(self) -> None:
        self._blocks.clear()
        self._windows.clear()

    def _turned(self, turns: Iterable[Turn]) -> list[CacheEvent]:
        return [shown for block, change in turns for shown in self._resume(block, change)]

    def _take(self, change: CacheEvent) -> Iterator[CacheEvent]:
        match change:
            case Stored():
                parent = change.parent
                for block in change.blocks:
                    yield from self._store(block, parent, change.tier)
                    parent = block
            case Removed():
                for block in change.blocks:
                    yield from self._remove(block, change.tier)

    def _resume(self, block: SequenceHash, change: int) -> list[CacheEvent]:
        """What to show once there is one reason more (1) or less (-1) to show `block`."""
        changes: list[CacheEvent] = []
        above: SequenceHash | None = block
        while above is not None:
            known = self._blocks.setdefault(above, _Block())
            was_wanted = known.num_reasons > 0
            known.num_reasons += change
            if (known.num_reasons > 0) == was_wanted:
                break
            for tier in known.tiers:
                if was_wanted:
                    changes.append(Removed((above,), tier))
                else:
                    changes.append(Stored((above,), known.parent, tier))
            if not known.held:
                if was_wanted:
                    del self._blocks[above]
                break
            above = known.parent
        return changes if change < 0 else changes[::-1]

    def _store(
        self, block: SequenceHash, parent: SequenceHash | None, tier: Tier
    ) -> Iterator[CacheEvent]:
        known = self._blocks.setdefault(block, _Block())
        known.parent = parent
        before = known.held
        known.held |= 1 << tier
        if known.num_reasons and known.held != before:
            if not before and parent is not None:
                yield from self._resume(parent, 1)
            yield Stored((block,), parent, tier)

    def _remove(self, block: SequenceHash, tier: Tier) -> Iterator[CacheEvent]:
        known = self._blocks.get(block)
        if known is None or not known.held >> tier & 1:
            return
        known.held ^= 1 << tier
        if known.num_reasons:
            yield Removed((block,), tier)
            if not known.held and known.parent is not None:
                yield from self._resume(known.parent, -1)
        elif not known.held:
            del self._blocks[block]


def joined(changes: Iterable[CacheEvent]) -> list[CacheEvent]:
    """The same in as few events as possible: chains in one piece."""
    runs: list[list[CacheEvent]] = []
    for change in changes:
        if runs and _continues(change, runs[-1][-1]):
            runs[-1].append(change)
        else:
            runs.append([change])
    return [_one(run) for run in runs]


def _continues(change: CacheEvent, before: CacheEvent) -> bool:
    match before, change:
        case Stored(), Stored():
            return change.tier is before.tier and change.parent == before.blocks[-1]
        case Removed(), Removed():
            return change.tier is before.tier
    return False


def _one(run: list[CacheEvent]) -> CacheEvent:
    first = run[0]
    if len(run) == 1 or isinstance(first, Cleared):
        return first
    blocks = tuple(b for one in run if not isinstance(one, Cleared) for b in one.blocks)
    return replace(first, blocks=blocks)
