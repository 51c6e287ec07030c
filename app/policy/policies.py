"""Policies by name, and the cost functions of those but `latency`, most after other routers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from app.policy.cost import Candidates, CostFunction, Costs, Floats, RequestSize, added_up, latency

Indices = NDArray[np.intp]
HOST_CREDIT = 0.75
DISK_CREDIT = 0.25


def balance(candidates: Candidates, size: RequestSize) -> Costs:
    """alpha * load deviation + (1 - alpha) * new tokens / isl + 0.1 * slots in use / slots.

    After `select_worker` in NVIDIA Dynamo 0.1, lib/llm/src/kv_router/scheduler.rs. A load is the
    fraction of KV blocks in use; its deviation is from the mean over all workers. alpha is 0.7
    where the loads' sample standard deviation exceeds a tenth of their mean, else 0.3. (The
    original takes that mean over block counts; fractions make the units agree.) Only device overlap
    saves new tokens. A worker that reports all slots or blocks in use is ruled out; one that
    reports no total counts as empty.
    """
    load = _fraction(candidates.kv_active_blocks, candidates.kv_total_blocks)
    slots = _fraction(candidates.request_active_slots, candidates.request_total_slots)
    mean = load.mean()
    deviation = load - mean
    # Squared and multiplied out, so that a single worker compares 0 > 0.
    imbalanced = deviation @ deviation > (0.1 * mean) ** 2 * (load.size - 1)
    alpha = 0.7 if imbalanced else 0.3
    new_tokens = size.isl_tokens - candidates.overlap_device * size.block_size
    terms: dict[str, Floats] = {
        "load_deviation": alpha * deviation,
        "new_tokens": (1.0 - alpha) / size.isl_tokens * new_tokens,
        "slots": 0.1 * slots,
        "full": np.where((load >= 1.0) | (slots >= 1.0), np.inf, 0.0),
    }
    return Costs(added_up(terms), terms)


def _fraction(used: Floats, total: Floats) -> Floats:
    return np.divide(used, total, out=np.zeros_like(used), where=total > 0)


def logit(candidates: Candidates, size: RequestSize) -> Costs:
    """The negated logit: -2 * overlap fraction + cache usage + waiting / most waiting anywhere.

    After `_cost_function` in NVIDIA Dynamo's examples/llm/components/kv_router.py. Blocks of
    every tier count as overlap: the original's events named no tier. If all logits are zero the
    original expresses no preference; here all workers then tie, and any of them is chosen.
    """
    terms: dict[str, Floats] = {
        "overlap": -2.0 * size.block_size / size.isl_tokens * candidates.overlap,
        "cache_usage": candidates.gpu_cache_usage,
        "waiting": candidates.num_requests_waiting / (candidates.num_requests_waiting.max() or 1.0),
    }
    return Costs(terms["overlap"] + terms["cache_usage"] + terms["waiting"], terms)


def blocks(candidates: Candidates, size: RequestSize, *, prefill_weight: float = 1.0) -> Costs:
    """Blocks still to prefill, less a credit for cached ones, plus blocks in flight.

    After `DefaultWorkerSelector` in NVIDIA Dynamo, lib/kv-router/src/scheduling, with its default
    credits; prefill_weight is its prefill_load_scale. Dynamo counts distinct blocks of the active
    requests, and so does the simulation. A router adds up the blocks of each request, which is too
    high by at most what requests share.
    """
    credit = (
        candidates.overlap_device
        + HOST_CREDIT * candidates.overlap_host
        + DISK_CREDIT * candidates.overlap_disk
    )
    prefill = (candidates.prefill_tokens + size.isl_tokens) / size.block_size - credit
    prefill = prefill_weight * np.maximum(prefill, 0.0)
    decode = candidates.active_blocks + size.isl_blocks
    return Costs(prefill + decode, {"prefill_blocks": prefill, "decode_blocks": decode})


def least_loaded(candidates: Candidates, _: RequestSize) -> Costs:
    """Fewest requests in flight; among equals, fewest blocks in flight."""
    # Below 1, so that it only ever decides between equal numbers of requests.
    fraction = candidates.active_blocks / (candidates.active_blocks.max() + 1.0)
    return Costs(
        candidates.active_requests + fraction,
        {"active_requests": candidates.active_requests, "active_blocks_fraction": fraction},
    )


def no_preference(candidates: Candidates, _: RequestSize) -> Costs:
    """Zero for every worker."""
    return Costs(np.zeros_like(candidates.active_requests), {})


def one_after_another(workers: Indices, nth: int, _: Generator) -> Indices:
    return workers[[nth % workers.size]]


def two_at_random(workers: Indices, _: int, rng: Generator) -> Indices:
    """Returns two different workers, every pair equally likely; fewer if there are fewer."""
    if workers.size <= 2:
        return workers
    first = rng.integers(workers.size)
    step = rng.integers(1, workers.size)
    return workers[[first, (first + step) % workers.size]]


@dataclass(frozen=True, slots=True)
class Policy:
    """How workers are compared.

    narrow: returns which of the workers with room are compared, from their indices, the number of
    the decision and a random generator; None: all. reads_reports: whether the cost depends on the
    load that workers report, which changes within a moment.
    """

    cost: CostFunction
    narrow: Callable[[Indices, int, Generator], Indices] | None = None
    reads_reports: bool = False


POLICIES: Mapping[str, Policy] = {
    "latency": Policy(latency),
    "blocks": Policy(blocks),
    "balance": Policy(balance, reads_reports=True),
    "logit": Policy(logit, reads_reports=True),
    "least_loaded": Policy(least_loaded),
    "power_of_two": Policy(least_loaded, two_at_random),
    "round_robin": Policy(no_preference, one_after_another),
    "random": Policy(no_preference),
}
