"""Blocks that a worker will hold, because a request with them was routed there.

For engines that do not report what they cache, this is all that is known about them. For others it
counts what requests in flight will have cached by the time the next one gets its turn. The record
is kept in Redis alongside the index, so that all replicas score alike.

Only the blocks of a chain at `chains.POSITIONS` are recorded. A chain of 8,192 blocks thus costs 88
entries instead of 8,192, and what is predicted falls short of the truth by at most a ninth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from app.core.chains import bucket_bits_for, hex_text, positions
from app.core.keys import Keyspace
from app.core.types import Incarnation, SequenceHash
from app.state.scripts import Call, call

SLICES_PER_LIFETIME = 4
ENTRIES_PER_BUCKET = 32
"""Entries per bucket, placed one by one: fewer would cost more memory for keys, and more would slow
down lookups."""
TARGET_FRACTION = 0.8
ROUND_SLICES = 10
"""Slices that a round of `prune` takes at most: steps may be late, and entries not looked at for 20
slices come back to life (lua/lib/slices.lua)."""


@dataclass(frozen=True, slots=True)
class PredictionSettings:
    """Bounds of predictions. lifetime_s: after the last use. max_entries: in each shard; beyond
    that, the oldest are given up."""

    lifetime_s: float
    max_entries: int

    @property
    def slice_ms(self) -> int:
        return max(1, round(self.lifetime_s * 1000 / SLICES_PER_LIFETIME))

    def prune_pause_s(self, buckets: int, max_buckets: int) -> float:
        """Returns the longest pause between steps of `prune`, each of `max_buckets` out of
        `buckets`."""
        return ROUND_SLICES * self.slice_ms / 1000 * max_buckets / max(1, buckets)


@dataclass(frozen=True, slots=True)
class PruneStep:
    """Result of one step. removed: entries. buckets: of a round; 0: nothing was predicted yet."""

    removed: int
    buckets: int


def predict(
    shard: Keyspace,
    incarnation: Incarnation,
    chain: Sequence[SequenceHash],
    settings: PredictionSettings,
    attempt: str,
    ttl_ms: int,
) -> Call[int]:
    """Records that `incarnation` gets a request with `chain`; returns how many entries it took.
    attempt: may confirm or withdraw the prediction for ttl_ms."""
    return call(
        "predict",
        shard,
        incarnation,
        _text(chain),
        settings.slice_ms,
        bucket_bits_for(settings.max_entries, ENTRIES_PER_BUCKET),
        settings.max_entries,
        round(settings.max_entries * TARGET_FRACTION),
        attempt,
        ttl_ms,
        parse=int,
    )


def confirm_predicted(shard: Keyspace, attempt: str, settings: PredictionSettings) -> Call[int]:
    """Confirms what a request predicted, as its first token is out; returns how many entries
    changed."""
    return call("confirm_predicted", shard, attempt, settings.slice_ms, parse=int)


def withdraw_predicted(shard: Keyspace, attempt: str) -> Call[int]:
    """Forgets what a request that ended before its first token has added, but for what another one
    has confirmed since; returns how many entries."""
    return call("withdraw_predicted", shard, attempt, parse=int)


def predicted(
    shard: Keyspace, chain: Sequence[SequenceHash], settings: PredictionSettings
) -> Call[dict[Incarnation, int]]:
    """Returns the leading blocks of `chain` that each incarnation is predicted to hold."""
    reached = positions(len(chain))

    def parse(reply: list[Any]) -> dict[Incarnation, int]:
        return {
            Incarnation(int(inc)): reached[n - 1]
            for inc, n in zip(reply[::2], reply[1::2], strict=True)
        }

    return call("predicted", shard, _text(chain), settings.slice_ms, parse=parse)


def prune(shard: Keyspace, settings: PredictionSettings, max_buckets: int) -> Call[PruneStep]:
    """Removes, in one bounded step, predictions that have expired."""
    return call(
        "prune", shard, settings.slice_ms, max_buckets, parse=lambda reply: PruneStep(*reply)
    )


def _text(chain: Sequence[SequenceHash]) -> bytes:
    return hex_text([chain[n - 1] for n in positions(len(chain))])
