"""Which prefixes prompts asked for, counted over recorded decisions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from app.core.chains import positions
from app.core.types import SequenceHash
from app.policy.record import DecisionSummary


@dataclass(frozen=True, slots=True)
class PrefixUsage:
    """A prefix of prompts. block: its last. requests: how many in the window had all of it."""

    block: SequenceHash
    num_blocks: int
    requests: int


def usages(records: Iterable[DecisionSummary]) -> Iterator[PrefixUsage]:
    """How often prefixes were asked for, the most frequent first, among equals the longest.

    A prefix is left out if a longer recorded one with as many requests continues it. So the system
    prompt is listed, but not each of its blocks.
    """
    counts: dict[SequenceHash, int] = {}
    place: dict[SequenceHash, int] = {}
    continued: dict[SequenceHash, int] = {}
    for record in records:
        at = positions(record.full_blocks)
        for block, position, child in zip(
            record.blocks, at, [*record.blocks[1:], None], strict=False
        ):
            counts[block] = counts.get(block, 0) + 1
            place[block] = position
            if child is not None:
                # If all requests go on with the same child, it is also the one seen last.
                continued[block] = counts.get(child, 0) + 1
    most_asked = [
        PrefixUsage(block, place[block], count)
        for block, count in counts.items()
        if continued.get(block, 0) < count
    ]
    yield from sorted(most_asked, key=lambda usage: (-usage.requests, -usage.num_blocks))
