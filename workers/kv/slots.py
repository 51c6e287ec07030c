"""Bookkeeping of one tier: which slot holds which block, who uses it, and which is evicted next.

    free ──take──► private ──register──► used ◄──hold / release──► idle ──choose──► leaving ──► free
                      └──────────────────release──────────────────────────────────────────────►

private: taken, and not visible to others. used: others can find it, and somebody reads it. idle:
others can find it, and nobody uses it. leaving: idle and chosen for eviction, but others can find
it until it is reclaimed, and a request that takes it before then keeps it.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.core.errors import NotEnoughBlocks
from workers.kv.identity import BlockIdentity

if TYPE_CHECKING:
    from workers.kv.tables import Move

MAX_STALE = 64
"""Entries of runs that have changed that FreeRuns keeps, beside as many as there are runs."""


class FreeRuns:
    """Numbers of free slots, as runs of consecutive ones.

    Those of the longest run are given out first: then blocks that are stored together lie together,
    and later move, and are freed, as runs.
    """

    def __init__(self) -> None:
        self._last: dict[int, int] = {}
        """Last number of each run, by its first."""
        self._first: dict[int, int] = {}
        """First number of each run, by its last."""
        self._longest: list[tuple[int, int]] = []
        """Heap of negative length and first number: of each run, and of some that have changed."""
        self._num_free = 0

    def __len__(self) -> int:
        return self._num_free

    def __iter__(self) -> Iterator[int]:
        for first, last in self._last.items():
            yield from range(first, last + 1)

    def add(self, first: int, last: int) -> None:
        self._num_free += last - first + 1
        if first - 1 in self._first:
            first = self._first.pop(first - 1)
        if last + 1 in self._last:
            last = self._last.pop(last + 1)
        self._last[first], self._first[last] = last, first
        heapq.heappush(self._longest, (first - last - 1, first))
        if len(self._longest) > 2 * len(self._last) + MAX_STALE:
            self._longest = [(a - b - 1, a) for a, b in self._last.items()]
            heapq.heapify(self._longest)

    def take(self, num: int) -> list[int]:
        """Gives out `num` of the numbers, of which there must be as many."""
        taken: list[int] = []
        while len(taken) < num:
            minus_size, first = heapq.heappop(self._longest)
            last = first - minus_size - 1
            if self._last.get(first) != last:
                continue  # it has changed
            del self._last[first], self._first[last]
            self._num_free += minus_size
            end = min(last + 1, first + num - len(taken))
            taken += range(first, end)
            if end <= last:
                self.add(end, last)
        return taken


@dataclass(eq=False, slots=True)
class Slot:
    """One slot of a tier. Its contents are identified by the slot's number and generation."""

    block_id: int
    generation: int = 0
    """Number of times that the slot has been freed."""
    references: int = 0
    """Requests and moves that need the slot to stay as it is."""
    block: BlockIdentity | None = None
    """None while nobody else may find it."""
    parent: BlockIdentity | None = None
    filling: Move | None = None
    """The move that is still filling the slot; whoever finds the slot waits for that move."""
    leaving: int = 0
    """Number of the `choose` call that picked the slot for eviction; 0: it stays."""
    published: bool = False
    """Whether the block was announced as stored, and not as removed since."""
    idle_since_s: float = 0.0
    """Time of the last use of an idle block, here or in the tier above."""
    uses: int = 0
    """Requests that have held the block."""

    def free(self) -> None:
        self.generation += 1
        self.block = self.parent = self.filling = None
        self.leaving = self.uses = 0
        self.published, self.idle_since_s = False, 0.0


def block_of(slot: Slot) -> BlockIdentity:
    """Returns the block of a slot that others can find."""
    assert slot.block is not None, f"slot {slot.block_id} has no block"
    return slot.block


