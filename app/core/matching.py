"""Overlap of prompts with every worker's published blocks: exact, in at most two round trips.

Redis pays for each hash it is handed, used or not, so a long chain is sent as every k-th hash
first, then only the stretches in which the owners change. Because an incarnation's published
blocks are closed under prefix and its tier never gets faster along a chain, equal owners at two
positions mean the same owners between them, and that loses nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from math import isqrt
from typing import Any, NamedTuple

from app.core.errors import NamespaceMissing
from app.core.index import TIER_OF_LETTER
from app.core.keys import Keyspace
from app.core.scripts import Call, ScriptRunner, call
from app.core.types import Incarnation, SequenceHash, Tier, TierOverlap

WHOLE_CHAIN = 512
"""Chains up to this length are sent whole: the hashes cost Redis less than a round trip more."""

_OWNER = re.compile(rb"(\d+)([dhk])")

Overlaps = dict[Incarnation, TierOverlap]


class Run(NamedTuple):
    """`owners` hold the positions `start` to `end` of a chain, counted from 0, `end` excluded."""

    start: int
    end: int
    owners: bytes


async def match(
    runner: ScriptRunner,
    keyspace: Keyspace,
    chains: Sequence[Sequence[SequenceHash]],
    first: Call[Any] | None = None,
) -> tuple[list[Overlaps], Any]:
    """Leading blocks of each chain that each incarnation holds, and the answer of `first`.

    chains: sequence hashes of the full blocks of one prompt each, in prompt order.
    first: a call to send along with the first round trip.
    Incarnations without overlap are absent; those that are not live may be present.
    Raises NamespaceMissing where Redis has no such namespace, RedisUnavailable.
    """
    samples = [_sample(len(chain)) for chain in chains]
    coarse_calls: list[Call[Any]] = [
        _runs(keyspace, [_text(chain, at)]) for chain, at in zip(chains, samples, strict=True)
    ]
    replies = await runner.run([first, *coarse_calls] if first else coarse_calls)
    answer = replies.pop(0) if first else None
    coarse = [_placed(reply[0], at) for reply, at in zip(replies, samples, strict=True)]
    gaps = [_gaps(runs, at) for runs, at in zip(coarse, samples, strict=True)]
    open_ = [i for i, g in enumerate(gaps) if g]
    if open_:
        fine = await runner.run(
            [_runs(keyspace, [_text(chains[i], gap) for gap in gaps[i]]) for i in open_]
        )
        for i, reply in zip(open_, fine, strict=True):
            for gap, runs in zip(gaps[i], reply, strict=True):
                coarse[i] += _placed(runs, gap)
    return [_overlaps(sorted(runs)) for runs in coarse], answer


def _sample(length: int) -> range | list[int]:
    """Positions to look at first: all, or the first, the last and every k-th between them."""
    if length <= WHOLE_CHAIN:
        return range(length)
    stride = isqrt(length // 2)
    return [*range(0, length - 1, stride), length - 1]


def _text(chain: Sequence[SequenceHash], positions: Sequence[int]) -> bytes:
    return b"".join([b"%016x" % chain[i] for i in positions])


def _runs(keyspace: Keyspace, chains: Sequence[bytes]) -> Call[list[list[Any]]]:
    def parse(reply: list[list[Any]] | None) -> list[list[Any]]:
        if reply is None:
            raise NamespaceMissing("no worker has registered yet, or Redis was emptied")
        return reply

    return call("match", keyspace, *chains, parse=parse)


def _placed(runs: list[Any], positions: Sequence[int]) -> list[Run]:
    """A script's runs over `positions` of a chain, as Runs of that chain."""
    placed, start = [], 0
    for end, owners in zip(runs[::2], runs[1::2], strict=True):
        placed.append(Run(positions[start], positions[end - 1] + 1, owners))
        start = end
    return placed


def _gaps(runs: list[Run], positions: Sequence[int]) -> list[range]:
    """The stretches between sampled positions in which the owners change."""
    if not runs:
        return []
    starts = [run.start for run in runs[1:]]
    if runs[-1].end <= positions[-1]:
        starts.append(next(i for i in positions if i >= runs[-1].end))
    return [
        range(run.end, start) for run, start in zip(runs, starts, strict=False) if run.end < start
    ]


def _overlaps(runs: list[Run]) -> Overlaps:
    counts: dict[Incarnation, list[int]] = {}
    for start, end, owners in runs:
        for incarnation, tier in parse_owners(owners):
            count = counts.setdefault(incarnation, [0, 0, 0])
            # A gap ends the overlap: one who is absent from a run holds nothing behind it.
            if sum(count) == start:
                count[tier] += end - start
    return {inc: TierOverlap(*count) for inc, count in counts.items() if any(count)}


@lru_cache(maxsize=4096)
def parse_owners(owners: bytes) -> tuple[tuple[Incarnation, Tier], ...]:
    """The entries of a field in a `blocks:` hash."""
    return tuple(
        (Incarnation(int(number)), TIER_OF_LETTER[letter])
        for number, letter in _OWNER.findall(owners)
    )
