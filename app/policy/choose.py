"""The choice of one worker by cost: full ones are dropped, the rest compared or sampled."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from app.core.errors import AllWorkersBusy, NoWorkers, PromptTooLarge
from app.policy.cost import Candidates, CostFunction, Costs, Floats, RequestSize, least
from app.policy.policies import POLICIES, Indices, Policy


@dataclass(slots=True)
class Choice:
    """The chosen worker's index in the candidates, the costs of all candidates, and whether several
    shared the lowest cost of those that could be chosen."""

    index: int
    costs: Costs
    tied: bool


def choose(
    policy: str,
    candidates: Candidates,
    size: RequestSize,
    *,
    eligible: NDArray[np.bool_],
    rng: Generator,
    nth: int = 0,
    temperature: float = 0.0,
    cost: CostFunction | None = None,
    max_queue_s: float = math.inf,
) -> Choice:
    """Returns the worker that `policy`, a key of POLICIES, prefers among the eligible.

    eligible: (workers,); which of them the caller allows. Full workers, and those with fewer blocks
    than the prompt, are dropped here.
    nth: which decision this is, for policies that go round the workers.
    temperature: 0 takes the lowest cost, ties broken at random; above 0 samples from the softmax of
    -cost / temperature, where cost is scaled to 0-1 over the workers that can be chosen.
    cost: used instead of the policy's own.
    max_queue_s: at least one worker with room must have a queue of prefills no longer than this;
    the policy may then choose any worker with room.
    Raises NoWorkers if none is eligible, PromptTooLarge if no eligible one has enough blocks,
    AllWorkersBusy if all that have enough are full or no queue is short enough.
    """
    num_eligible = int(np.count_nonzero(eligible))
    if num_eligible == 0:
        raise _nobody(eligible.size)
    pool = candidates.kv_total_blocks
    if least(pool) < size.least_blocks:
        eligible = _large_enough(pool, size, eligible)
        num_eligible = int(np.count_nonzero(eligible))
    rules = POLICIES[policy]
    costs = (cost or rules.cost)(candidates, size)
    able = eligible & (candidates.active_requests < candidates.max_requests)
    compared = np.where(able, costs.cost, np.inf)
    at = int(compared.argmin())
    if compared[at] == np.inf or (
        max_queue_s < math.inf and candidates.prefill_s[compared < np.inf].min() > max_queue_s
    ):
        raise _busy(num_eligible, max_queue_s, float(candidates.prefill_s[eligible].min()))
    if rules.narrow is not None or temperature > 0.0:
        return _of_some(rules, costs, (compared < np.inf).nonzero()[0], rng, nth, temperature)
    (lowest,) = (compared == compared[at]).nonzero()
    tied = lowest.size > 1
    return Choice(int(lowest[rng.integers(lowest.size)]) if tied else at, costs, tied)


def _nobody(num_live: int) -> NoWorkers:
    excluded = f"the request excludes all live workers ({num_live})"
    return NoWorkers(excluded if num_live else "no worker is alive")


def _busy(num_eligible: int, max_queue_s: float, retry_after_s: float) -> AllWorkersBusy:
    queued = f" or have over {max_queue_s:g} s of prefills queued"
    past = "" if math.isinf(max_queue_s) else queued
    return AllWorkersBusy(
        f"all eligible workers ({num_eligible}) are full{past}", retry_after_s=retry_after_s
    )


def has_room(candidates: Candidates, size: RequestSize) -> NDArray[np.bool_]:
    """Returns which workers can take the request, as far as they report, (workers,)."""
    room: NDArray[np.bool_] = candidates.active_requests < candidates.max_requests
    pool = candidates.kv_total_blocks
    return room if least(pool) >= size.least_blocks else room & _is_large_enough(pool, size)


def _is_large_enough(pool: Floats, size: RequestSize) -> NDArray[np.bool_]:
    return (pool >= size.least_blocks) | (pool <= 0.0)


def _of_some(
    rules: Policy, costs: Costs, workers: Indices, rng: Generator, nth: int, temperature: float
) -> Choice:
    if rules.narrow is not None:
        workers = rules.narrow(workers, nth, rng)
    compared = costs.cost[workers]
    (lowest,) = (compared == compared[compared.argmin()]).nonzero()
    if temperature > 0.0:
        place = _sample(compared, temperature, rng)
    else:
        place = int(lowest[rng.integers(lowest.size)]) if lowest.size > 1 else int(lowest[0])
    return Choice(int(workers[place]), costs, lowest.size > 1)


def _large_enough(
    pool: Floats, size: RequestSize, eligible: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    large_enough = eligible & _is_large_enough(pool, size)
    if not large_enough.any():
        raise PromptTooLarge(
            f"a prompt of {size.part_tokens or size.isl_tokens:,} tokens fills "
            f"{size.least_blocks:,} blocks; no eligible worker has more than "
            f"{int(pool[eligible].max()):,}"
        )
    return large_enough


def _sample(cost: Floats, temperature: float, rng: Generator) -> int:
    """Returns an index drawn from the softmax of the negated, min-max normalised cost."""
    above_lowest = cost - cost.min()
    # If all costs are equal, these are all zeros, which any divisor leaves alone.
    weights = np.exp(above_lowest / ((above_lowest.max() or 1.0) * -temperature))
    cumulative = weights.cumsum()
    # random() is below 1, but the product may round up to the total.
    place = int(cumulative.searchsorted(rng.random() * cumulative[-1], side="right"))
    return min(place, cost.size - 1)
