"""A block of an engine, and its copies in each tier."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import msgspec

from app.core.types import SequenceHash, Tier

Place = tuple[Tier, int | None]
"""A tier, and a group of the engine's layers."""
References = tuple[tuple[Place, int], ...]
"""Number of copies of a block that were announced in each place."""


def with_copy(references: References, place: Place, *, copies: bool) -> References:
    """Returns `references` with one more in `place`; with one at most there unless `copies`."""
    if not copies and any(held == place for held, _ in references):
        return references
    return _counted(references, place, 1)


def without_copy(references: References, place: Place, left: int | None) -> References:
    """Returns `references` with `left` in `place`, or one less if None, or as they are if there is
    none."""
    before = dict(references).get(place, 0)
    return _counted(references, place, -1 if left is None else left - before)


# Cached, so that blocks share them: a Counter for each would take as much as all the rest.
@lru_cache(maxsize=4096)
def _counted(references: References, place: Place, change: int) -> References:
    counts = dict(references)
    counts[place] = counts.get(place, 0) + change
    if counts[place] < 0:
        return references
    return tuple((held, count) for held, count in counts.items() if count)


class Block(msgspec.Struct, array_like=True):
    """A block of the engine: one or more of ours, and what its children inherit.

    tokens: XXH3_64 of the block's tokens. folder: where its adapter was loaded from; None: that is
    known only after the next look. hidden: no request finds the block, as its adapter has been
    loaded from another folder since.
    """

    blocks: tuple[SequenceHash, ...]
    parent: SequenceHash | None
    tokens: int
    lora_name: str | None
    cache_salt: str | None
    references: References = ()
    folder: str | None = None
    hidden: bool = False

    def lies_in(self, tier: Tier) -> bool:
        return any(held is tier for (held, _), _ in self.references)

    def is_of(self, tokens: int, parent: SequenceHash | None) -> bool:
        return self.tokens == tokens and self.parent == parent


class Copies:
    """Number of the engine's blocks in each tier that are, or contain, one block of ours. Hidden
    blocks do not count."""

    def __init__(self) -> None:
        self._counts: dict[Tier, dict[SequenceHash, int]] = {tier: {} for tier in Tier}

    def num_in(self, tier: Tier) -> int:
        return len(self._counts[tier])

    def add(self, block: Block, tier: Tier) -> None:
        counts = self._counts[tier]
        for own in block.blocks if not block.hidden else ():
            counts[own] = counts.get(own, 0) + 1

    def take_away(self, block: Block, tier: Tier) -> Iterator[SequenceHash]:
        """Yields our blocks that are no longer in the tier, the last one first."""
        counts = self._counts[tier]
        for own in reversed(block.blocks) if not block.hidden else ():
            counts[own] -= 1
            if not counts[own]:
                del counts[own]
                yield own

    def clear(self) -> None:
        for counts in self._counts.values():
            counts.clear()
