"""For engines you write, as none here calls it: blocks that stay a while, or longer than others.

    idle ──pin──► pinned ──pin ends──► idle

pinned: others can find it, nobody uses it, and it is not evicted before the pin ends.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import count
from typing import ClassVar

from app.core.types import SequenceHash
from workers.kv.manager import BlockManager
from workers.kv.slots import Slot, Slots
from workers.kv.tables import BlockTable


class RankedSlot(Slot):
    """A slot with the rank of its block."""

    __slots__ = ("pinned_until_s", "priority")

    def _empty(self) -> None:
        super()._empty()
        self.priority = 0
        self.pinned_until_s = 0.0

    def inherit(self, source: Slot) -> None:
        super().inherit(source)
        self.priority = _ranked(source).priority


class RankedSlots(Slots):
    """Slots of which those with the lowest priority are evicted first, and pinned ones never.

    Use few priorities: each has its own LRU order.
    """

    slot_type: ClassVar = RankedSlot

    def __init__(self, num_slots: int, now: Callable[[], float]) -> None:
        super().__init__(num_slots, now)
        self._by_priority: dict[int, OrderedDict[int, Slot]] = {}
        """The idle slots of each, from least to most recently used."""
        self._num_pinned = 0
        """Slots that would be idle if they were not pinned."""
        self._pins: list[tuple[float, int, RankedSlot]] = []
        """Heap of the pins that have not ended: by end, then by the order in which they began."""
        self._pins_begun = count()

    @property
    def num_idle(self) -> int:
        self._end_pins()
        return super().num_idle

    def pin(self, pinned: Slot, until_s: float) -> None:
        """Do not choose the slot before `until_s`. A pin can be extended but not shortened."""
        slot = _ranked(pinned)
        if until_s <= max(slot.pinned_until_s, self._now()):
            return
        idle = self._is_idle(slot)
        if idle:
            self._leave_order(slot)
        slot.pinned_until_s = until_s
        heapq.heappush(self._pins, (until_s, next(self._pins_begun), slot))
        if idle:
            self._enter_order(slot)

    def is_evictable(self, slot: Slot) -> bool:
        return slot.leaving > 0 or not (slot.references or _ranked(slot).pinned_until_s)

    def check(self) -> None:
        pinned = {
            slot.block_id
            for slot in map(_ranked, self._slots)
            if slot.pinned_until_s > 0 and self._is_idle(slot) and slot.block_id not in self._idle
        }
        self._check(protected=pinned)
        assert len(pinned) == self._num_pinned
        ordered = [n for slots in self._by_priority.values() for n in slots]
        assert sorted(ordered) == sorted(self._idle)

    def _enter_order(self, slot: Slot) -> None:
        ranked = _ranked(slot)
        if ranked.pinned_until_s > self._now():
            self._num_pinned += 1
            return
        ranked.pinned_until_s = 0.0
        super()._enter_order(slot)
        self._by_priority.setdefault(ranked.priority, OrderedDict())[slot.block_id] = slot

    def _leave_order(self, slot: Slot) -> None:
        if self._is_idle(slot):
            if slot.block_id not in self._idle:
                self._num_pinned -= 1
                return
            del self._by_priority[_ranked(slot).priority][slot.block_id]
        super()._leave_order(slot)

    def _pop_idle(self, num: int) -> list[Slot]:
        popped: list[Slot] = []
        for priority in sorted(self._by_priority):
            of_priority = self._by_priority[priority]
            while of_priority and len(popped) < num:
                n, slot = of_priority.popitem(last=False)
                del self._idle[n]
                popped.append(slot)
        return popped

    def _end_pins(self) -> None:
        now = self._now()
        while self._pins and self._pins[0][0] <= now:
            until_s, _, slot = heapq.heappop(self._pins)
            if slot.pinned_until_s == until_s and self._is_idle(slot):
                self._num_pinned -= 1
                self._enter_order(slot)


class PinningBlockManager(BlockManager):
    """A block manager whose blocks can be pinned, and ranked."""

    slots_type: ClassVar = RankedSlots

    def pin(self, chain: Sequence[SequenceHash], ttl_s: float) -> int:
        """Keep the leading blocks of `chain` that are there from eviction for `ttl_s` seconds.

        Returns how many there are.
        """
        found = self._find(chain)
        until_s = self._now() + ttl_s
        for tier, slot in reversed(found):  # tails must be the older ones; see `release`
            slots = self.tiers[tier]
            assert isinstance(slots, RankedSlots)
            slots.pin(slot, until_s)
        return len(found)

    def rank(self, table: BlockTable, priority: int) -> None:
        """Call before `release`: blocks with a higher priority are evicted later.

        The highest priority that a block was given counts.
        """
        for slot in map(_ranked, table.slots):
            slot.priority = max(slot.priority, priority)


def _ranked(slot: Slot) -> RankedSlot:
    assert isinstance(slot, RankedSlot)
    return slot
