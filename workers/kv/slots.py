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
from dataclasses import dataclass, field
from itertools import count

from app.core.errors import NotEnoughBlocks
from app.core.types import SequenceHash, Tier
from workers.kv.free_runs import FreeRuns


class Slot:
    """One slot of a tier. Its contents are identified by the slot's number and generation."""

    __slots__ = (
        "block",
        "block_id",
        "filling",
        "generation",
        "idle_since_s",
        "leaving",
        "parent",
        "pinned_until_s",
        "priority",
        "published",
        "references",
        "uses",
    )

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.generation = 0
        """How many times the slot has been freed."""
        self.references = 0
        """How many requests and transfers need the slot to stay as it is."""
        self._empty()

    def _empty(self) -> None:
        self.block: SequenceHash | None = None
        """None while nobody else may find it."""
        self.parent: SequenceHash | None = None
        self.filling: Move | None = None
        """The move that is still filling the slot; whoever finds the slot waits for that move."""
        self.leaving = 0
        """Number of the `choose` call that picked the slot for eviction; 0: it stays."""
        self.published = False
        """Has the block been announced as stored, and not as removed since?"""
        self.priority = 0
        self.pinned_until_s = 0.0
        self.idle_since_s = 0.0
        """Once nobody uses the block: when it was last used, here or in the tier above."""
        self.uses = 0
        """How many requests have held the block."""

    def free(self) -> None:
        """Discard what the slot held."""
        self.generation += 1
        self._empty()


@dataclass(eq=False, slots=True)
class Move:
    """Blocks to copy from one tier to another: a load if the target is faster, otherwise a store.

    Sources and targets are held until the move is finished.
    """

    source: Tier
    target: Tier
    sources: list[Slot]
    targets: list[Slot]
    blocks: list[SequenceHash]
    after: list[Move]
    """Moves that fill its sources; they must have ended before this one begins."""
    generations: list[int] = field(init=False)
    """Generations of the sources when the move was planned."""
    finished: bool = False

    def __post_init__(self) -> None:
        self.generations = [slot.generation for slot in self.sources]

    @property
    def is_load(self) -> bool:
        return self.target < self.source

    @property
    def num_ready(self) -> int:
        """How many leading sources hold what is to be copied."""
        planned = zip(self.sources, self.generations, self.blocks, strict=True)
        for n, (slot, generation, block) in enumerate(planned):
            if (slot.generation, slot.block) != (generation, block) or slot.filling is not None:
                return n
        return len(self.sources)


