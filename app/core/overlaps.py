"""How much of a prompt each worker holds."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType

from app.core.resume import Resume
from app.core.types import Incarnation, TierOverlap

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
