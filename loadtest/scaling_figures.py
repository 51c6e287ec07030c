"""What a rule for the size of a fleet made of a day: figures, and the columns that show them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from app.planner.rules.state import Proposal, Rules
from app.simulation.profiles import Profile
from loadtest.client import Outcome
from loadtest.scaling import PlayedTrace
from loadtest.slo import meets_slo

REVERSAL_S = 600.0
FEW = 20
"""Of fewer requests no share within the SLO is compared with what was predicted."""


@dataclass(frozen=True, slots=True)
class ScalingFigures:
    """What one policy made of the day."""

    requests: int
    within_slo: float
    worker_hours: float
    ttft_p99_s: float
    changes: int
    reversals: int
    """Changes of size, in number; those that undo one of the last ten minutes."""
    lost: int
    recomputed_s: float
    """Of prefill that workers which had left would have spared."""
    prediction_error: float | None
    """Median over the steps down: the share within the SLO that was predicted for one worker less,
    and the one that then was. None for policies that do not predict."""
    sizes: list[tuple[float, int]] = field(default_factory=list)
    """The size from each time on."""


COLUMNS = (
    ("within SLO", "within_slo", "{:.1%}"),
    ("worker hours", "worker_hours", "{:.2f}"),
    ("TTFT p99, s", "ttft_p99_s", "{:.1f}"),
    ("changes", "changes", "{:.0f}"),
    ("undone", "reversals", "{:.0f}"),
    ("lost", "lost", "{:.0f}"),
    ("again, s", "recomputed_s", "{:.0f}"),
    ("off by", "prediction_error", "{:.3f}"),
)


def figures_of(played: PlayedTrace, profile: Profile, rules: Rules) -> ScalingFigures:
    outcomes = played.outcomes
    good = [meets_slo(outcome, profile) for outcome in outcomes]
    ttfts = [o.first_token_s - o.arrival_s for o in outcomes if o.first_token_s is not None]
    changes = [p for p in played.proposals if p.desired != p.size]
    return ScalingFigures(
        requests=len(outcomes),
        within_slo=sum(good) / len(good),
        worker_hours=played.worker_s / 3600,
        ttft_p99_s=float(np.percentile(ttfts, 99)),
        changes=len(changes),
        reversals=sum(
            (a.desired > a.size) != (b.desired > b.size) and b.at_s - a.at_s <= REVERSAL_S
            for a, b in pairwise(changes)
        ),
        lost=sum(outcome.failure is not None for outcome in outcomes),
        recomputed_s=played.recomputed_s,
        prediction_error=_prediction_error(changes, outcomes, good, rules.window_s),
        sizes=[(p.at_s, p.desired) for p in played.proposals],
    )


def _prediction_error(
    changes: Sequence[Proposal], outcomes: Sequence[Outcome], good: Sequence[bool], window_s: float
) -> float | None:
    """What then was counts until the next change, and for no longer than what was predicted."""
    arrivals = [outcome.arrival_s for outcome in outcomes]
    errors = []
    ends_s = [change.at_s for change in changes[1:]] + [float("inf")]
    for change, end_s in zip(changes, ends_s, strict=False):
        predicted = [c.attainment for c in change.candidates if c.size == change.desired]
        if change.desired > change.size or not predicted:
            continue
        first, last = np.searchsorted(arrivals, [change.at_s, min(end_s, change.at_s + window_s)])
        if last - first >= FEW:
            errors.append(abs(predicted[0] - sum(good[first:last]) / int(last - first)))
    return float(np.median(errors)) if errors else None
