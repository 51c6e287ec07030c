"""Block ownership in Redis: an incarnation's changes, audits, and the sweep after dead ones."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

from app.core.chains import GROUP_BLOCKS, TIER_LETTER, TIER_OF_LETTER
from app.core.keys import Keyspace
from app.core.overlaps import Back, back_text
from app.core.types import Incarnation, SequenceHash, Tier, parse_incarnation
from app.state.scripts import Call, call

_LETTER_OR_DASH = {tier: TIER_LETTER[tier] if tier is not None else "-" for tier in (None, *Tier)}
_HASH = re.compile(rb"[0-9a-f]{16}")


class Change(NamedTuple):
    """A block and its tier from now on; None: no tier. leader: the first block of its group. back:
    where the engine resumes after it."""

    block: SequenceHash
    tier: Tier | None
    leader: SequenceHash
    back: Back = 0


@dataclass(frozen=True, slots=True)
class SweepStep:
    """Result of one step of the sweep. buckets_left: 0 when nothing is left to sweep for now.
    writers: incarnations that may publish in the shard."""

    removed: int
    buckets_left: int
    writers: list[Incarnation]


def chain_changes(chain: Sequence[SequenceHash], tier: Tier | None, start: int = 0) -> list[Change]:
    """Returns changes that put the blocks of a chain, from position `start` on, in `tier`."""
    return [Change(chain[i], tier, chain[i - i % GROUP_BLOCKS]) for i in range(start, len(chain))]


def open_shard(
    shard: Keyspace, incarnation: Incarnation, nonce: str, bucket_bits: int
) -> Call[bool]:
    """Lets an incarnation publish in a shard. False: its number is taken there; register again.
    bucket_bits: used only if the shard is new."""
    return call("open_shard", shard, incarnation, nonce, bucket_bits, parse=bool)


def apply(
    shard: Keyspace,
    incarnation: Incarnation,
    nonce: str,
    seq: int,
    changes: Iterable[Change],
    *,
    essential: bool = False,
) -> Call[bool]:
    """Publishes one batch. False: this incarnation is lost, or a batch is missing; resync. seq: 1
    for an incarnation's first batch, then one more each time; a batch may be resent with the same
    seq. essential: the batch adds no entries, and is published even if Redis is full."""
    groups = _groups(changes)
    return call("apply", shard, incarnation, nonce, seq, int(essential), *groups, parse=bool)


Place = tuple[int, int]
"""A bucket and a position in it: 0, or for a large one what the last answer gave."""
FIRST_PLACE: Place = (0, 0)


@dataclass(frozen=True, slots=True)
class Audit:
    """Result of an audit. missing: how many of the blocks asked about the index does not show as
    published. entries: what it shows of the incarnation in some buckets: bucket, tier and block;
    None for a tier or block that cannot be read. following: where to continue."""

    missing: int
    bucket_bits: int
    following: Place
    entries: list[tuple[int, Tier | None, SequenceHash | None]]


def audit(
    shard: Keyspace,
    incarnation: Incarnation,
    nonce: str,
    seq: int,
    entries: Iterable[Change],
    first: Place,
    max_buckets: int,
) -> Call[Audit | None]:
    """Compares the index with what an incarnation has published up to batch `seq`: whether it shows
    `entries`, and what it shows in the buckets from `first` on. None: the incarnation is lost."""

    def parse(reply: list[Any] | None) -> Audit | None:
        if reply is None:
            return None
        missing, bits, bucket, within, shown = reply
        digests = [
            (
                bucket,
                TIER_OF_LETTER.get(entry[:1]),
                SequenceHash(int(entry[1:], 16)) if _HASH.fullmatch(entry[1:]) else None,
            )
            for bucket, entry in zip(shown[::2], shown[1::2], strict=True)
        ]
        return Audit(missing, bits, (bucket, within), digests)

    return call(
        "audit", shard, incarnation, nonce, seq, *first, max_buckets, *_groups(entries), parse=parse
    )


def _groups(changes: Iterable[Change]) -> list[str]:
    return [
        _group(leader, list(members))
        for leader, members in groupby(changes, key=attrgetter("leader"))
    ]


def _group(leader: SequenceHash, changes: list[Change]) -> str:
    text = f"{leader:016x}" + "".join(
        [f"{_LETTER_OR_DASH[tier]}{block:016x}" for block, tier, _, _ in changes]
    )
    backs = [
        f" {number}{back_text(back)}"
        for number, (_, tier, _, back) in enumerate(changes, 1)
        if back and tier is not None
    ]
    return text + "".join(backs)


def sweep(
    shard: Keyspace,
    lost: Iterable[Incarnation],
    *,
    max_buckets: int,
    scrub_ms: int,
    pause_ms: int = 0,
    idle_ms: int = 0,
) -> Call[SweepStep]:
    """Removes, in one bounded step, entries of incarnations that may not publish.

    lost: incarnations that may not publish from now on. A new one among them starts a pass; so does
    every scrub_ms. pause_ms, idle_ms: least time since anybody's last step, during a pass and
    without one; before that, only `lost` is noted, and nothing removed.
    """

    def parse(reply: list[Any]) -> SweepStep:
        removed, buckets_left, writers = reply
        return SweepStep(removed, buckets_left, [*filter(None, map(parse_incarnation, writers))])

    return call("sweep", shard, max_buckets, scrub_ms, pause_ms, idle_ms, *lost, parse=parse)