class Slots:
    """The `num_slots` slots of a tier. now: a clock in seconds."""

    def __init__(self, num_slots: int, now: Callable[[], float]) -> None:
        self.num_slots = num_slots
        self._now = now
        self._slots = [Slot(n) for n in range(num_slots)]
        self._free = FreeRuns()
        self._free.add(0, num_slots - 1)
        self._by_block: dict[BlockIdentity, Slot] = {}
        self._idle: OrderedDict[int, Slot] = OrderedDict()
        """Slots that `choose` may take, from least to most recently used."""
        self._num_choices = 0
        self._num_leaving = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_leaving(self) -> int:
        return self._num_leaving

    def find(self, block: BlockIdentity) -> Slot | None:
        return self._by_block.get(block)

    def take(self, num: int) -> list[Slot]:
        """Takes `num` free slots, each held once. Raises NotEnoughBlocks, having taken none."""
        if num > len(self._free):
            raise NotEnoughBlocks(num, len(self._free))
        taken = [self._slots[n] for n in self._free.take(num)]
        for slot in taken:
            slot.references = 1
        return taken

    def adopt(self, blocks: Iterable[tuple[int, int, BlockIdentity, BlockIdentity | None]]) -> None:
        """Takes in the blocks that are already in the slots of a new tier.

        blocks: of each such slot its number, its generation, its block and that block's parent.
        """
        assert len(self._free) == self.num_slots, "slots were taken before others were adopted"
        adopted = []
        for block_id, generation, block, parent in blocks:
            slot = self._slots[block_id]
            slot.generation = generation
            if block in self._by_block:
                # The block was given up and stored again, and its old slot is not overwritten yet.
                slot.free()
                continue
            slot.references = 1
            self.register(slot, block, parent)
            adopted.append(slot)
        self._free = FreeRuns()
        for slot in self._slots:
            if not slot.references:
                self._free.add(slot.block_id, slot.block_id)
        for slot in self._tails_first(adopted):
            self.release(slot)

    def _tails_first(self, slots: Sequence[Slot]) -> Iterator[Slot]:
        """Yields each slot after those of its block's children, if the children have slots."""
        hanging = Counter(slot.parent for slot in slots)
        tails = deque(slot for slot in slots if not hanging[slot.block])
        while tails:
            slot = tails.popleft()
            yield slot
            hanging[slot.parent] -= 1
            parent = None if slot.parent is None else self.find(slot.parent)
            if parent is not None and not hanging[slot.parent]:
                tails.append(parent)

    def register(self, slot: Slot, block: BlockIdentity, parent: BlockIdentity | None) -> None:
        """Lets others find a slot that was taken. No other slot may hold that block."""
        assert slot.references, f"slot {slot.block_id} is not taken"
        assert slot.block is None, f"slot {slot.block_id} has a block"
        assert block not in self._by_block, f"{block.hex()} has a slot"
        slot.block, slot.parent = block, parent
        self._by_block[block] = slot

    def forget(self, slot: Slot) -> None:
        """Stops others from finding the slot, which is freed once nobody holds it."""
        assert slot.block is not None, f"slot {slot.block_id} has no block"
        self._leave_order(slot)
        del self._by_block[slot.block]
        slot.block = None
        if not slot.references:
            self._free_slot(slot)

    def hold(self, slot: Slot) -> None:
        """Keeps the slot as it is until the matching `release`. A leaving slot remains leaving."""
        if not slot.references and not slot.leaving:
            self._leave_order(slot)
        slot.references += 1

    def call_back(self, slot: Slot) -> None:
        """Lets a held slot that was leaving stay."""
        assert slot.leaving
        assert slot.references
        slot.leaving = 0
        self._num_leaving -= 1

    def release(self, slot: Slot) -> None:
        """Drops one reference. The last one frees the slot, or makes it the most recently used."""
        assert slot.references, f"slot {slot.block_id} is held by nobody"
        slot.references -= 1
        if slot.references:
            return
        if slot.block is None:
            self._free_slot(slot)
        elif not slot.leaving:
            self._enter_order(slot)

    def touch(self, slot: Slot) -> None:
        """Makes the slot the most recently used, if it is idle."""
        if self._is_idle(slot):
            self._leave_order(slot)
            self._enter_order(slot)

    def choose(self, num: int) -> list[Slot]:
        """Marks up to `num` idle slots as leaving, the longest unused first."""
        self._num_choices += 1
        chosen = [self._idle.popitem(last=False)[1] for _ in range(min(num, self.num_idle))]
        for slot in chosen:
            slot.leaving = self._num_choices
        self._num_leaving += len(chosen)
        return chosen

    def is_evictable(self, slot: Slot) -> bool:
        return slot.leaving > 0 or not slot.references

    def registered(self) -> list[Slot]:
        return list(self._by_block.values())

    def all(self) -> Sequence[Slot]:
        return self._slots

    def check(self) -> None:
        """Raises AssertionError if the bookkeeping contradicts itself."""
        free = set(self._free)
        assert len(free) == len(self._free), "a slot is free twice"
        num_leaving = 0
        for slot in self._slots:
            n = slot.block_id
            is_findable = slot.block is not None and self._by_block.get(slot.block) is slot
            assert is_findable == (slot.block is not None), f"slot {n} cannot be found"
            assert slot.references >= 0, f"slot {n}: {slot.references} references"
            state = (
                "free" if n in free else
                "leaving" if slot.leaving else
                "used" if slot.references else
                "idle"
            )  # fmt: skip
            num_leaving += state == "leaving"
            assert (n in free) == (state == "free")
            assert (n in self._idle) == (state == "idle"), f"slot {n} is {state}"
            assert is_findable or state in ("free", "used"), (
                f"slot {n} is {state} and cannot be found"
            )
            assert not (is_findable and state == "free"), f"slot {n} is free and may be found"
        assert num_leaving == self._num_leaving
        assert sum(slot.block is not None for slot in self._slots) == len(self._by_block)

    def _is_idle(self, slot: Slot) -> bool:
        return slot.block is not None and not slot.references and not slot.leaving

    def _enter_order(self, slot: Slot) -> None:
        slot.idle_since_s = self._now()
        self._idle[slot.block_id] = slot

    def _leave_order(self, slot: Slot) -> None:
        if slot.leaving:
            slot.leaving = 0
            self._num_leaving -= 1
        elif self._is_idle(slot):
            del self._idle[slot.block_id]

    def _free_slot(self, slot: Slot) -> None:
        slot.free()
        self._free.add(slot.block_id, slot.block_id)
