"""Block manager: where a request's blocks are, which it shares, and which are evicted for it.

Bookkeeping only: it plans what is to be copied (`Move`), and whoever does the copying reports how
that ended. Nothing here waits, and nothing is half done: an operation that is not possible raises
before it has changed anything.

A slot whose block others can find is given away in steps, so that nobody is ever told of a block
that is no longer there: `evict` chooses slots and plans to store their blocks further down;
`withdraw` announces that the blocks go; `reclaim` frees the slots, once that has been heard. Until
then a request may still call such a block back. So a request is only ever given slots that are
already free, and whoever runs the manager keeps some free ahead of requests.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from app.core.errors import NotEnoughBlocks
from app.core.events import CacheEvent, Cleared, Removed, Stored
from app.core.types import SequenceHash, Tier
from workers.kv.idle import IdleBeforeEvict
from workers.kv.slots import Move, Slot, Slots


class WritePolicy(Enum):
    """When a block is stored in the next slower tier."""

    BACK = "back"
    """When it is evicted."""
    THROUGH = "through"
    """As soon as it is filled."""


@dataclass(frozen=True, slots=True)
class Admission:
    """Which blocks are worth a place in a slower tier, and worth loading from there.

    min_uses: a block is stored once this many requests have needed it.
    compute_s, load_s: seconds to compute a block, and to load it from a tier.
    """

    min_uses: int = 1
    compute_s: float = math.inf
    load_s: Mapping[Tier, float] = field(default_factory=dict)

    def stores(self, uses: int, tier: Tier) -> bool:
        return uses >= self.min_uses and self.loads(tier)

    def loads(self, tier: Tier) -> bool:
        return self.load_s.get(tier, 0.0) < self.compute_s


@dataclass(slots=True)
class Counts:
    """In blocks, since the start, unless stated otherwise."""

    evicted: int = 0
    loaded: int = 0
    stored: int = 0
    stores_dropped: int = 0
    """Not stored, because too much was being stored already or nothing was free below."""
    failed: int = 0
    """Not loaded or stored, because the copy failed."""
    fallbacks: int = 0
    """Requests that computed blocks they were to load."""
    recomputed: int = 0


@dataclass(eq=False, slots=True)
class BlockTable:
    """The device slots of one request, in the order of its tokens.

    tiers: where the prompt's leading blocks were when the table was prepared; `loads` fill those
    that were not on the device. chain: the blocks of the leading slots that are full.
    """

    slots: list[Slot]
    tiers: list[Tier]
    chain: list[SequenceHash]
    loads: list[Move]
    epoch: int

    @property
    def block_ids(self) -> list[int]:
        return [slot.block_id for slot in self.slots]

    @property
    def num_matched(self) -> int:
        """How many leading slots hold the prompt's blocks, or are being filled with them."""
        return len(self.tiers)

    @property
    def is_ready(self) -> bool:
        """Have all its loads ended? `num_whole` says whether they ended well."""
        return all(load.finished for load in self.loads)

    @property
    def num_whole(self) -> int:
        """How many leading matched slots hold what they should."""
        for n, slot in enumerate(self.slots[: self.num_matched]):
            if slot.block != self.chain[n]:
                return n
        return self.num_matched


@dataclass(frozen=True, slots=True)
class Eviction:
    """Slots of a tier that are to be freed, provided they are still leaving by that choice.

    store: the move that must be finished first.
    """

    tier: Tier
    slots: list[tuple[Slot, int]]
    store: Move | None

    @property
    def leaving(self) -> list[Slot]:
        """The slots that nobody has called back."""
        return [slot for slot, choice in self.slots if slot.leaving == choice]


