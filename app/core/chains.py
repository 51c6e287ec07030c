"""How chains of blocks lie in Redis: groups, buckets, shards, sampled positions, and their text."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Sequence
from struct import pack

from app.core.types import Incarnation, SequenceHash, Tier

BLOCKS_PER_BUCKET = 8
"""On average: half a group. More would make a bucket slower to search, above all when there are
many times the blocks that were planned for. Fewer would save nothing, as a group stays together."""
GROUP_BLOCKS = 16
"""This many successive blocks of a chain, from its root, form a group and share one bucket. They
are stored and looked up together, and fetching a bucket that is not in the processor's caches costs
more than what is done with it."""

TIER_LETTER = {Tier.DEVICE: "d", Tier.HOST: "h", Tier.DISK: "k"}
TIER_OF_LETTER = {letter.encode(): tier for tier, letter in TIER_LETTER.items()}
OWNER = re.compile(rb"(?<!\d)(\d{1,18})([dhk])")
"""No incarnation's number has more digits, and int() refuses thousands of them."""

DOUBLINGS = 24
POSITIONS = [
    *range(1, 9),
    *(n << doubling for doubling in range(DOUBLINGS) for n in range(9, 17)),
]
"""Of the blocks that stand for a whole chain, counted from 1: each of the first eight, then eight
for each doubling of the length, so 1 to 16, then 18, 20, ... 32, 36, 40, ... 64, 72, ..."""


def bucket_bits_for(capacity_blocks: int, per_bucket: int = BLOCKS_PER_BUCKET) -> int:
    """log2 of the number of buckets for an index of `capacity_blocks` unique blocks."""
    bits = round(math.log2(max(1, capacity_blocks) / per_bucket))
    return min(24, max(1, bits))


def bucket_name(number: int, bits: int) -> str:
    """The name of bucket `number` of 2^bits, as lua/lib/bucket.lua spells it."""
    digits = -(-bits // 4)
    return f"{number << (4 * digits - bits):0{digits}x}"


def bucket_of(leader: SequenceHash, bits: int) -> str:
    """The name of the bucket, of 2^bits, in which the group that begins with `leader` lies."""
    return bucket_name(leader >> (64 - bits), bits)


def hex_text(blocks: Sequence[SequenceHash]) -> bytes:
    """16 hex digits for each block, as scripts expect them."""
    return pack(f">{len(blocks)}Q", *blocks).hex().encode()


def hex_texts(blocks: Sequence[SequenceHash]) -> tuple[str, ...]:
    """The field of each block in its bucket."""
    return tuple(pack(f">{len(blocks)}Q", *blocks).hex(" ", 8).split())


def shard_of(root: SequenceHash, shards: int) -> int:
    """The shard of all chains that begin with the block `root`."""
    return root % shards


def positions(length: int) -> Sequence[int]:
    """Those of POSITIONS, counted from 1, that a chain of `length` blocks reaches."""
    return POSITIONS[: bisect_right(POSITIONS, length)]


def parse_owners(owners: bytes) -> tuple[tuple[Incarnation, Tier], ...]:
    """The entries of a field in a `blocks:` hash."""
    return tuple(
        (Incarnation(int(number)), TIER_OF_LETTER[letter])
        for number, letter in OWNER.findall(owners)
    )
