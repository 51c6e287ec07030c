"""Block ownership in Redis: apply an incarnation's changes, sweep what the dead left."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from app.core.keys import Keyspace
from app.core.scripts import Call, call
from app.core.types import Incarnation, SequenceHash, Tier

BLOCKS_PER_BUCKET = 32
"""So many keep a bucket a listpack that is read fast, and its key a small part of its size."""

TIER_LETTER = {Tier.DEVICE: "d", Tier.HOST: "h", Tier.DISK: "k"}
TIER_OF_LETTER = {letter.encode(): tier for tier, letter in TIER_LETTER.items()}

Change = tuple[SequenceHash, Tier | None]
"""A block and the tier that it is published in from now on; None: in none."""


@dataclass(frozen=True, slots=True)
class SweepStep:
    """What one step of the sweep did. buckets_left: 0 when nothing is left to sweep."""

    retired: int
    removed: int
    buckets_left: int


def bucket_bits_for(capacity_blocks: int) -> int:
    """The number of buckets, as a power of two, for an index of so many unique blocks."""
    bits = round(math.log2(max(1, capacity_blocks) / BLOCKS_PER_BUCKET))
    return min(24, max(1, bits))


def apply(
    keyspace: Keyspace,
    incarnation: Incarnation,
    nonce: str,
    seq: int,
    changes: Iterable[Change],
) -> Call[bool]:
    """Publish one batch. False: this incarnation is lost, or a batch is missing; resync.

    seq: 1 for an incarnation's first batch, then one more each time; the same batch may be sent
    again with the same seq.
    """
    text = "".join(
        f"{'-' if tier is None else TIER_LETTER[tier]}{block:016x}" for block, tier in changes
    )
    return call("apply", keyspace, incarnation, nonce, seq, text, parse=bool)


def sweep(keyspace: Keyspace, max_buckets: int, grace_ms: int) -> Call[SweepStep]:
    """One bounded step: retire leases that lapsed `grace_ms` ago, remove what the dead left."""
    return call("sweep", keyspace, max_buckets, grace_ms, parse=lambda reply: SweepStep(*reply))
