"""Overlap of a prompt with each worker's cache, and the blocks after which its engine resumes."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from app.core.types import Incarnation, TierOverlap

Back = int
"""Point at which an engine resumes a prompt that leaves its cache after a certain block. n > 0: n
blocks before. -n: right there, or n blocks before if the prompt ends there. 0: as the worker's
ReuseRule says."""

_ENTRY = re.compile(rb"(\d{1,18})([-=])(\d{1,9})")


class ReuseRule(NamedTuple):
    """Numbers that say what an engine reuses of the blocks it holds.

    granule: only whole multiples of so many blocks. lookahead: a block only if so many after it are
    held as well. recomputed: the last so many of the hit are computed again. chunk: only whole
    multiples of so many blocks of a prompt whose hit goes on in other tiers than the device.
    """

    granule: int = 1
    lookahead: int = 0
    recomputed: int = 0
    chunk: int = 1

    def reused(self, held: int, most: int) -> int:
        """Returns how many of `held` leading blocks are reused. most: the prompt's blocks without
        its last token."""
        usable = min(held - self.lookahead, most) - self.recomputed
        return max(usable, 0) // self.granule * self.granule

    def reusable(self, held: TierOverlap, most: int) -> int:
        """Returns how many of the blocks held in several tiers are reused."""
        total = held.total
        if self.chunk > 1 and total > held.device:
            total = max(held.device, min(total, most) // self.chunk * self.chunk)
        return self.reused(total, most)

    def back(self, held: int, last: int, before: int) -> Back:
        """Returns the Back of an engine that holds `held` blocks and resumes after `last` of them,
        or, if it may not use all, after `before`."""
        if last < held:
            before = last
        if (last, before) == (self.reused(held, held), self.reused(held, held - 1)):
            return 0
        return held - last if last < held else before - held


EVERY_BLOCK = ReuseRule()
NO_BLOCK = ReuseRule(granule=1 << 40)


class Resume(NamedTuple):
    """Blocks that an engine reuses of `held` leading ones: `last`; `before`, if it may not use
    all."""

    held: int
    last: int
    before: int

    @classmethod
    def of(cls, held: int, back: Back) -> Resume:
        before = max(0, held - abs(back))
        return cls(held, held if back < 0 else before, before)

    def reused(self, most: int) -> int:
        """Returns the reused blocks of a prompt with `most` blocks besides its last token."""
        return self.last if self.last <= most else min(self.before, most)


def back_text(back: Back) -> str:
    """Returns the text behind an incarnation's number in a field of the index."""
    return f"-{back}" if back > 0 else f"={-back}" if back else ""


def parse_field(field: bytes) -> tuple[bytes, bytes]:
    """Returns the resume points and the owners in a field of the index."""
    backs, _, owners = field.rpartition(b" ")
    return backs, owners


def parse_backs(backs: bytes) -> Mapping[Incarnation, Back]:
    return {
        Incarnation(int(inc)): int(blocks) if sign == b"-" else -int(blocks)
        for inc, sign, blocks in _ENTRY.findall(backs)
    }


Held = tuple[Collection[Incarnation], TierOverlap]
"""Incarnations that hold the same of a chain, and what they hold."""


class Overlaps(Mapping[Incarnation, TierOverlap]):
    """Overlap of one chain with each incarnation; those without overlap are absent.

    shared: sets of many that hold the same. own: what others hold. The last set that has an
    incarnation counts, and `own` before all: it is the longest. resumes: reused blocks, where they
    differ from what the worker's ReuseRule says.
    """

    __slots__ = ("own", "resumes", "shared")

    def __init__(
        self,
        own: Mapping[Incarnation, TierOverlap] = MappingProxyType({}),
        shared: Sequence[tuple[frozenset[Incarnation], TierOverlap]] = (),
        resumes: Mapping[Incarnation, Resume] = MappingProxyType({}),
    ) -> None:
        self.own = own
        self.shared = shared
        self.resumes = resumes

    def groups(self) -> Iterator[Held]:
        """Yields groups that hold the same; the last group that has an incarnation counts."""
        yield from self.shared
        for inc, overlap in self.own.items():
            yield (inc,), overlap

    def flat(self) -> dict[Incarnation, TierOverlap]:
        return {inc: overlap for members, overlap in self.groups() for inc in members}

    @property
    def longest(self) -> int:
        return max((overlap.total for _, overlap in self.groups()), default=0)

    def __getitem__(self, inc: Incarnation) -> TierOverlap:
        if inc in self.own:
            return self.own[inc]
        for members, overlap in reversed(self.shared):
            if inc in members:
                return overlap
        raise KeyError(inc)

    def __iter__(self) -> Iterator[Incarnation]:
        return iter(self.flat())

    def __len__(self) -> int:
        return len(self.flat())
