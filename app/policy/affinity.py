"""Session affinity: a worker that a session went to before is a little cheaper for it.

What workers publish about their caches is exact, so most of what a session has cached is priced
already. The rest is what routers cannot see: blocks still being computed, tiers that an engine does
not report, caches of other kinds.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from msgspec import Struct

from app.policy.cost import (
    Candidates,
    CostFunction,
    Costs,
    Floats,
    RequestSize,
    predicted_prefill_s,
    with_term,
)


class Affinity(Struct, frozen=True, omit_defaults=True):
    """A session's worker, and how much of a prompt that worker may hold beyond what is known.

    position: the worker's index in the candidates. fraction: 0-1; the share of what the worker
    lacks that the price assumes to be there. max_queue_s: with a longer queue of prefills the
    worker gets no discount; None: the queue does not matter.
    """

    position: int
    fraction: float
    max_queue_s: float | None = None


def discounted(cost: CostFunction, affinity: Affinity) -> CostFunction:
    """Returns `cost` with a term `affinity`, never above 0: what the assumed blocks save.

    The discount is in the policy's own terms, and 0 where a policy ignores the cache. What was
    routed to the worker lately does not count against it, as that is what the session sent. The
    worker gets no discount if its queue exceeds the shortest one by more seconds than the prefill
    would save.
    """

    def discount_of(candidates: Candidates, size: RequestSize, plain: Costs) -> Floats:
        discount = np.zeros_like(plain.cost)
        at = affinity.position
        if not _is_overloaded(candidates, size, affinity) and math.isfinite(plain.cost[at]):
            credited = cost(_credited(candidates, size, affinity), size)
            discount[at] = min(credited.cost[at] - plain.cost[at], 0.0)
        return discount

    return with_term(cost, "affinity", discount_of)


def _credited(candidates: Candidates, size: RequestSize, affinity: Affinity) -> Candidates:
    """Returns the candidates as if the session's worker held more of the prompt."""
    at = affinity.position
    lacking = size.isl_tokens / size.block_size - candidates.overlap[at]
    device = candidates.overlap_device.copy()
    device[at] += affinity.fraction * max(lacking, 0.0)
    routed = candidates.routed_tokens.copy()
    routed[at] = routed.min()
    return replace(candidates, overlap_device=device, routed_tokens=routed)


def _is_overloaded(candidates: Candidates, size: RequestSize, affinity: Affinity) -> bool:
    queue_s = candidates.prefill_s[affinity.position]
    saved_s = affinity.fraction * predicted_prefill_s(candidates, size)[affinity.position]
    shortest_s = candidates.prefill_s.min()
    most_s = math.inf if affinity.max_queue_s is None else affinity.max_queue_s
    return bool(queue_s > most_s or queue_s - shortest_s > saved_s)
