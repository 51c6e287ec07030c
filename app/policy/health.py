"""Prices of failures, slowness and ignorance. A worker that refuses at once, is stuck or is not
heard of has no load, and must not look cheap for it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from app.core.failures import Counts, Failure
from app.policy.cost import (
    AWAY_TERM,
    FAILED_TERM,
    LATE_TERM,
    CostFunction,
    Costs,
    Floats,
    with_term,
)
from app.policy.pairing import Mask
from app.policy.view import View

AVOIDED = 0.5
"""A worker that failed this share of its tries lately is compared only where no other has room."""


def counts_for(failure: Failure, is_answered: bool, num_failed: int) -> Counts | None:
    """Returns for whom a failure counts; None: for nobody. A failure that follows a request from
    worker to worker is the request's own.

    is_answered: whether another worker then answered the request. num_failed: workers that failed
    it.
    """
    if failure.counts is not Counts.WITNESSED:
        return failure.counts
    if is_answered:
        return Counts.ALL
    if failure.weight == 0.0:
        return Counts.CALLER
    return Counts.WITNESSED if num_failed == 1 else None


def avoiding(cost: CostFunction, failed_shares: Floats) -> CostFunction:
    """Returns `cost` with a term for failures: the share of its tries that a worker failed lately,
    times twice what lies between the cheapest and the dearest worker.

    A worker that failed half of its tries is thus never cheaper than the dearest; and where all
    others cost the same, one that failed any is not taken.
    """

    return with_term(cost, FAILED_TERM, lambda *of: failed_shares * _twice_the_spread(of[-1]))


def late(cost: CostFunction, late_s: Floats, *, in_seconds: bool) -> CostFunction:
    """Returns `cost` with a term for late engines: so many seconds more.

    in_seconds: whether the policy counts in seconds; else a worker that is late by a second costs
    as much more as lies between the cheapest and the dearest, and at most twice that.
    """

    if in_seconds:
        return with_term(cost, LATE_TERM, lambda *_: late_s)
    share = late_s / (late_s + 1.0)
    return with_term(cost, LATE_TERM, lambda *of: share * _twice_the_spread(of[-1]))


def unheard(cost: CostFunction, away: Mask) -> CostFunction:
    """Returns `cost` with a term for workers whose agents are away, (workers,): half of what lies
    between the cheapest and the dearest, as their load and blocks are guessed at."""

    return with_term(
        cost, AWAY_TERM, lambda *of: np.where(away, _twice_the_spread(of[-1]) / 4, 0.0)
    )


def _twice_the_spread(costs: Costs) -> float:
    finite = costs.cost[np.isfinite(costs.cost)]
    spread = float(finite.max() - finite.min()) if finite.size else 0.0
    return 2.0 * spread + 1e-6


def avoided(view: View, names: Iterable[str]) -> Mask | None:
    """Returns which workers to compare only where no other has room, (workers,); None: none. They
    fail most of their tries, have the one request of their trial, or are left alone for one of the
    marks `names`."""
    shares = view.failed_shares
    failing = None if shares is None else shares >= AVOIDED
    masks = [one for one in (failing, view.tried(), view.left_alone(names)) if one is not None]
    avoid: Mask | None = np.logical_or.reduce(masks) if masks else None
    return avoid


def without_avoided(eligible: Mask, room: Mask, avoid: Mask, roles: Iterable[Mask] = ()) -> Mask:
    """Returns the `eligible` without those to avoid, unless none of the others has room.

    All masks are (workers,). roles: sets of workers of which each must keep one with room, instead
    of all workers together.
    """
    well = eligible & ~avoid
    allowed = well
    for some in roles or (np.ones_like(eligible),):
        if not (well & room & some).any():
            allowed = allowed | (eligible & some)
    return allowed
