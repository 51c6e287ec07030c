"""A plain model of the block manager: lists that are searched each time."""

from __future__ import annotations

from dataclasses import dataclass, field

from app.core.types import Tier
from workers.kv.identity import BlockIdentity
from workers.kv.moves import WritePolicy


@dataclass(eq=False)
class Cell:
    """A slot that is not free."""

    block: BlockIdentity | None = None
    parent: BlockIdentity | None = None
    references: int = 1
    uses: int = 0
    filling: Copy | None = None
    eviction: ModelEviction | None = None
    published: bool = False
    idle_since: int = 0


@dataclass(eq=False)
class Copy:
    source: Tier
    target: Tier
    cells: list[tuple[Cell, Cell]]
    blocks: list[BlockIdentity]


@dataclass(eq=False)
class ModelEviction:
    tier: Tier
    cells: list[Cell] = field(default_factory=list)


@dataclass(eq=False)
class Table:
    cells: list[Cell]
    num_matched: int
    chain: list[BlockIdentity]


class BlockModel:
    def __init__(self, num_slots, write, admission, max_storing, reuse_multiple):
        self.num_slots = num_slots
        self.cells = {tier: [] for tier in num_slots}
        self.copies = []
        self.now = 0.0
        self._write = write
        self._admission = admission
        self._max_storing = max_storing
        self._reuse_multiple = reuse_multiple
        self._tick = 0
        self._ghosts = []

    # State that tests compare

    def num_free(self, tier):
        return self.num_slots[tier] - len(self.cells[tier])

    def idle(self, tier):
        """Cells that may be chosen for eviction, the next one first."""
        idle = filter(self._unused, self.cells[tier])
        return sorted(idle, key=lambda cell: cell.idle_since)

    def published(self, tier):
        return {
            cell.block for cell in self.cells[tier] if cell.published and cell.block is not None
        }

    def find(self, chain):
        holders = {
            cell.block: (tier, cell)
            for tier in sorted(self.cells, reverse=True)
            if tier is Tier.DEVICE or self._admission.loads(tier)
            for cell in self.cells[tier]
        }
        found = []
        for block in chain:
            if block not in holders:
                break
            found.append(holders[block])
        return found

    # Operations

    def prepare(self, prefix, num_blocks):
        """None if too few slots are free."""
        found = self.find(prefix)
        found = found[: len(found) // self._reuse_multiple * self._reuse_multiple]
        if num_blocks - sum(tier is Tier.DEVICE for tier, _ in found) > self.num_free(Tier.DEVICE):
            for _, cell in reversed(found):
                self._touch(cell)
            return None
        cells = []
        for tier, cell in found:
            self._hold(cell)
            cell.uses += 1
            cells.append(cell if tier is Tier.DEVICE else self._take(Tier.DEVICE, references=2))
        for source in self.cells:
            pairs = [
                (cell, above)
                for (tier, cell), above in zip(found, cells, strict=True)
                if tier is source and tier is not Tier.DEVICE
            ]
            self._load(source, Tier.DEVICE, pairs)
        cells += [self._take(Tier.DEVICE) for _ in range(num_blocks - len(cells))]
        return Table(cells, len(found), list(prefix[: len(found)]))

    def register(self, table, blocks):
        fresh = []
        for block in blocks:
            at = len(table.chain)
            holders = [cell for cell in self.cells[Tier.DEVICE] if cell.block == block]
            if not holders:
                cell = table.cells[at]
                cell.block = block
                cell.parent = table.chain[-1] if table.chain else None
                before = [uses for seen, uses in self._ghosts if seen == block]
                self._ghosts = [(seen, uses) for seen, uses in self._ghosts if seen != block]
                cell.uses = 1 + sum(before)
                cell.published = True
                fresh.append(cell)
            elif holders[0].filling is None:
                self._hold(holders[0])
                holders[0].uses += 1
                own, table.cells[at] = table.cells[at], holders[0]
                self._release(Tier.DEVICE, own)
            table.chain.append(block)
        if self._write is WritePolicy.THROUGH:
            self._store(Tier.DEVICE, fresh)

    def share(self, table, prefix):
        at = end = len(table.chain)
        device = {cell.block for cell in self.cells[Tier.DEVICE] if cell.filling is None}
        while end < len(prefix) and prefix[end] in device:
            end += 1
        end = max(at, end // self._reuse_multiple * self._reuse_multiple)
        self.register(table, prefix[at:end])
        return end - at

    def num_whole(self, table):
        for n in range(table.num_matched):
            if table.cells[n].block != table.chain[n]:
                return n
        return table.num_matched

    def fall_back(self, table):
        whole, matched = self.num_whole(table), table.num_matched
        whole = whole // self._reuse_multiple * self._reuse_multiple
        for cell in reversed(table.cells[whole:matched]):
            self._release(Tier.DEVICE, cell)
        table.cells[whole:matched] = []
        table.chain[whole:] = []
        table.num_matched = whole
        if matched - whole > self.num_free(Tier.DEVICE):
            self.release(table)
            return False
        table.cells[whole:whole] = [self._take(Tier.DEVICE) for _ in range(matched - whole)]
        return True

    def release(self, table):
        for cell in reversed(table.cells):
            self._release(Tier.DEVICE, cell)

    def prefetch(self, chain):
        wanted = [(source, cell) for source, cell in self.find(chain) if source > Tier.DEVICE]
        wanted = wanted[: self.num_free(Tier.DEVICE)]
        for _, cell in wanted:
            self._hold(cell)
        for source in self.cells:
            pairs = [(cell, self._take(Tier.DEVICE)) for of, cell in wanted if of is source]
            self._load(source, Tier.DEVICE, pairs)
        return len(wanted)

    def evict(self, tier, count):
        eviction = ModelEviction(tier, self.idle(tier)[:count])
        for cell in eviction.cells:
            cell.eviction = eviction
            for below in [b for b in self.cells if b > tier][:1]:
                for copy in self.cells[below]:
                    if copy.block == cell.block:
                        self._touch(copy)
        self._store(tier, reversed(eviction.cells))
        return eviction

    def withdraw(self, eviction):
        for cell in eviction.cells:
            if cell.eviction is eviction:
                cell.published = False

    def reclaim(self, eviction):
        leaving = [cell for cell in eviction.cells if cell.eviction is eviction]
        for cell in leaving:
            assert cell.block is not None
            self._ghosts = [(seen, uses) for seen, uses in self._ghosts if seen != cell.block]
            self._ghosts.append((cell.block, cell.uses))
            self._ghosts = self._ghosts[-self.num_slots[Tier.DEVICE] :]
            self.cells[eviction.tier].remove(cell)
        return len(leaving)

    def finish(self, copy, num_done):
        self.copies.remove(copy)
        stored = []
        for n, (source, target) in enumerate(copy.cells):
            if copy.target < copy.source:
                target.filling = None
                if n < num_done:
                    target.published = True
                else:
                    target.block = None
            elif (
                n < num_done
                and source.block == copy.blocks[n]
                and not any(cell.block == source.block for cell in self.cells[copy.target])
            ):
                target.block, target.published = source.block, True
                stored.append(target)
        if copy.target < copy.source and num_done < len(copy.cells):
            bad, _ = copy.cells[num_done]
            if bad.filling is None:
                self._lose(bad)
        if self._write is WritePolicy.THROUGH:
            self._store(copy.target, stored)
        for _, target in reversed(copy.cells):
            self._release(copy.target, target)
        for source, _ in reversed(copy.cells):
            self._release(copy.source, source)

    def _lose(self, cell):
        cell.block, cell.published, cell.eviction = None, False, None

    def _unused(self, cell):
        return cell.block is not None and not cell.references and cell.eviction is None

    def _take(self, tier, references=1):
        cell = Cell(references=references)
        self.cells[tier].append(cell)
        return cell

    def _hold(self, cell):
        cell.references += 1
        if cell.eviction is not None:
            cell.eviction, cell.published = None, True

    def _release(self, tier, cell):
        cell.references -= 1
        if cell.references:
            return
        if cell.block is None:
            self.cells[tier].remove(cell)
        elif cell.eviction is None:
            self._make_idle(cell)

    def _touch(self, cell):
        if self._unused(cell):
            self._make_idle(cell)

    def _make_idle(self, cell):
        self._tick += 1
        cell.idle_since = self._tick

    def _load(self, source, target, pairs):
        if not pairs:
            return
        blocks = [cell.block for cell, _ in pairs if cell.block is not None]
        copy = Copy(source, target, pairs, blocks)
        for cell, above in pairs:
            above.block, above.parent, above.filling = cell.block, cell.parent, copy
            above.uses = cell.uses
        self.copies.append(copy)

    def _store(self, tier, cells):
        lower = [below for below in self.cells if below > tier]
        if not lower:
            return
        target = lower[0]
        storing = [
            block for c in self.copies if c.source < c.target == target for block in c.blocks
        ]
        wanted = [
            cell
            for cell in cells
            if cell.block is not None
            and self._admission.stores(cell.uses, target)
            and not any(below.block == cell.block for below in self.cells[target])
            and cell.block not in storing
        ]
        wanted = wanted[: min(self.num_free(target), self._max_storing - len(storing))]
        if not wanted:
            return
        pairs = []
        for cell in wanted:
            cell.references += 1
            below = self._take(target)
            below.parent, below.uses = cell.parent, cell.uses
            pairs.append((cell, below))
        blocks = [cell.block for cell in wanted if cell.block is not None]
        self.copies.append(Copy(tier, target, pairs, blocks))
