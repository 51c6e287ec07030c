"""What failures cost, slowness and ignorance: a worker that refuses at once, does not get on, or is
not heard of has no load, and must not look cheap for it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from app.core.failures import Counts, Failure
from app.policy.cost import (
    AWAY_TERM,
    FAILED_TERM,
    LATE_TERM,
    Candidates,
    CostFunction,
    Costs,
    Floats,
    RequestSize,
)
from app.policy.view import View

Mask = NDArray[np.bool_]

AVOIDED = 0.5
"""A worker that failed this share of its tries lately is compared only where no other has room."""


def counts_for(failure: Failure, is_answered: bool, num_failed: int) -> Counts | None:
    """For whom a failure counts; None: for nobody. What follows a request from worker to worker is
    the request's own.

    is_answered: whether another worker has answered the request then. num_failed: of workers.
    """
    if failure.counts is not Counts.WITNESSED:
        return failure.counts
    if is_answered:
        return Counts.ALL
    if failure.weight == 0.0:
        return Counts.CALLER
    return Counts.WITNESSED if num_failed == 1 else None


def avoiding(cost: CostFunction, failed_shares: Floats) -> CostFunction:
    """`cost` with a term for failures, in the policy's own terms: the share of its tries that a
    worker failed lately, times twice what lies between the cheapest and the dearest worker.

    So one that failed half of them is never cheaper than the dearest; and where all others cost the
    same, one that failed any is not taken.
    """

    def priced(candidates: Candidates, size: RequestSize) -> Costs:
        plain = cost(candidates, size)
        term: Floats = failed_shares * _twice_the_spread(plain)
        return Costs(plain.cost + term, plain.terms | {FAILED_TERM: term})

    return priced


def late(cost: CostFunction, late_s: Floats, *, in_seconds: bool) -> CostFunction:
    """`cost` with a term for the late: so many seconds more. in_seconds: whether the policy counts
    in them; else a worker that is late by a second costs as much more as lies between the cheapest
    and the dearest, and at most twice that."""

    def priced(candidates: Candidates, size: RequestSize) -> Costs:
        plain = cost(candidates, size)
        term = late_s if in_seconds else late_s / (late_s + 1.0) * _twice_the_spread(plain)
        return Costs(plain.cost + term, plain.terms | {LATE_TERM: term})

    return priced


def unheard(cost: CostFunction, away: Mask) -> CostFunction:
    """`cost` with a term for the away: half of what lies between the cheapest and the dearest, for
    those whose agents are away, (workers,). Their load and their blocks are guessed at; so where
    all others cost the same, none of them is taken."""

    def priced(candidates: Candidates, size: RequestSize) -> Costs:
        plain = cost(candidates, size)
        term = np.where(away, _twice_the_spread(plain) / 4.0, 0.0)
        return Costs(plain.cost + term, plain.terms | {AWAY_TERM: term})

    return priced


def _twice_the_spread(costs: Costs) -> float:
    finite = costs.cost[np.isfinite(costs.cost)]
    spread = float(finite.max() - finite.min()) if finite.size else 0.0
    return 2.0 * spread + 1e-6


def avoided(view: View, names: Iterable[str]) -> Mask | None:
    """Which workers are to be compared only where no other has room, (workers,); None: there is
    none. They fail most of their tries, have the one request of their trial, or are left alone for
    what the request is for, or by who sent it.

    names: of marks that are heeded.
    """
    shares = view.failed_shares
    failing = None if shares is None else shares >= AVOIDED
    masks = [one for one in (failing, view.tried(), view.left_alone(names)) if one is not None]
    avoid: Mask | None = np.logical_or.reduce(masks) if masks else None
    return avoid


def without_avoided(eligible: Mask, room: Mask, avoid: Mask, roles: Iterable[Mask] = ()) -> Mask:
    """Those of `eligible` that are not to be avoided, unless no such one has room; (workers,) each.

    roles: sets of workers of each of which the same is true, instead of all.
    """
    well = eligible & ~avoid
    allowed = well
    for some in roles or (np.ones_like(eligible),):
        if not (well & room & some).any():
            allowed = allowed | (eligible & some)
    return allowed
