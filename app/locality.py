"""Was the worker chosen that holds most of the prompt, and if not, why?"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from app.core.matching import Overlaps
from app.core.types import Incarnation
from app.fleet import View
from app.policy.affinity import Affinity
from app.policy.cost import Candidates
from app.policy.select import Choice

LOCALITIES = (
    "kept",
    "none",
    "tie",
    "load",
    "session",
    "full",
    "excluded",
    "lease",
    "degraded",
)
"""Whether the worker with the longest overlap was chosen: kept; or nobody held anything (none); or
another one was, as that was drawn though no cheaper (tie), its load outweighed its overlap, the
session had gone to the other one, it was full, the request excluded it, its lease had run out, or
Redis was away."""


def locality_of(
    view: View,
    candidates: Candidates,
    overlaps: Overlaps,
    eligible: NDArray[np.bool_],
    choice: Choice,
    overlap: int,
    affinity: Affinity | None,
) -> tuple[str, str, int]:
    """What became of the longest overlap, one of LOCALITIES but `degraded`; whose; how many blocks.

    overlap: of the worker that was chosen.
    """
    best, best_overlap = choice.index, overlap
    lapsed: Incarnation | None = None
    for inc, known in overlaps.items():
        if known.total > best_overlap:
            position = view.position(inc)
            best_overlap = known.total
            lapsed = inc if position is None else None
            best = choice.index if position is None else position
    if lapsed is not None:
        return "lease", f"#{lapsed}", best_overlap
    name = str(view.infos[best].key) if best_overlap else ""
    if best == choice.index:
        return ("kept" if overlap else "none"), name, best_overlap
    if not eligible[best]:
        return "excluded", name, best_overlap
    if candidates.active_requests[best] >= candidates.max_requests[best]:
        return "full", name, best_overlap
    cost = choice.costs.cost
    # Cheaper even: with a temperature, or where a policy compares but two of them.
    if cost[best] <= cost[choice.index]:
        return "tie", name, best_overlap
    if affinity is not None and affinity.position == choice.index:
        discount = choice.costs.terms["affinity"][choice.index]
        if cost[best] < cost[choice.index] - discount:
            return "session", name, best_overlap
    return "load", name, best_overlap
