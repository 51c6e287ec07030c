"""How many copies of a block an engine has announced, and where."""

from __future__ import annotations

from functools import lru_cache

from app.core.types import Tier

Place = tuple[Tier, int | None]
"""A tier, and a group of the engine's layers."""
References = tuple[tuple[Place, int], ...]
"""How many copies of a block were announced in each place."""


def with_copy(references: References, place: Place, *, copies: bool) -> References:
    """`references` with one more in `place`; with one at most there unless `copies`."""
    if not copies and any(held == place for held, _ in references):
        return references
    return _counted(references, place, 1)


def without_copy(references: References, place: Place, left: int | None) -> References:
    """`references` with `left` in `place`, or one less if None; the same if there is none."""
    before = dict(references).get(place, 0)
    return _counted(references, place, -1 if left is None else left - before)


@lru_cache(maxsize=4096)
def _counted(references: References, place: Place, change: int) -> References:
    """`references` with one more or one less in `place`; the same if there is none to take away.

    Cached, so that blocks share them: a Counter for each would take as much as all the rest.
    """
    counts = dict(references)
    counts[place] = counts.get(place, 0) + change
    if counts[place] < 0:
        return references
    return tuple((held, count) for held, count in counts.items() if count)
