"""The slots of one request, and those of one eviction."""

from __future__ import annotations

from dataclasses import dataclass

from app.core.types import Tier
from workers.kv.identity import BlockIdentity
from workers.kv.slots import Move, Slot


@dataclass(eq=False, slots=True)
class BlockTable:
    """The device slots of one request, in the order of its tokens.

    tiers: where the prompt's leading blocks were when the table was prepared; `loads` fill those
    that were not on the device. chain: the blocks of the leading slots that are full.
    """

    slots: list[Slot]
    tiers: list[Tier]
    chain: list[BlockIdentity]
    loads: list[Move]

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
