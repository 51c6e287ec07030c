"""Changes of an engine's KV cache, in our own hashes: from engines, for agents."""

from __future__ import annotations

from dataclasses import dataclass

from app.core.types import SequenceHash, Tier


@dataclass(frozen=True, slots=True)
class Stored:
    """`blocks` (a chain, in prompt order) are now in `tier`; the first one's parent is `parent`.
    parent is None if the chain starts at the root. A block may be in several tiers at once. Storing
    a block again is harmless."""

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
    """Blocks after which the engine can resume a prompt; if not are_ends, it no longer can.

    All blocks are ends until the first of these events, and after a Cleared. `blocks` may name
    blocks that the engine does not hold. An event without blocks says only that no others are ends.
    lookahead: an end counts only for prompts that share so many held blocks after it. recomputed:
    the engine resumes so many blocks before the end. Both hold for all ends, and come with each
    event.
    """

    blocks: tuple[SequenceHash, ...]
    are_ends: bool = True
    lookahead: int = 0
    recomputed: int = 0


CacheEvent = Stored | Removed | Cleared | Ends
