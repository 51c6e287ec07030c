"""Layout of chains of blocks in Redis: groups, buckets, shards, sampled positions, and their
text."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Sequence
from struct import pack

from xxhash import xxh3_128_hexdigest

from app.core.types import Incarnation, SequenceHash, Tier

BLOCKS_PER_BUCKET = 8
"""Blocks per bucket, on average: half a group. More would make a bucket slower to search; fewer
would save nothing, as a group stays together."""
GROUP_BLOCKS = 16
"""Successive blocks of a chain, counted from its root, that share one bucket. A group is stored and
looked up together: fetching a bucket into the processor's caches costs more than searching it."""

TIER_LETTER = {Tier.DEVICE: "d", Tier.HOST: "h", Tier.DISK: "k"}
TIER_OF_LETTER = {letter.encode(): tier for tier, letter in TIER_LETTER.items()}
OWNER = re.compile(rb"(?<!\d)(\d{1,18})([dhk])")
"""An entry's incarnation and tier. The digits are bounded, as int() refuses thousands of them."""

DOUBLINGS = 24
POSITIONS = [*range(1, 9), *(n << doubling for doubling in range(DOUBLINGS) for n in range(9, 17))]
"""Positions, counted from 1, whose blocks stand for a whole chain: each of the first eight, then
eight for each doubling of the length: 1 to 16, then 18, 20, ... 32, 36, 40, ... 64, 72, ..."""


def bucket_bits_for(capacity_blocks: int, per_bucket: int = BLOCKS_PER_BUCKET) -> int:
    """Returns log2 of the number of buckets for an index of `capacity_blocks` unique blocks."""
    bits = round(math.log2(max(1, capacity_blocks) / per_bucket))
    return min(24, max(1, bits))


def bucket_name(number: int, bits: int) -> str:
    """Returns the name of bucket `number` of 2^bits, as lua/lib/bucket.lua spells it."""
    digits = -(-bits // 4)
    return f"{number << (4 * digits - bits):0{digits}x}"


def bucket_of(leader: SequenceHash, bits: int) -> str:
    """Returns the name of the bucket, of 2^bits, that holds the group whose first block is
    `leader`."""
    return bucket_name(leader >> (64 - bits), bits)


def hex_text(blocks: Sequence[SequenceHash]) -> bytes:
    """Returns 16 hex digits for each block, as scripts expect them."""
    return pack(f">{len(blocks)}Q", *blocks).hex().encode()


def hex_texts(blocks: Sequence[SequenceHash]) -> tuple[str, ...]:
    """Returns each block's field in its bucket."""
    return tuple(pack(f">{len(blocks)}Q", *blocks).hex(" ", 8).split())


def shard_of(root: SequenceHash, shards: int) -> int:
    """Returns the shard of all chains that begin with the block `root`."""
    return root % shards


def positions(length: int) -> Sequence[int]:
    """Returns those of POSITIONS that a chain of `length` blocks reaches."""
    return POSITIONS[: bisect_right(POSITIONS, length)]


def parse_owners(owners: bytes) -> tuple[tuple[Incarnation, Tier], ...]:
    """Returns the entries of a field in a `blocks:` hash."""
    return tuple(
        (Incarnation(int(number)), TIER_OF_LETTER[letter])
        for number, letter in OWNER.findall(owners)
    )


PIECE_BYTES = 1024
MAX_PIECES = 512
"""Pieces that are named; a longer text is named by its beginning alone."""


def trail_of(text: bytes, seed: str) -> list[str]:
    """Returns a name for each prefix of whole pieces, the longest first. seed: part of all
    names."""
    names: list[str] = []
    name = seed
    for at in range(PIECE_BYTES, min(len(text), PIECE_BYTES * MAX_PIECES) + 1, PIECE_BYTES):
        name = "text-" + xxh3_128_hexdigest(name.encode() + text[at - PIECE_BYTES : at])
        names.append(name)
    return names[::-1]


def marks_of(trail: Sequence[str]) -> list[str]:
    """Returns the few names of a trail that find most prefixes shared with another text, and none
    by less than half of it: at the powers of two from its beginning, as many conversations begin
    alike, and from its end, where the next turn of the same one may differ."""
    num = len(trail)
    powers = [0, *(1 << n for n in range(num.bit_length()))]
    places = {place for power in powers for place in (power, num - power) if 0 <= place < num}
    return [trail[place] for place in sorted(places)]
