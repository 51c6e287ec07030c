"""Trust in what is known of overlap: one ladder for workers and decisions."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Trust(StrEnum):
    """Rungs from the highest to the lowest. A worker is on one of the first four, and moves while
    it serves; a decision is on its worker's, or lower."""

    EXACT = "exact"
    BOUND = "bound"
    APPROXIMATE = "approximate"
    LOAD_ONLY = "load_only"
    DEGRADED = "degraded"
    BLIND = "blind"

    @classmethod
    def parse(cls, text: str) -> Trust:
        """Returns the rung of that name. Raises ValueError."""
        return cls(text)

    @property
    def predicts(self) -> bool:
        """Whether the overlap says what the worker will find cached."""
        return self in (Trust.EXACT, Trust.BOUND)

    @property
    def text(self) -> str:
        """Meaning of the rung, as a sentence."""
        return _TEXTS[self]


class Rung(NamedTuple):
    """A worker's place on the ladder. trust_cause: why it is not exact, and, after a colon, the
    remedy."""

    trust: Trust = Trust.EXACT
    trust_cause: str = ""


TOP = Rung()


def lowest(*trusts: Trust) -> Trust:
    return max(trusts, key=_RUNGS.index)


_RUNGS = list(Trust)
_TEXTS = {
    Trust.EXACT: "overlap is what engines had published",
    Trust.BOUND: "overlap is what was proved or foreseen, and workers may hold more",
    Trust.APPROXIMATE: "the worker's engine does not tell what it caches, or its agent does not "
    "hear it, or is away: overlap is what was published, and what was routed there since",
    Trust.LOAD_ONLY: "the worker's engine caches no prefixes, so that its load alone counts",
    Trust.DEGRADED: "Redis was unreachable, so no overlap was known",
    Trust.BLIND: "the prompt's tokens were not known, or its shard of the index was unreachable",
}
