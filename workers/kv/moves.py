"""Moves of blocks between tiers: when blocks are stored, what is under way, and events that tell
the index which blocks can be found."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from app.core.events import CacheEvent, Removed, Stored
from app.core.types import SequenceHash, Tier
from workers.kv.identity import BlockIdentity, hash_of
from workers.kv.slots import Slot, Slots, block_of
from workers.kv.tables import Move


class WritePolicy(Enum):
    """Rule of when a block is stored in the next slower tier."""

    BACK = "back"
    THROUGH = "through"


@dataclass(frozen=True, slots=True)
class AdmissionPolicy:
    """Rule of which blocks are worth a place in a slower tier, and worth loading from there.

    min_uses: a block is stored once this many requests have needed it. compute_s, load_s: seconds
    to compute a block, and to load it from a tier.
    """

    min_uses: int = 1
    compute_s: float = math.inf
    load_s: Mapping[Tier, float] = field(default_factory=dict)

    def stores(self, uses: int, tier: Tier) -> bool:
        return uses >= self.min_uses and self.loads(tier)

    def loads(self, tier: Tier) -> bool:
        return self.load_s.get(tier, 0.0) < self.compute_s


class EventLog:
    """Changes in order, until they are taken; marks the slots of published blocks."""

    def __init__(self) -> None:
        self._events: list[CacheEvent] = []
        self._num_slots: Counter[tuple[Tier, SequenceHash]] = Counter()
        """Number of published slots with a hash: different blocks may have it."""

    def publish(self, tier: Tier, slots: Iterable[Slot]) -> None:
        """Says that these blocks can be found, in one event for each contiguous part of a chain."""
        run: list[Slot] = []
        for slot in slots:
            slot.published = True
            self._num_slots[tier, hash_of(block_of(slot))] += 1
            if run and slot.parent != run[-1].block:
                self._events.append(_stored(run, tier))
                run = []
            run.append(slot)
        if run:
            self._events.append(_stored(run, tier))

    def withdraw(self, tier: Tier, slots: Iterable[Slot]) -> None:
        """Says that these blocks leave the tier."""
        blocks = []
        for slot in slots:
            slot.published = False
            block = hash_of(block_of(slot))
            self._num_slots[tier, block] -= 1
            if not self._num_slots[tier, block]:
                del self._num_slots[tier, block]
                blocks.append(block)
        if blocks:
            self._events.append(Removed(tuple(blocks), tier))

    def take(self) -> list[CacheEvent]:
        events, self._events = self._events, []
        return events


def _stored(run: Sequence[Slot], tier: Tier) -> Stored:
    parent = run[0].parent
    blocks = tuple(hash_of(block_of(slot)) for slot in run)
    return Stored(blocks, None if parent is None else hash_of(parent), tier)


class Moves:
    """Planned moves, whose slots are held until each is finished.

    tiers: fastest first. max_storing: blocks that may be on their way to a slower tier at once.
    """

    def __init__(self, tiers: Mapping[Tier, Slots], events: EventLog, max_storing: int) -> None:
        self.below = dict(zip(tiers, [*list(tiers)[1:], None], strict=True))
        self.under_way: set[Move] = set()
        self._tiers = tiers
        self._events = events
        self._max_storing = max_storing
        self._planned: list[Move] = []
        self._storing: dict[Tier, set[BlockIdentity]] = {tier: set() for tier in tiers}
        """Blocks under way, by the tier that they are stored to."""

    def room_below(self, tier: Tier) -> int:
        """Returns how many blocks of `tier` could now be stored in the tier below."""
        target = self.below[tier]
        if target is None:
            return 0
        return min(self._tiers[target].num_free, self._max_storing - len(self._storing[target]))

    def is_storing(self, block: BlockIdentity, target: Tier) -> bool:
        return block in self._storing[target]

    def load(self, source: Tier, sources: list[Slot], targets: list[Slot]) -> None:
        """Plans a load onto the device, whose slots are held; others can find the targets."""
        blocks = [block_of(slot) for slot in sources]
        move = Move(source, Tier.DEVICE, sources, targets, blocks)
        for slot, above in zip(sources, targets, strict=True):
            self._tiers[Tier.DEVICE].register(above, block_of(slot), slot.parent)
            above.filling = move
            above.uses = slot.uses
        self._plan(move)

    def store(self, source: Tier, target: Tier, sources: list[Slot]) -> Move:
        """Plans a store into free slots of `target`, of which there must be as many."""
        for slot in sources:
            self._tiers[source].hold(slot)
        targets = self._tiers[target].take(len(sources))
        move = Move(source, target, sources, targets, [block_of(slot) for slot in sources])
        for slot, below in zip(sources, targets, strict=True):
            below.parent = slot.parent
            below.uses = slot.uses
        self._storing[target].update(move.blocks)
        self._plan(move)
        return move

    def take_planned(self) -> list[Move]:
        planned, self._planned = self._planned, []
        return planned

    def end_load(self, move: Move, num_done: int) -> None:
        """Lets others read the first blocks in the targets; drops the source of the next one."""
        self._end(move)
        source, target = self._tiers[move.source], self._tiers[move.target]
        loaded = []
        for n, slot in enumerate(move.targets):
            slot.filling = None
            if n < num_done:
                loaded.append(slot)
            else:
                target.forget(slot)
        self._events.publish(move.target, loaded)
        if num_done < len(move.sources):
            bad = move.sources[num_done]
            if bad.block is not None:
                self._events.withdraw(move.source, [bad])
                source.forget(bad)
        _release(target, move.targets)
        _release(source, move.sources)

    def end_store(self, move: Move, num_done: int) -> list[Slot]:
        """Lets others find the first blocks in the targets; returns those slots."""
        self._end(move)
        source, target = self._tiers[move.source], self._tiers[move.target]
        self._storing[move.target].difference_update(move.blocks)
        stored = {}
        for slot, block, above in list(zip(move.targets, move.blocks, move.sources, strict=True))[
            :num_done
        ]:
            # A source found bad meanwhile has forgotten its block.
            if above.block == block:
                target.register(slot, block, slot.parent)
                stored[slot] = above
        self._events.publish(move.target, stored)
        _release(target, move.targets)
        for slot, above in stored.items():
            if above.leaving:
                slot.idle_since_s = above.idle_since_s
        _release(source, move.sources)
        return list(stored)

    def check(self) -> None:
        """Raises AssertionError if the bookkeeping contradicts itself."""
        assert not any(move.finished for move in self.under_way)
        for tier, storing in self._storing.items():
            stores = (m for m in self.under_way if m.target is tier and not m.is_load)
            assert storing == {block for move in stores for block in move.blocks}
            assert len(storing) <= self._max_storing

    def _plan(self, move: Move) -> None:
        self.under_way.add(move)
        self._planned.append(move)

    def _end(self, move: Move) -> None:
        assert not move.finished
        move.finished = True
        self.under_way.remove(move)


def _release(slots: Slots, released: Sequence[Slot]) -> None:
    """Releases tails before the blocks in front of them."""
    for slot in reversed(released):
        slots.release(slot)
