"""Session affinity: a worker that a session went to before is a little cheaper to it.

What workers publish of their caches is exact, so most of what a session has somewhere is priced
already. The rest is what routers cannot see: blocks still being computed, tiers that an engine does
not report, caches of other kinds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from app.policy.cost import Candidates, CostFunction, Costs, RequestSize, predicted_prefill_s


@dataclass(frozen=True, slots=True)
class Affinity:
    """position: the worker that a session last went to, by its place in the candidates.

    fraction: 0-1; so much of what the worker lacks of the prompt is taken to be there all the same.
    max_queue_s: with a longer queue of prefills it is no cheaper than it was.
    """

    position: int
    fraction: float
    max_queue_s: float = math.inf


def discounted(cost: CostFunction, affinity: Affinity) -> CostFunction:
    """`cost` with a term `affinity`, which is never above 0: what the policy itself would save.

    So it is in the policy's own terms, nothing where a policy does not look at the cache, and never
    more than `fraction` of the prefill. A worker whose queue is longer than the shortest by as much
    time as the prefill would save gets nothing, whatever the policy makes of queues.
    """

    def discounted_cost(candidates: Candidates, size: RequestSize) -> Costs:
        plain = cost(candidates, size)
        discount = np.zeros_like(plain.cost)
        at = affinity.position
        if not _is_overloaded(candidates, size, affinity) and math.isfinite(plain.cost[at]):
            credited = cost(_credited(candidates, size, affinity), size)
            discount[at] = min(credited.cost[at] - plain.cost[at], 0.0)
        return Costs(plain.cost + discount, plain.terms | {"affinity": discount})

    return discounted_cost


def _credited(candidates: Candidates, size: RequestSize, affinity: Affinity) -> Candidates:
    """As if the worker held more of the prompt."""
    at = affinity.position
    held = sum(
        overlap[at]
        for overlap in (
            candidates.overlap_device,
            candidates.overlap_host,
            candidates.overlap_disk,
        )
    )
    device = candidates.overlap_device.copy()
    device[at] += affinity.fraction * max(size.isl_tokens / size.block_size - held, 0.0)
    return replace(candidates, overlap_device=device)


def _is_overloaded(candidates: Candidates, size: RequestSize, affinity: Affinity) -> bool:
    queue_s = candidates.prefill_s[affinity.position]
    saved_s = affinity.fraction * predicted_prefill_s(candidates, size)[affinity.position]
    shortest_s = candidates.prefill_s.min()
    return bool(queue_s > affinity.max_queue_s or queue_s - shortest_s > saved_s)
