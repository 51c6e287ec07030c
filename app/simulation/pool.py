"""Bookkeeping of a paged KV pool that keeps the blocks of finished requests for reuse.

A block is identified by its sequence hash, a slot holds one block. Every slot of the device pool is
in one state:

    free ──acquire─► private ──register─► referenced ◄─acquire / release─► cached ──evict─► free
                                             ▲                               │
                                             └─acquire── host tier ◄──evict──┘

private: held by one request, not full yet. referenced: full, reusable, used by requests.
cached: full, reusable, not in use. A block that was computed twice is in two slots, as in vLLM, of
which the older one is reused. A block that the host tier holds is in no device slot.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from app.core.cache_stats import IdleBeforeEvict
from app.core.events import CacheEvent, Removed, Stored
from app.core.types import SequenceHash, Tier


@dataclass(slots=True, eq=False)
class Slot:
    """A device slot with a full block. references: requests that use it. since_s: last released."""

    block: SequenceHash
    parent: SequenceHash | None
    references: int = 1
    since_s: float = 0.0


class Acquired(NamedTuple):
    """Slots of a matched prefix. onboarded: how many of their blocks came from the host tier."""

    slots: list[Slot]
    onboarded: int


class BlockPool:
    """`num_blocks` device slots and, behind them, up to `num_host_blocks` evicted blocks.

    Closed under prefix: a device block's ancestors are on the device, a host block's in either
    tier, because requests hold whole prefixes and release them tail first. now: seconds.
    """

    def __init__(
        self,
        num_blocks: int,
        num_host_blocks: int,
        now: Callable[[], float],
    ) -> None:
        if num_blocks < 1:
            raise ValueError("the KV pool is smaller than one block")
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self._slots: dict[SequenceHash, list[Slot]] = {}
        """Slots with each block, the oldest first."""
        # OrderedDicts, the longest unused first: taking the first key of a dict again and again
        # walks over the ones already taken.
        self._cached: OrderedDict[Slot, None] = OrderedDict()
        self._host: OrderedDict[SequenceHash, Slot] = OrderedDict()
        self._num_referenced = self._num_private = 0
        self._events: list[CacheEvent] = []
        self._now = now
        self._idle = IdleBeforeEvict(now)

    @property
    def idle_before_evict_s(self) -> float:
        """Mean seconds that blocks were idle which left the last tier; see IdleBeforeEvict."""
        return self._idle.value_s

    @property
    def num_used(self) -> int:
        """Slots that requests use; a slot that several of them share counts once."""
        return self._num_referenced + self._num_private

    @property
    def num_free(self) -> int:
        return self.num_blocks - self.num_used - len(self._cached)

    def match(self, chain: Sequence[SequenceHash]) -> int:
        """Returns how many leading blocks of `chain` either tier holds."""
        slots, host = self._slots, self._host
        for i, block in enumerate(chain):
            if block not in slots and block not in host:
                return i
        return len(chain)

    def match_device(self, chain: Sequence[SequenceHash]) -> int:
        """Returns how many leading blocks of `chain` the device holds."""
        for i, block in enumerate(chain):
            if block not in self._slots:
                return i
        return len(chain)

    def has_room(self, prefix: Sequence[SequenceHash], num_blocks: int) -> bool:
        """Whether `acquire` could take them."""
        slots = self._slots
        in_use = sum(block in slots and slots[block][0].references > 0 for block in prefix)
        return num_blocks - in_use <= self.num_blocks - self.num_used

    def acquire(self, prefix: Sequence[SequenceHash], num_blocks: int) -> Acquired | None:
        """Take `num_blocks` for a request: the matched `prefix`, the rest private.

        Evicts as needed. None, having changed nothing, if requests use too much of the pool.
        """
        if not self.has_room(prefix, num_blocks):
            return None
        taken, onboarded = list[Slot](), list[SequenceHash]()
        for block in prefix:
            if block in self._slots:
                slot = self._slots[block][0]
                if not slot.references:
                    del self._cached[slot]
                    self._num_referenced += 1
                slot.references += 1
            else:
                slot = self._host.pop(block)
                slot.references = 1
                self._slots[block] = [slot]
                self._num_referenced += 1
                onboarded.append(block)
            taken.append(slot)
        self._num_private += num_blocks - len(prefix)
        self._evict(-self.num_free)
        if onboarded:
            # The device holds the head of the chain, the host the rest of it.
            self._events.append(Stored(tuple(onboarded), self._slots[onboarded[0]][0].parent))
            self._events.append(Removed(tuple(onboarded), Tier.HOST))
        return Acquired(taken, len(onboarded))

    def register(self, blocks: Sequence[SequenceHash], parent: Slot | None) -> list[Slot]:
        """Make private blocks that are now full reusable; the same request references `parent`.

        Returns their slots. A block that another slot holds, too, keeps its own.
        """
        registered, fresh = list[Slot](), list[Slot]()
        for block in blocks:
            slot = Slot(block, None if parent is None else parent.block)
            if block in self._slots:
                self._slots[block].append(slot)
            else:
                self._slots[block] = [slot]
                fresh.append(slot)
            registered.append(slot)
            parent = slot
        self._num_private -= len(blocks)
        self._num_referenced += len(blocks)
        if fresh:
            stored = [slot.block for slot in fresh]
            self._events.append(Stored(tuple(stored), fresh[0].parent))
            self._drop_from_host(stored)
        return registered

    def release(self, slots: Sequence[Slot], num_private: int) -> None:
        """Give back a request's referenced slots, in the order of its chain, and its private
        blocks."""
        now_s = self._now()
        # Tail first, so that tails are older than their parents and are evicted before them.
        for slot in reversed(slots):
            slot.references -= 1
            if not slot.references:
                slot.since_s = now_s
                self._cached[slot] = None
                self._num_referenced -= 1
        self._num_private -= num_private

    def take_events(self) -> list[CacheEvent]:
        """Returns changes since the last call, in order. They are kept until taken."""
        events, self._events = self._events, []
        return events

    def check(self, held: Iterable[Sequence[Slot]], num_private: int) -> None:
        """Raises AssertionError unless the pool is consistent with its requests.

        held: the referenced slots of each request; num_private: over all of them.
        """
        counted = Counter(slot for slots in held for slot in slots)
        known = [slot for slots in self._slots.values() for slot in slots]
        used = {slot: slot.references for slot in known if slot.references}
        assert counted == used, "references differ from what requests hold"
        assert len(used) == self._num_referenced
        assert set(known) - used.keys() == self._cached.keys(), "referenced and cached"
        assert num_private == self._num_private, f"{num_private} != {self._num_private} private"
        assert self.num_free >= 0, f"{-self.num_free} blocks more than the pool has"
        assert len(self._host) <= self.num_host_blocks, f"{len(self._host)} blocks on the host"
        device = self._slots.keys()
        assert device.isdisjoint(self._host), "a block is on the device and on the host"
        assert all(s.parent is None or s.parent in device for s in known), "orphan on the device"
        anywhere = device | self._host.keys()
        assert all(s.parent is None or s.parent in anywhere for s in self._host.values()), (
            "orphan on the host"
        )

    def _evict(self, count: int) -> None:
        if count <= 0:
            return
        gone = []
        for _ in range(count):
            slot, _ = self._cached.popitem(last=False)
            slots = self._slots[slot.block]
            slots.remove(slot)
            if not slots:
                del self._slots[slot.block]
                gone.append(slot)
        if not gone:
            return
        if self.num_host_blocks:
            self._offload(gone)
        self._events.append(Removed(tuple(slot.block for slot in gone)))
        if self.num_host_blocks:
            surplus = max(0, len(self._host) - self.num_host_blocks)
            gone = [self._host.popitem(last=False)[1] for _ in range(surplus)]
            if gone:
                self._events.append(Removed(tuple(slot.block for slot in gone), Tier.HOST))
        for slot in gone:
            self._idle.add(slot.since_s)

    def _offload(self, evicted: Sequence[Slot]) -> None:
        """Move `evicted` blocks to the host; one event for each part of a chain, root first."""
        self._host.update((slot.block, slot) for slot in evicted)
        part: list[Slot] = []
        for slot in reversed(evicted):
            if part and slot.parent != part[-1].block:
                self._store_on_host(part)
                part = []
            part.append(slot)
        self._store_on_host(part)

    def _store_on_host(self, part: Sequence[Slot]) -> None:
        blocks = tuple(slot.block for slot in part)
        self._events.append(Stored(blocks, part[0].parent, Tier.HOST))

    def _drop_from_host(self, blocks: Sequence[SequenceHash]) -> None:
        dropped = [block for block in blocks if self._host.pop(block, None) is not None]
        if dropped:
            self._events.append(Removed(tuple(dropped), Tier.HOST))
