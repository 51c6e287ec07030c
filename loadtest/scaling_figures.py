"""What a rule for the size of a fleet made of a day: figures, table, picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
from rich import box
from rich.table import Table

from app.planner.rules.state import Proposal, Rules
from app.simulation.profiles import Profile
from loadtest import report
from loadtest.client import Outcome
from loadtest.day import Rates
from loadtest.scaling import PlayedTrace
from loadtest.slo import meets_slo

REVERSAL_S = 600.0
FEW = 20
"""Of fewer requests no share within the SLO is compared with what was predicted."""


@dataclass(frozen=True, slots=True)
class ScalingFigures:
    """What one policy made of the day."""

    policy: str
    victim: str
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


LEGEND = (
    "p99: TTFT. undone: changes that undo one of the last ten minutes. again: seconds of prefill "
    "that workers that had left would have spared. off by: points within the SLO, between what was "
    "predicted for one worker less and what then was; a median."
)
COLUMNS: tuple[tuple[str, Callable[[ScalingFigures], float | None], str], ...] = (
    ("in SLO", lambda f: f.within_slo, "{:.1%}"),
    ("worker h", lambda f: f.worker_hours, "{:.2f}"),
    ("p99, s", lambda f: f.ttft_p99_s, "{:.1f}"),
    ("changes", lambda f: f.changes, "{:.0f}"),
    ("undone", lambda f: f.reversals, "{:.0f}"),
    ("lost", lambda f: f.lost, "{:.0f}"),
    ("again, s", lambda f: f.recomputed_s, "{:.0f}"),
    ("off by", lambda f: _points(f.prediction_error), "{:.1f}"),
)


def _points(share: float | None) -> float | None:
    return None if share is None else 100 * share


def figures_of(
    policy: str, victim: str, played: PlayedTrace, profile: Profile, rules: Rules
) -> ScalingFigures:
    outcomes = played.outcomes
    good = [meets_slo(outcome, profile) for outcome in outcomes]
    ttfts = [o.first_token_s - o.arrival_s for o in outcomes if o.first_token_s is not None]
    changes = [p for p in played.proposals if p.desired != p.size]
    return ScalingFigures(
        policy=policy,
        victim=victim,
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


def table(title: str, figures: Sequence[ScalingFigures]) -> Table:
    cells = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    cells.add_column("policy", no_wrap=True)
    for label, _, _ in COLUMNS:
        cells.add_column(label, justify="right")
    for one in figures:
        values = [(of(one), form) for _, of, form in COLUMNS]
        cells.add_row(one.policy, *("-" if v is None else form.format(v) for v, form in values))
    return cells


def plot(figures: Sequence[ScalingFigures], rates: Rates, title: str, path: Path) -> None:
    """Writes a PNG: the day's arrival rate, and under it the size of the fleet by each policy."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7.2), layout="constrained", facecolor="white")
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=report.INK)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1, 3))
    above.plot(np.arange(rates.size) / 3600, rates, color=report.GREY, linewidth=1)
    report.style(above, "arrival rate, over its mean")
    for one, colour in zip(figures, report.COLOURS, strict=False):
        hours, sizes = np.array(one.sizes).T
        below.step(hours / 3600, sizes, where="post", color=colour, linewidth=1.5, label=one.policy)
    below.set_xlabel("hours", color=report.GREY)
    report.style(below, "workers, with those that start")
    below.legend(frameon=False)
    report.save_figure(figure, path)
