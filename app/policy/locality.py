"""Was the worker that holds most of the prompt chosen, and if not, why?"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from app.core.chains import Overlaps
from app.core.types import Incarnation, TierOverlap
from app.policy.affinity import Affinity
from app.policy.choose import Choice
from app.policy.cost import Candidates, RequestSize
from app.router.fleet import View

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
"""Whether the worker with the longest overlap was chosen (kept) or no worker held anything (none).
Else why another was chosen: it was drawn though no cheaper (tie); the longest overlap was
outweighed by its worker's load (load); the session had gone to the other worker (session); the
worker with the longest overlap was full or too small for the prompt (full), excluded by the request
(excluded) or past its lease (lease); or Redis was unreachable (degraded)."""


def locality_of(
    view: View,
    candidates: Candidates,
    size: RequestSize,
    overlaps: Overlaps,
    eligible: NDArray[np.bool_],
    choice: Choice,
    overlap: int,
    affinity: Affinity | None,
) -> tuple[str, str, int]:
    """What became of the longest overlap, which worker had it, and how many blocks it is.

    The first is one of LOCALITIES except `degraded`. overlap: that of the chosen worker.
    """
    holder: Incarnation | None = None
    best_overlap = overlap
    last: TierOverlap | None = None
    for inc, known in overlaps.items():
        # A thousand workers that hold the same system prompt share one object.
        if known is last:
            continue
        last = known
        if known.total > best_overlap:
            holder, best_overlap = inc, known.total
    best = choice.index if holder is None else view.position(holder)
    if best is None:
        return "lease", f"#{holder}", best_overlap
    name = str(view.infos[best].key) if best_overlap else ""
    if best == choice.index:
        return ("kept" if overlap else "none"), name, best_overlap
    if not eligible[best]:
        return "excluded", name, best_overlap
    is_full = candidates.active_requests[best] >= candidates.max_requests[best]
    if is_full or 0 < candidates.kv_total_blocks[best] < size.isl_blocks:
        return "full", name, best_overlap
    cost = choice.costs.cost
    # It may even be cheaper: with a temperature, or if a policy compares only two workers.
    if cost[best] <= cost[choice.index]:
        return "tie", name, best_overlap
    if affinity is not None:
        discount = choice.costs.terms["affinity"][choice.index]
        if cost[best] < cost[choice.index] - discount:
            return "session", name, best_overlap
    return "load", name, best_overlap