class BlockManager:
    """Slots of the device and, behind it, of any slower tiers; their blocks and who uses them.

    num_slots: of each tier, fastest first; the device is required. reuse_multiple: requests reuse a
    multiple of this many blocks, so that an engine that computes that many at a time, always from
    such a boundary on, gets the same bits with reuse as without. max_storing: blocks that may be on
    their way to a slower tier at once; beyond that they are not stored. Loads are bounded only by
    the slots that they fill. now: seconds, for pins.
    """

    def __init__(
        self,
        num_slots: Mapping[Tier, int],
        *,
        write: WritePolicy = WritePolicy.BACK,
        admission: Admission | None = None,
        reuse_multiple: int = 1,
        max_storing: int = 256,
        now: Callable[[], float],
    ) -> None:
        if Tier.DEVICE not in num_slots:
            raise ValueError("a block manager needs slots on the device")
        self.tiers = {tier: Slots(num_slots[tier], now) for tier in sorted(num_slots)}
        self.counts = Counts()
        self.admission = admission or Admission()
        self._device = self.tiers[Tier.DEVICE]
        self._below = dict(zip(self.tiers, [*list(self.tiers)[1:], None], strict=True))
        self._write = write
        self._reuse_multiple = reuse_multiple
        self._max_storing = max_storing
        self._now = now
        self._epoch = 0
        self._tables: set[BlockTable] = set()
        self._moves: set[Move] = set()
        self._planned: list[Move] = []
        self._storing: dict[Tier, set[SequenceHash]] = {tier: set() for tier in self.tiers}
        """By the tier that they are being stored to."""
        self._uses_before: OrderedDict[SequenceHash, int] = OrderedDict()
        """Uses of the last blocks that went, for as many blocks as the device has slots."""
        self._events: list[CacheEvent] = []
        self._idle = IdleBeforeEvict(now)

    @property
    def idle_before_evict_s(self) -> float:
        """Counts blocks that left the last tier that held them; see IdleBeforeEvict."""
        return self._idle.value_s

    # Requests

    def match(self, chain: Sequence[SequenceHash]) -> list[Tier]:
        """The fastest tier of each leading block of `chain` that is held and worth loading."""
        return [tier for tier, _ in self._find(chain)]

    def prepare(self, prefix: Sequence[SequenceHash], num_blocks: int) -> BlockTable:
        """`num_blocks` slots for a request whose prompt begins with `prefix`.

        Leading blocks on the device are shared. Those in slower tiers get slots and planned loads
        that fill them; requests that need the same blocks meanwhile share those slots. Raises
        NotEnoughBlocks.
        """
        if len(prefix) > num_blocks:
            raise ValueError(f"{len(prefix)} blocks do not fit into {num_blocks}")
        found = self._find(prefix)
        found = found[: self._reusable(len(found))]
        num_new = num_blocks - sum(tier is Tier.DEVICE for tier, _ in found)
        if num_new > self._device.num_free:
            # The caller will ask again: room must be made from blocks other than those found here.
            for tier, slot in reversed(found):
                self.tiers[tier].touch(slot)
            kept = sum(
                slot.leaving > 0 or not (slot.references or slot.pinned_until_s)
                for tier, slot in found
                if tier is Tier.DEVICE
            )
            raise NotEnoughBlocks(num_new, self._device.num_free, kept)
        fresh = self._device.take(num_new)
        fresh.reverse()
        slots = []
        above: dict[Tier, tuple[list[Slot], list[Slot]]] = {}
        for tier, slot in found:
            self._hold(tier, slot)
            slot.uses += 1
            if tier is not Tier.DEVICE:
                sources, targets = above.setdefault(tier, ([], []))
                sources.append(slot)
                targets.append(fresh.pop())
                self._device.hold(targets[-1])
            slots.append(slot if tier is Tier.DEVICE else targets[-1])
        for tier, (sources, targets) in sorted(above.items()):
            self._plan_load(tier, Tier.DEVICE, sources, targets)
        loads = dict.fromkeys(slot.filling for slot in slots if slot.filling is not None)
        table = BlockTable(
            slots=slots + fresh[::-1],
            tiers=[tier for tier, _ in found],
            chain=list(prefix[: len(found)]),
            loads=list(loads),
            epoch=self._epoch,
        )
        self._tables.add(table)
        return table

    def register(self, table: BlockTable, blocks: Iterable[SequenceHash]) -> None:
        """The next slots of the table are full, with these blocks: let others find them.

        Where a block already has a slot, the table gets that slot in place of its own.
        """
        if table.epoch != self._epoch:
            return
        fresh: list[Slot] = []
        for block in blocks:
            at = len(table.chain)
            slot, there = table.slots[at], self._device.find(block)
            if there is None:
                self._device.register(slot, block, table.chain[-1] if at else None)
                slot.uses = 1 + self._uses_before.pop(block, 0)
                fresh.append(slot)
            elif there.filling is None:
                self._hold(Tier.DEVICE, there)
                there.uses += 1
                table.slots[at] = there
                self._device.release(slot)
            table.chain.append(block)
        self._publish(Tier.DEVICE, fresh)
        if self._write is WritePolicy.THROUGH:
            self._plan_store(Tier.DEVICE, fresh)

    def share(self, table: BlockTable, prefix: Sequence[SequenceHash]) -> int:
        """Share what others have filled of `prefix`, beyond the table's chain, since it was
        prepared.

        The table gets those slots in place of its own. Returns how many.
        """
        if table.epoch != self._epoch:
            return 0
        at = len(table.chain)
        filled = 0
        for block in prefix[at:]:
            there = self._device.find(block)
            if there is None or there.filling is not None:
                break
            filled += 1
        count = max(0, self._reusable(at + filled) - at)
        self.register(table, prefix[at : at + count])
        return count

    def fall_back(self, table: BlockTable) -> None:
        """A load of a ready table failed: give the table slots of its own from there on.

        Raises NotEnoughBlocks, having released the table.
        """
        assert table.is_ready
        num_whole = self._reusable(table.num_whole)
        lost = table.num_matched - num_whole
        assert lost, "no load failed"
        self.counts.fallbacks += 1
        self.counts.recomputed += lost
        for slot in table.slots[num_whole : table.num_matched][::-1]:
            self._device.release(slot)
        del table.slots[num_whole : table.num_matched], table.chain[num_whole:]
        del table.tiers[num_whole:]
        try:
            table.slots[num_whole:num_whole] = self._device.take(lost)
        except NotEnoughBlocks:
            self.release(table)
            raise

    def release(self, table: BlockTable, priority: int = 0) -> None:
        """The request is finished or cancelled. Blocks with a higher priority are evicted later.

        Tail first, so that tails are older than the blocks before them and are evicted first.
        """
        self._tables.remove(table)
        for slot in reversed(table.slots):
            self._device.release(slot, priority)
        table.slots.clear()

    def prefetch(self, chain: Sequence[SequenceHash], tier: Tier = Tier.DEVICE) -> int:
        """Plan loads of `chain`'s leading blocks into free slots of `tier`; returns how many."""
        wanted: dict[Tier, list[Slot]] = {}
        room = self.tiers[tier].num_free
        for source, slot in self._find(chain):
            if source > tier and not self.tiers[tier].find(_block(slot)):
                if not room:
                    break
                room -= 1
                wanted.setdefault(source, []).append(slot)
        for source, slots in sorted(wanted.items()):
            for slot in slots:
                self._hold(source, slot)
            self._plan_load(source, tier, slots, self.tiers[tier].take(len(slots)))
        return sum(map(len, wanted.values()))

    def pin(self, chain: Sequence[SequenceHash], ttl_s: float) -> int:
        """Keep the held leading blocks of `chain` from eviction for `ttl_s`; returns how many."""
        found = self._find(chain)
        until_s = self._now() + ttl_s
        for tier, slot in reversed(found):  # again, tails must be the older ones
            self.tiers[tier].pin(slot, until_s)
        return len(found)

    # Room

    def evict(self, tier: Tier, count: int) -> Eviction:
        """Choose up to `count` idle slots to free, and plan to store the blocks that are worth it.

        The eviction is to be withdrawn when `store` is finished, then reclaimed.
        """
        chosen = self.tiers[tier].choose(count)
        for slot in chosen:
            self._touch_below(tier, slot)
        # From roots to tails and from the most recently used on, the order of blocks in a move: if
        # there is not room for all, these are worth more, and the tier below evicts them last.
        store = self._plan_store(tier, reversed(chosen))
        return Eviction(tier, [(slot, slot.leaving) for slot in chosen], store)

    def withdraw(self, eviction: Eviction) -> None:
        """Announce that these blocks leave their tier, except those that were called back."""
        self._unpublish(eviction.tier, eviction.leaving)

    def reclaim(self, eviction: Eviction) -> int:
        """Free the slots, now that it is known that their blocks leave; returns how many."""
        leaving = eviction.leaving
        for slot in leaving:
            assert not slot.published, f"slot {slot.block_id} is not withdrawn"
            assert not slot.references, f"slot {slot.block_id} is still being stored"
            self._remember(slot)
            block, since_s = _block(slot), slot.idle_since_s
            self.tiers[eviction.tier].forget(slot)
            if not any(slots.find(block) for slots in self.tiers.values()):
                self._idle.add(since_s)
        self.counts.evicted += len(leaving)
        return len(leaving)

    def room_below(self, tier: Tier) -> int:
        """How many blocks of `tier` could now be stored in the tier below, if there is one."""
        target = self._below[tier]
        if target is None:
            return 0
        return min(self.tiers[target].num_free, self._max_storing - len(self._storing[target]))

    # Copies

    def take_moves(self) -> list[Move]:
        """Moves planned since the last call, in order."""
        planned, self._planned = self._planned, []
        return planned

    def finish(self, move: Move, num_done: int) -> None:
        """`move` has ended: its first `num_done` blocks are where they should be.

        If a load failed, the source of the next block is considered bad, and is dropped.
        """
        assert not move.finished
        move.finished = True
        self._moves.remove(move)
        failed = len(move.blocks) - num_done
        self.counts.failed += failed
        if move.is_load:
            self.counts.loaded += num_done
            self._end_load(move, num_done)
        else:
            self.counts.stored += num_done
            self._end_store(move, num_done)

    # All of it

    def adopt(
        self, tier: Tier, held: Iterable[tuple[int, int, SequenceHash, SequenceHash | None]]
    ) -> None:
        """Call first of all: take in a tier's blocks from an earlier life; see Slots.adopt."""
        slots = self.tiers[tier]
        slots.adopt(held)
        self._publish(tier, slots.held())

    def fence(self) -> None:
        """From here on, nothing that is now held, being computed or being copied can be found."""
        self._epoch += 1
        for slots in self.tiers.values():
            for slot in slots.held():
                slot.published = False
                slots.forget(slot)
        self._uses_before.clear()
        self._events.append(Cleared())

    def reset(self) -> None:
        """Free all slots. Raises ValueError if there are requests or copies under way."""
        if self._tables or self._moves:
            raise ValueError(f"{len(self._tables)} requests and {len(self._moves)} copies remain")
        self.fence()

    def take_events(self) -> list[CacheEvent]:
        """Changes since the last call, in order."""
        events, self._events = self._events, []
        return events

    def check(self) -> None:
        """Raises AssertionError if the bookkeeping contradicts itself. Takes a while."""
        held: Counter[Slot] = Counter()
        for table in self._tables:
            held.update(table.slots)
        for move in self._moves:
            assert not move.finished
            held.update(move.sources)
            held.update(move.targets)
        for tier, slots in self.tiers.items():
            slots.check()
            for slot in slots.all():
                name = f"{tier.name} slot {slot.block_id}"
                assert slot.references == held[slot], f"{name}: references do not add up"
                filling = slot.filling
                assert filling is None or filling in self._moves, f"{name} is filled by nobody"
                found = slot.block is not None and filling is None
                assert slot.published <= found, f"{name} is published"
                assert found <= (slot.published or slot.leaving > 0), f"{name} is not published"
        for tier, storing in self._storing.items():
            stores = (m for m in self._moves if m.target is tier and not m.is_load)
            assert storing == {block for move in stores for block in move.blocks}
            assert len(storing) <= self._max_storing
        assert len(self._uses_before) <= self._device.num_slots

    def _find(self, chain: Iterable[SequenceHash]) -> list[tuple[Tier, Slot]]:
        """Where each leading block is, in the fastest tier that has it."""
        found = []
        tiers = [
            (t, s) for t, s in self.tiers.items() if t is Tier.DEVICE or self.admission.loads(t)
        ]
        for block in chain:
            for tier, slots in tiers:
                slot = slots.find(block)
                if slot is not None:
                    found.append((tier, slot))
                    break
            else:
                break
        return found

    def _reusable(self, num_blocks: int) -> int:
        return num_blocks - num_blocks % self._reuse_multiple

    def _hold(self, tier: Tier, slot: Slot) -> None:
        """Hold for a request or a load; a slot that was leaving stays."""
        slots = self.tiers[tier]
        slots.hold(slot)
        if slot.leaving:
            slots.call_back(slot)
            if not slot.published:
                self._publish(tier, [slot])

    def _plan_load(
        self, source: Tier, target: Tier, sources: list[Slot], targets: list[Slot]
    ) -> None:
        """The load's slots are already held; from now on others can find the targets."""
        fills = dict.fromkeys(slot.filling for slot in sources if slot.filling is not None)
        blocks = [_block(slot) for slot in sources]
        move = Move(source, target, sources, targets, blocks, list(fills))
        for slot, above in zip(sources, targets, strict=True):
            self.tiers[target].register(above, _block(slot), slot.parent)
            above.filling = move
            above.uses = slot.uses
            above.priority = slot.priority
        self._moves.add(move)
        self._planned.append(move)

    def _plan_store(self, source: Tier, candidates: Iterable[Slot]) -> Move | None:
        target = self._below[source]
        if target is None:
            return None
        wanted = [slot for slot in candidates if self._is_worth_storing(slot, target)]
        sources = wanted[: self.room_below(source)]
        self.counts.stores_dropped += len(wanted) - len(sources)
        if not sources:
            return None
        for slot in sources:
            self.tiers[source].hold(slot)
        targets = self.tiers[target].take(len(sources))
        move = Move(source, target, sources, targets, [_block(slot) for slot in sources], [])
        for slot, below in zip(sources, targets, strict=True):
            below.parent, below.uses, below.priority = slot.parent, slot.uses, slot.priority
        self._storing[target].update(move.blocks)
        self._moves.add(move)
        self._planned.append(move)
        return move

    def _touch_below(self, tier: Tier, slot: Slot) -> None:
        """If the tier below has the block as well: nobody could use it there until now."""
        lower = self._below[tier]
        below = None if lower is None else self.tiers[lower].find(_block(slot))
        if lower is not None and below is not None:
            self.tiers[lower].touch(below)
            below.idle_since_s = slot.idle_since_s

    def _is_worth_storing(self, slot: Slot, target: Tier) -> bool:
        block = _block(slot)
        return (
            self.admission.stores(slot.uses, target)
            and self.tiers[target].find(block) is None
            and block not in self._storing[target]
        )

    def _end_load(self, move: Move, num_done: int) -> None:
        source, target = self.tiers[move.source], self.tiers[move.target]
        loaded = []
        for n, slot in enumerate(move.targets):
            slot.filling = None
            if slot.block is not None and n < num_done:
                loaded.append(slot)
            elif slot.block is not None:
                target.forget(slot)
        self._publish(move.target, loaded)
        if num_done < len(move.sources):
            bad = move.sources[num_done]
            if bad.block is not None:
                self._unpublish(move.source, [bad])
                source.forget(bad)
        _release(target, move.targets)
        _release(source, move.sources)

    def _end_store(self, move: Move, num_done: int) -> None:
        source, target = self.tiers[move.source], self.tiers[move.target]
        self._storing[move.target].difference_update(move.blocks)
        stored = {}
        for slot, block, above in list(zip(move.targets, move.blocks, move.sources, strict=True))[
            :num_done
        ]:
            # A fence makes the source forget its block.
            if above.block == block:
                target.register(slot, block, slot.parent)
                stored[slot] = above
        self._publish(move.target, stored)
        if self._write is WritePolicy.THROUGH:
            self._plan_store(move.target, list(stored))
        _release(target, move.targets)
        for slot, above in stored.items():
            if above.leaving:
                slot.idle_since_s = above.idle_since_s
        _release(source, move.sources)

    def _publish(self, tier: Tier, slots: Iterable[Slot]) -> None:
        """One event for each contiguous part of a chain."""
        run: list[Slot] = []
        for slot in slots:
            slot.published = True
            if run and slot.parent != run[-1].block:
                self._events.append(_stored(run, tier))
                run = []
            run.append(slot)
        if run:
            self._events.append(_stored(run, tier))

    def _unpublish(self, tier: Tier, slots: Iterable[Slot]) -> None:
        blocks = []
        for slot in slots:
            slot.published = False
            blocks.append(_block(slot))
        if blocks:
            self._events.append(Removed(tuple(blocks), tier))

    def _remember(self, slot: Slot) -> None:
        """When a block comes back, its earlier uses count."""
        self._uses_before[_block(slot)] = slot.uses
        self._uses_before.move_to_end(_block(slot))
        if len(self._uses_before) > self._device.num_slots:
            self._uses_before.popitem(last=False)


def _block(slot: Slot) -> SequenceHash:
    assert slot.block is not None, f"slot {slot.block_id} has no block"
    return slot.block


def _stored(run: Sequence[Slot], tier: Tier) -> Stored:
    return Stored(tuple(map(_block, run)), run[0].parent, tier)


def _release(slots: Slots, held: Sequence[Slot]) -> None:
    """Tail first; see BlockManager.release."""
    for slot in reversed(held):
        slots.release(slot)
