"""What an engine tells of its KV cache, in our own hashes. Produced by engines, eaten by agents."""

from __future__ import annotations

from dataclasses import dataclass

from app.core.types import SequenceHash, Tier


@dataclass(frozen=True, slots=True)
class Stored:
    """`blocks` (a chain, in prompt order) now lie in `tier`; the first one's parent is `parent`.

    parent is None where the chain starts at the root. A block may lie in several tiers at once.
    Storing a block again is harmless.
    """

    blocks: tuple[SequenceHash, ...]
    parent: SequenceHash | None
    tier: Tier = Tier.DEVICE


@dataclass(frozen=True, slots=True)
class Removed:
    """`blocks`, in any order, no longer lie in `tier`. Unknown blocks are ignored."""

    blocks: tuple[SequenceHash, ...]
    tier: Tier = Tier.DEVICE


@dataclass(frozen=True, slots=True)
class Cleared:
    """Every block of every tier is gone."""


CacheEvent = Stored | Removed | Cleared
