"""Block manager: where a request's blocks are, which it shares, and which are evicted for it.

Bookkeeping only: it plans what is to be copied (`Move`), and whoever does the copying reports how
that ended. Nothing here waits, and nothing is half done: an operation that is not possible raises
before it has changed anything.

A slot whose block others can find is given away in steps: `evict` chooses slots and plans to store
their blocks further down; `withdraw` announces that the blocks go; `reclaim` frees the slots, once
that has been heard. Until then a request may call such a block back. So requests only ever get
slots that are already free, and whoever runs the manager keeps some free ahead of them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from app.core.cache_stats import IdleBeforeEvict
from app.core.errors import NotEnoughBlocks
from app.core.types import Tier
from workers.kv.identity import BlockIdentity
from workers.kv.moves import AdmissionPolicy, EventLog, Moves, WritePolicy
from workers.kv.slots import Slot, Slots, block_of
from workers.kv.tables import BlockTable, Eviction, Move


@dataclass(slots=True)
class BlockCounts:
    """Counts since the start, of blocks unless stated otherwise."""

    evicted: int = 0
    loaded: int = 0
    stored: int = 0
    stores_dropped: int = 0
    """Blocks not stored, because too much was being stored already or nothing was free below."""
    failed: int = 0
    """Blocks not loaded or stored, because the copy failed."""
    fallbacks: int = 0
    """Requests that computed blocks they were to load."""
    recomputed: int = 0


class BlockManager:
    """Slots of the device and, behind it, of any slower tiers; their blocks and who uses them.

    num_slots: of each tier, fastest first; the device is required. reuse_multiple: requests reuse a
    multiple of this many blocks, so that an engine that computes that many at a time, always from
    such a boundary on, gets the same bits with reuse as without. max_storing: blocks that may be on
    their way to a slower tier at once; beyond that they are not stored. Loads are bounded only by
    the slots that they fill. now: seconds.
    """

    def __init__(
        self,
        num_slots: Mapping[Tier, int],
        *,
        write: WritePolicy = WritePolicy.BACK,
        admission: AdmissionPolicy | None = None,
        reuse_multiple: int = 1,
        max_storing: int = 256,
        now: Callable[[], float],
    ) -> None:
        self.tiers = {tier: Slots(num_slots[tier], now) for tier in sorted(num_slots)}
        self.counts = BlockCounts()
        self.admission = admission or AdmissionPolicy()
        self._device = self.tiers[Tier.DEVICE]
        self._write = write
        self._reuse_multiple = reuse_multiple
        self._now = now
        self._tables: set[BlockTable] = set()
        self.events = EventLog()
        self.moves = Moves(self.tiers, self.events, max_storing)
        self._uses_before: OrderedDict[BlockIdentity, int] = OrderedDict()
        """Uses of the last blocks that went, at most as many blocks as the device has slots."""
        self.idle = IdleBeforeEvict(now)
        """Seconds for which evicted blocks had gone unused, where no other tier held them."""

    # Requests

    def match(self, chain: Sequence[BlockIdentity]) -> list[Tier]:
        """Returns the fastest tier of each leading block that is there and worth loading."""
        return [tier for tier, _ in self._find(chain)]

    def prepare(self, prefix: Sequence[BlockIdentity], num_blocks: int) -> BlockTable:
        """Returns `num_blocks` slots for a request whose prompt begins with `prefix`.

        Leading blocks on the device are shared. Those in slower tiers get slots and planned loads
        that fill them; requests that need the same blocks meanwhile share those slots. Raises
        NotEnoughBlocks.
        """
        assert len(prefix) <= num_blocks, f"{len(prefix)} blocks do not fit into {num_blocks}"
        reused = self._find(prefix)
        reused = reused[: self._reusable(len(reused))]
        num_new = num_blocks - sum(tier is Tier.DEVICE for tier, _ in reused)
        if num_new > self._device.num_free:
            # The caller will ask again: room must be made from blocks other than those found here.
            for tier, slot in reversed(reused):
                self.tiers[tier].touch(slot)
            kept = sum(
                self._device.is_evictable(slot) for tier, slot in reused if tier is Tier.DEVICE
            )
            raise NotEnoughBlocks(num_new, self._device.num_free, kept)
        fresh = self._device.take(num_new)
        fresh.reverse()
        slots = []
        above: dict[Tier, tuple[list[Slot], list[Slot]]] = {}
        for tier, slot in reused:
            self._hold(tier, slot)
            slot.uses += 1
            if tier is not Tier.DEVICE:
                sources, targets = above.setdefault(tier, ([], []))
                sources.append(slot)
                targets.append(fresh.pop())
                self._device.hold(targets[-1])
            slots.append(slot if tier is Tier.DEVICE else targets[-1])
        for tier, (sources, targets) in sorted(above.items()):
            self.moves.load(tier, sources, targets)
        loads = dict.fromkeys(slot.filling for slot in slots if slot.filling is not None)
        table = BlockTable(
            slots=slots + fresh[::-1],
            tiers=[tier for tier, _ in reused],
            chain=list(prefix[: len(reused)]),
            loads=list(loads),
        )
        self._tables.add(table)
        return table

    def register(self, table: BlockTable, blocks: Iterable[BlockIdentity]) -> None:
        """Lets others find the next slots of the table, which are full with these blocks.

        Where a block already has a slot, the table gets that slot in place of its own.
        """
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
        self.events.publish(Tier.DEVICE, fresh)
        if self._write is WritePolicy.THROUGH:
            self._plan_store(Tier.DEVICE, fresh)

    def share(self, table: BlockTable, prefix: Sequence[BlockIdentity]) -> int:
        """Gives the table the slots that others have filled with blocks of `prefix` since it was
        prepared; returns how many."""
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

    def keep(self, table: BlockTable) -> BlockTable:
        """Returns the full slots of a request, held for longer than the request.

        They are not looked up: a block that is being loaded may have another slot.
        """
        slots = table.slots[: len(table.chain)]
        for slot in slots:
            self._device.hold(slot)
            slot.uses += 1
        kept = BlockTable(slots, [Tier.DEVICE] * len(slots), list(table.chain), loads=[])
        self._tables.add(kept)
        return kept

    def fall_back(self, table: BlockTable) -> None:
        """Gives a ready table slots of its own from the block on that a failed load did not bring.

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

    def release(self, table: BlockTable) -> None:
        """Lets go of the slots of a request.

        Tail first, so that tails are older than the blocks before them and are evicted first.
        """
        self._tables.remove(table)
        for slot in reversed(table.slots):
            self._device.release(slot)
        table.slots.clear()

    def prefetch(self, chain: Sequence[BlockIdentity]) -> int:
        """Plans loads of `chain`'s leading blocks into free slots; returns how many."""
        wanted: dict[Tier, list[Slot]] = {}
        room = self._device.num_free
        for source, slot in self._find(chain):
            if source is not Tier.DEVICE:
                if not room:
                    break
                room -= 1
                wanted.setdefault(source, []).append(slot)
        for source, slots in sorted(wanted.items()):
            for slot in slots:
                self._hold(source, slot)
            self.moves.load(source, slots, self._device.take(len(slots)))
        return sum(map(len, wanted.values()))

    # Room

    def evict(self, tier: Tier, count: int) -> Eviction:
        """Chooses up to `count` idle slots to free, and plans to store the blocks that are worth
        it.

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
        """Announces that these blocks leave their tier, except those that were called back."""
        self.events.withdraw(eviction.tier, eviction.leaving)

    def reclaim(self, eviction: Eviction) -> int:
        """Frees the slots, once it is known that their blocks leave; returns how many."""
        leaving = eviction.leaving
        for slot in leaving:
            assert not slot.published, f"slot {slot.block_id} is not withdrawn"
            assert not slot.references, f"slot {slot.block_id} is still being stored"
            self._remember(slot)
            block, since_s = block_of(slot), slot.idle_since_s
            self.tiers[eviction.tier].forget(slot)
            if not any(slots.find(block) for slots in self.tiers.values()):
                self.idle.add(since_s)
        self.counts.evicted += len(leaving)
        return len(leaving)

    def finish(self, move: Move, num_done: int) -> None:
        """Takes in that `move` has ended, with its first `num_done` blocks where they should be.

        If a load failed, the source of the next block is considered bad, and is dropped.
        """
        self.counts.failed += len(move.blocks) - num_done
        if move.is_load:
            self.counts.loaded += num_done
            self.moves.end_load(move, num_done)
            return
        self.counts.stored += num_done
        stored = self.moves.end_store(move, num_done)
        if self._write is WritePolicy.THROUGH:
            self._plan_store(move.target, stored)

    def adopt(
        self, tier: Tier, blocks: Iterable[tuple[int, int, BlockIdentity, BlockIdentity | None]]
    ) -> None:
        """Takes in the blocks that a tier has from an earlier process; call before anything else.

        blocks: of each slot its number, its generation, its block and that block's parent.
        """
        slots = self.tiers[tier]
        slots.adopt(blocks)
        self.events.publish(tier, slots.registered())

    def check(self) -> None:
        """Raises AssertionError if the bookkeeping contradicts itself."""
        self.moves.check()
        references: Counter[Slot] = Counter()
        for table in self._tables:
            references.update(table.slots)
        for move in self.moves.under_way:
            references.update(move.sources)
            references.update(move.targets)
        for tier, slots in self.tiers.items():
            slots.check()
            for slot in slots.all():
                name = f"{tier.name} slot {slot.block_id}"
                assert slot.references == references[slot], f"{name}: references do not add up"
                filling = slot.filling
                under_way = filling is None or filling in self.moves.under_way
                assert under_way, f"{name} is filled by nobody"
                is_findable = slot.block is not None and filling is None
                assert slot.published <= is_findable, f"{name} is published"
                assert is_findable <= (slot.published or slot.leaving > 0), (
                    f"{name} is not published"
                )
        assert len(self._uses_before) <= self._device.num_slots

    def _find(self, chain: Iterable[BlockIdentity]) -> list[tuple[Tier, Slot]]:
        """Returns the fastest tier that has each leading block, and the slot there."""
        places = []
        tiers = [
            (t, s) for t, s in self.tiers.items() if t is Tier.DEVICE or self.admission.loads(t)
        ]
        for block in chain:
            for tier, slots in tiers:
                slot = slots.find(block)
                if slot is not None:
                    places.append((tier, slot))
                    break
            else:
                break
        return places

    def _reusable(self, num_blocks: int) -> int:
        return num_blocks - num_blocks % self._reuse_multiple

    def _hold(self, tier: Tier, slot: Slot) -> None:
        """Holds a slot for a request or a load; a slot that was leaving stays."""
        slots = self.tiers[tier]
        slots.hold(slot)
        if slot.leaving:
            slots.call_back(slot)
            if not slot.published:
                self.events.publish(tier, [slot])

    def _plan_store(self, source: Tier, candidates: Iterable[Slot]) -> Move | None:
        target = self.moves.below[source]
        if target is None:
            return None
        wanted = [slot for slot in candidates if self._is_worth_storing(slot, target)]
        sources = wanted[: self.moves.room_below(source)]
        self.counts.stores_dropped += len(wanted) - len(sources)
        return self.moves.store(source, target, sources) if sources else None

    def _touch_below(self, tier: Tier, slot: Slot) -> None:
        """Makes the block the most recently used below, where nobody could use it until now."""
        lower = self.moves.below[tier]
        below = None if lower is None else self.tiers[lower].find(block_of(slot))
        if lower is not None and below is not None:
            self.tiers[lower].touch(below)
            below.idle_since_s = slot.idle_since_s

    def _is_worth_storing(self, slot: Slot, target: Tier) -> bool:
        block = block_of(slot)
        return (
            self.admission.stores(slot.uses, target)
            and self.tiers[target].find(block) is None
            and not self.moves.is_storing(block, target)
        )

    def _remember(self, slot: Slot) -> None:
        """Keeps the block's uses, which count if the block comes back."""
        self._uses_before[block_of(slot)] = slot.uses
        self._uses_before.move_to_end(block_of(slot))
        if len(self._uses_before) > self._device.num_slots:
            self._uses_before.popitem(last=False)
