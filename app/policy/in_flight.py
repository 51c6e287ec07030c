"""What is on its way of a prompt: a worker computes it for a request in flight.

An engine finds in its cache what requests before computed, once that has been done. So a worker
that is to compute a prefix counts as one that holds it, for those behind it; but all that come
until then wait for that one worker, while others could compute the prefix, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from app.policy.cost import (
    Candidates,
    CostFunction,
    Costs,
    Floats,
    RequestSize,
    predicted_prefill_s,
)

IN_FLIGHT_TOKENS = 4096
"""What a worker lacks of a prompt counts as on its way if it is so many tokens: less is computed
before others have heard of it."""
COMPUTED_WAIT = 1.5
"""Of the queue, which counts once for itself. With 1, crowds wait where they could compute; with 2,
those that begin alike are computed everywhere (see experiments.md)."""
WEIGHT = 2.0
"""Of what a prompt takes, for itself and for those behind it."""
COMPUTING = "computing_s"
"""The term."""


def awaiting(cost: CostFunction, places: Sequence[int], published: Floats) -> CostFunction:
    """`cost`, in seconds, and what the workers at `places` have to compute before, where they do
    not fetch it: the price of that has its own wait. At most what it saves to wait.

    published: leading blocks that each has on its device by now, (workers,).
    """

    def priced(candidates: Candidates, size: RequestSize) -> Costs:
        costs = cost(candidates, size)
        alone = replace(candidates, overlap_device=published)
        saved = WEIGHT * (predicted_prefill_s(alone, size) - costs.terms["prefill_s"])
        wait = np.zeros_like(saved)
        for place in places:
            if not candidates.receiving_s[place]:
                wait[place] = min(COMPUTED_WAIT * candidates.prefill_s[place], saved[place])
        return Costs(costs.cost + wait, costs.terms | {COMPUTING: wait})

    return priced
