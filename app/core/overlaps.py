"""How much of a prompt each worker holds, and after which of the blocks its engine goes on."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from app.core.types import Incarnation, TierOverlap

Back = int
"""Where an engine goes on if a prompt leaves what it holds after a certain block. n > 0: it
computes the last n blocks again. -n: it computes none, or the last n if one must be, as the prompt
ends there. 0: as the worker's ReuseRule says."""

_ENTRY = re.compile(rb"(\d{1,18})([-=])(\d{1,9})")


class ReuseRule(NamedTuple):
    """What an engine reuses of blocks that it holds, by numbers.

    granule: only whole multiples of so many blocks. lookahead: a block only if so many after it are
    held as well. recomputed: the last so many of what it finds are computed again. chunk: of a
    prompt that goes on in other tiers than the device, only whole multiples of so many.
    """

    granule: int = 1
    lookahead: int = 0
    recomputed: int = 0
    chunk: int = 1

    def reused(self, held: int, most: int) -> int:
        """Of `held` leading blocks; most: how many the prompt has without its last token."""
        usable = min(held - self.lookahead, most) - self.recomputed
        return max(usable, 0) // self.granule * self.granule

    def reusable(self, held: TierOverlap, most: int) -> int:
        """The same of what is held in several tiers."""
        total = held.total
        if self.chunk > 1 and total > held.device:
            total = max(held.device, min(total, most) // self.chunk * self.chunk)
        return self.reused(total, most)

    def back(self, held: int, last: int, before: int) -> Back:
        """How to say that an engine that holds so many blocks goes on after `last` of them, or, if
        it may not use all, after `before`."""
        if last < held:
            before = last
        if (last, before) == (self.reused(held, held), self.reused(held, held - 1)):
            return 0
        return held - last if last < held else before - held


EVERY_BLOCK = ReuseRule()
NO_BLOCK = ReuseRule(granule=1 << 40)


class Resume(NamedTuple):
    """Of `held` leading blocks an engine reuses `last`; if it may not use all, `before`."""

    held: int
    last: int
    before: int

    @classmethod
    def of(cls, held: int, back: Back) -> Resume:
        before = max(0, held - abs(back))
        return cls(held, held if back < 0 else before, before)

    def reused(self, most: int) -> int:
        """most: as for ReuseRule."""
        return self.last if self.last <= most else min(self.before, most)


def back_text(back: Back) -> str:
    """As it is written behind the number of an incarnation."""
    return f"-{back}" if back > 0 else f"={-back}" if back else ""


def parse_field(field: bytes) -> tuple[bytes, bytes]:
    """What a field of the index says of where engines go on, and its owners."""
    backs, _, owners = field.rpartition(b" ")
    return backs, owners


def parse_backs(backs: bytes) -> Mapping[Incarnation, Back]:
    return {
        Incarnation(int(inc)): int(blocks) if sign == b"-" else -int(blocks)
        for inc, sign, blocks in _ENTRY.findall(backs)
    }


Held = tuple[Collection[Incarnation], TierOverlap]
"""Incarnations that hold the same of a chain, and what."""


class Overlaps(Mapping[Incarnation, TierOverlap]):
    """What each incarnation holds of one chain; those without overlap are absent.

    shared: sets of many that hold the same. own: what others hold. Where one is in several, the
    last counts, and `own` before all: it is the longest. resumes: of some, what their engines reuse
    of it, where that differs from what their ReuseRule says.
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
        """Of the groups that one is in, the last counts."""
        yield from self.shared
        for inc, overlap in self.own.items():
            yield (inc,), overlap

    def flat(self) -> dict[Incarnation, TierOverlap]:
        return {inc: overlap for members, overlap in self.groups() for inc in members}

    @property
    def longest(self) -> int:
        """In blocks."""
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
