"""Events that tell the index which blocks can be found, and which no longer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from app.core.events import CacheEvent, Removed, Stored
from app.core.types import SequenceHash, Tier
from workers.kv.identity import hash_of
from workers.kv.slots import Slot, block_of


class EventLog:
    """Changes in order, until they are taken; marks the slots of published blocks."""

    def __init__(self) -> None:
        self._events: list[CacheEvent] = []
        self._num_slots: Counter[tuple[Tier, SequenceHash]] = Counter()
        """Published with that hash: different blocks may have it."""

    def publish(self, tier: Tier, slots: Iterable[Slot]) -> None:
        """These blocks can be found: one event for each contiguous part of a chain."""
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
        """These blocks leave the tier."""
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
        """Changes since the last call, in order."""
        events, self._events = self._events, []
        return events


def _stored(run: Sequence[Slot], tier: Tier) -> Stored:
    parent = run[0].parent
    blocks = tuple(hash_of(block_of(slot)) for slot in run)
    return Stored(blocks, None if parent is None else hash_of(parent), tier)
