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


@dataclass(frozen=True, slots=True)
class Ends:
    """`blocks` are ends, after which the engine can go on with what it holds; if not are_ends, they
    are no longer.

    Until the first of these events, and once the cache is cleared, all blocks are. `blocks` may be
    such that it does not hold. An event without blocks says only that no others are.
    lookahead: it uses an end only for prompts that have so many blocks after it in common with what
    it holds. recomputed: it then goes on so many blocks before the end. Each event tells both, for
    all ends.
    """

    blocks: tuple[SequenceHash, ...]
    are_ends: bool = True
    lookahead: int = 0
    recomputed: int = 0


CacheEvent = Stored | Removed | Cleared | Ends
