"""Slots that belong together: of one move, of one request, of one eviction."""

from __future__ import annotations

from dataclasses import dataclass, field

from app.core.types import Tier
from workers.kv.arrival import Arrival
from workers.kv.identity import BlockIdentity
from workers.kv.slots import Slot


@dataclass(eq=False, slots=True)
class Move:
    """Blocks to copy from one tier to another: a load onto the device, or a store in a slower tier.

    Sources and targets are held until the move is finished.
    """

    source: Tier
    target: Tier
    sources: list[Slot]
    targets: list[Slot]
    blocks: list[BlockIdentity]
    generations: list[int] = field(init=False)
    arrival: Arrival = field(init=False)
    """Progress of a load."""
    finished: bool = False

    def __post_init__(self) -> None:
        self.generations = [slot.generation for slot in self.sources]
        self.arrival = Arrival(len(self.blocks))

    @property
    def is_load(self) -> bool:
        return self.target is Tier.DEVICE

    @property
    def num_ready(self) -> int:
        """Number of leading sources that hold what is to be copied."""
        planned = zip(self.sources, self.generations, self.blocks, strict=True)
        for n, (slot, generation, block) in enumerate(planned):
            if (slot.generation, slot.block) != (generation, block):
                return n
        return len(self.sources)


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
        """Number of leading slots that hold the prompt's blocks, or are being filled with them."""
        return len(self.tiers)

    @property
    def is_ready(self) -> bool:
        """Whether all loads have ended; `num_whole` says whether they ended well."""
        return all(load.finished for load in self.loads)

    @property
    def num_whole(self) -> int:
        """Number of leading matched slots that hold what they should."""
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
        return [slot for slot, choice in self.slots if slot.leaving == choice]
