"""What an engine reports about its KV cache, in our own hashes: from engines, for agents."""

from __future__ import annotations

from dataclasses import dataclass

from app.core.types import SequenceHash, Tier


@dataclass(frozen=True, slots=True)
class Stored:
    """`blocks` (a chain, in prompt order) are now in `tier`; the first one's parent is `parent`.

    parent is None if the chain starts at the root. A block may be in several tiers at once.
    Storing a block again is harmless.
    """

    blocks: tuple[SequenceHash, ...]
    parent: SequenceHash | None
    tier: Tier = Tier.DEVICE


@dataclass(frozen=True, slots=True)
class Removed:
    """`blocks`, in any order, are no longer in `tier`. Unknown blocks are ignored."""

    blocks: tuple[SequenceHash, ...]
    tier: Tier = Tier.DEVICE


@dataclass(frozen=True, slots=True)
class Cleared:
    """Every block of every tier is gone."""


CacheEvent = Stored | Removed | Cleared
