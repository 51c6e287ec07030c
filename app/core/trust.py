"""How far what a decision knew of overlap can be relied on, in one word."""

from __future__ import annotations

from enum import StrEnum


class Trust(StrEnum):
    EXACT = "exact"
    BOUND = "bound"
    APPROXIMATE = "approximate"
    DEGRADED = "degraded"
    BLIND = "blind"

    @property
    def predicts(self) -> bool:
        """Whether the overlap says what the worker will find cached; else nobody could tell."""
        return self in (Trust.EXACT, Trust.BOUND)

    @property
    def text(self) -> str:
        """The same as a sentence."""
        return _TEXTS[self]


_TEXTS = {
    Trust.EXACT: "overlap is what engines had published",
    Trust.BOUND: "overlap is what was proved or foreseen, and workers may hold more",
    Trust.APPROXIMATE: "the worker's engine does not tell what it caches, or its agent is away: "
    "overlap is what was published, and what was routed there since",
    Trust.DEGRADED: "Redis was unreachable, so no overlap was known",
    Trust.BLIND: "the prompt's tokens were not known, or its shard of the index was unreachable",
}