class Slots:
    """The `num_slots` slots of a tier. Each operation takes the same time in any tier.

    now: seconds, for pins. Use few priorities: each has its own LRU order.
    """

    def __init__(self, num_slots: int, now: Callable[[], float]) -> None:
        if num_slots < 1:
            raise ValueError(f"a tier of {num_slots} slots")
        self.num_slots = num_slots
        self._now = now
        self._slots = [Slot(n) for n in range(num_slots)]
        self._free = FreeRuns()
        self._free.add(0, num_slots - 1)
        self._by_block: dict[SequenceHash, Slot] = {}
        self._idle: dict[int, OrderedDict[int, Slot]] = {}
        """By priority, then from least to most recently used."""
        self._num_idle = 0
        self._num_choices = 0
        self._num_leaving = 0
        self._num_pinned = 0
        """Slots that would be idle if they were not pinned."""
        self._pins: list[tuple[float, int, Slot]] = []
        """Heap of the pins that have not ended: by end, then by the order in which they began."""
        self._pins_begun = count()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_idle(self) -> int:
        """How many slots `choose` may take."""
        self._end_pins()
        return self._num_idle

    @property
    def num_leaving(self) -> int:
        return self._num_leaving

    def find(self, block: SequenceHash) -> Slot | None:
        return self._by_block.get(block)

    def take(self, num: int) -> list[Slot]:
        """Take `num` free slots, each held once. Raises NotEnoughBlocks, having taken none."""
        if num > len(self._free):
            raise NotEnoughBlocks(num, len(self._free))
        taken = [self._slots[n] for n in self._free.take(num)]
        for slot in taken:
            slot.references = 1
        return taken

    def adopt(self, held: Iterable[tuple[int, int, SequenceHash, SequenceHash | None]]) -> None:
        """Take in what the slots of a new tier already hold.

        held: of each such slot its number, its generation, its block and that block's parent.
        """
        assert len(self._free) == self.num_slots, "slots were taken before others were adopted"
        adopted = []
        for block_id, generation, block, parent in held:
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
        """Yield each slot after those of its block's children, if the children have slots."""
        hanging = Counter(slot.parent for slot in slots)
        tails = deque(slot for slot in slots if not hanging[slot.block])
        while tails:
            slot = tails.popleft()
            yield slot
            hanging[slot.parent] -= 1
            parent = None if slot.parent is None else self.find(slot.parent)
            if parent is not None and not hanging[slot.parent]:
                tails.append(parent)

    def register(self, slot: Slot, block: SequenceHash, parent: SequenceHash | None) -> None:
        """Let others find a slot that was taken. No other slot may hold that block."""
        assert slot.references, f"slot {slot.block_id} is not taken"
        assert slot.block is None, f"slot {slot.block_id} has a block"
        assert block not in self._by_block, f"{block:016x} has a slot"
        slot.block, slot.parent = block, parent
        self._by_block[block] = slot

    def forget(self, slot: Slot) -> None:
        """Stop others from finding the slot; it is freed once nobody holds it."""
        assert slot.block is not None, f"slot {slot.block_id} has no block"
        self._leave_order(slot)
        del self._by_block[slot.block]
        slot.block = None
        if not slot.references:
            self._free_slot(slot)

    def hold(self, slot: Slot) -> None:
        """Keep the slot as it is until the matching `release`. A leaving slot remains leaving."""
        if not slot.references and not slot.leaving:
            self._leave_order(slot)
        slot.references += 1

    def call_back(self, slot: Slot) -> None:
        """Let a held slot that was leaving stay."""
        assert slot.leaving
        assert slot.references
        slot.leaving = 0
        self._num_leaving -= 1

    def release(self, slot: Slot, priority: int = 0) -> None:
        """Drop one reference. The last one frees the slot, or makes it the most recently used.

        priority: the highest that the slot was released with counts.
        """
        assert slot.references, f"slot {slot.block_id} is held by nobody"
        slot.priority = max(slot.priority, priority)
        slot.references -= 1
        if slot.references:
            return
        if slot.block is None:
            self._free_slot(slot)
        elif not slot.leaving:
            self._enter_order(slot)

    def touch(self, slot: Slot) -> None:
        """Make the slot the most recently used, if it is idle."""
        if self._is_idle(slot):
            self._leave_order(slot)
            self._enter_order(slot)

    def choose(self, num: int) -> list[Slot]:
        """Mark up to `num` idle slots as leaving: lowest priority first, then longest unused."""
        self._end_pins()
        self._num_choices += 1
        chosen: list[Slot] = []
        for priority in sorted(self._idle):
            of_priority = self._idle[priority]
            while of_priority and len(chosen) < num:
                _, slot = of_priority.popitem(last=False)
                slot.leaving = self._num_choices
                chosen.append(slot)
        self._num_idle -= len(chosen)
        self._num_leaving += len(chosen)
        return chosen

    def pin(self, slot: Slot, until_s: float) -> None:
        """Do not choose the slot before `until_s`. A pin can be extended but not shortened."""
        if until_s <= max(slot.pinned_until_s, self._now()):
            return
        idle = self._is_idle(slot)
        if idle:
            self._leave_order(slot)
        slot.pinned_until_s = until_s
        heapq.heappush(self._pins, (until_s, next(self._pins_begun), slot))
        if idle:
            self._enter_order(slot)

    def held(self) -> list[Slot]:
        """All slots that others can find."""
        return list(self._by_block.values())

    def all(self) -> Sequence[Slot]:
        return self._slots

    def check(self) -> None:
        """Raises AssertionError if the bookkeeping contradicts itself. Takes a while."""
        free = set(self._free)
        idle = {n for slots in self._idle.values() for n in slots}
        assert len(free) == len(self._free), "a slot is free twice"
        assert len(idle) == sum(map(len, self._idle.values())) == self._num_idle
        counts = dict.fromkeys(("free", "idle", "pinned", "leaving", "used"), 0)
        for slot in self._slots:
            n, pinned = slot.block_id, slot.pinned_until_s > 0
            found = slot.block is not None and self._by_block.get(slot.block) is slot
            assert found == (slot.block is not None), f"slot {n} cannot be found"
            assert slot.references >= 0, f"slot {n}: {slot.references} references"
            state = (
                "free" if n in free else
                "leaving" if slot.leaving else
                "used" if slot.references else
                "idle" if n in idle else
                "pinned"
            )  # fmt: skip
            counts[state] += 1
            assert (n in free) == (state == "free")
            assert (n in idle) == (state == "idle"), f"slot {n} is {state} and idle"
            assert found or state in ("free", "used"), f"slot {n} is {state} and cannot be found"
            assert not (found and state == "free"), f"slot {n} is free and may be found"
            assert pinned or state != "pinned", f"slot {n} is in no state"
        assert sum(counts.values()) == self.num_slots
        assert counts["leaving"] == self._num_leaving
        assert counts["pinned"] == self._num_pinned
        assert sum(slot.block is not None for slot in self._slots) == len(self._by_block)

    def _is_idle(self, slot: Slot) -> bool:
        return slot.block is not None and not slot.references and not slot.leaving

    def _enter_order(self, slot: Slot) -> None:
        if slot.pinned_until_s > self._now():
            self._num_pinned += 1
            return
        slot.pinned_until_s = 0.0
        slot.idle_since_s = self._now()
        self._idle.setdefault(slot.priority, OrderedDict())[slot.block_id] = slot
        self._num_idle += 1

    def _leave_order(self, slot: Slot) -> None:
        if slot.leaving:
            slot.leaving = 0
            self._num_leaving -= 1
        elif self._is_idle(slot):
            of_priority = self._idle.get(slot.priority)
            if of_priority is None or of_priority.pop(slot.block_id, None) is None:
                self._num_pinned -= 1
            else:
                self._num_idle -= 1

    def _end_pins(self) -> None:
        now = self._now()
        while self._pins and self._pins[0][0] <= now:
            until_s, _, slot = heapq.heappop(self._pins)
            if slot.pinned_until_s == until_s and self._is_idle(slot):
                self._num_pinned -= 1
                self._enter_order(slot)

    def _free_slot(self, slot: Slot) -> None:
        slot.free()
        self._free.add(slot.block_id, slot.block_id)
