"""Figures of policies in virtual time, as a table and as a picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, groupby
from pathlib import Path

import numpy as np
from rich import box
from rich.table import Table

from loadtest import report
from loadtest.report import PolicySummary

Played = Mapping[str, Sequence["Figures"]]
"""By policy, or whatever else tells the rows apart: the figures of each seed."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One policy at one load, from one seed."""

    policy: str
    load: float
    seed: int
    summary: PolicySummary
    within_slo: float
    """Share of the measured requests with their first token within 2 s plus 1.5 times the prefill
    that the prompt would take alone and uncached, and at most 100 ms per further token."""
    goodput_per_s: float | None
    """Requests within the SLO per engine second; None for a single request."""
    token_s: float | None
    """Mean time per token after the first, over the requests that got more than that one."""
    token_p99_s: float | None
    split: float
    """Share of the answered requests, measured or not, whose prompt a source computed."""
    fetched: float
    """Share of those for which a prefix was fetched."""
    preemptions: int
    """Of all requests, measured or not, on all workers."""
    conflicts: int
    """Reservations refused because another replica's came first."""
    by_priority: dict[str, PolicySummary]
    """Of requests of each priority that the trace names, if they are several."""


ROWS: tuple[tuple[str, Callable[[Figures], float | None], str], ...] = (
    ("TTFT mean, s", lambda f: f.summary.ttft_mean_s, "{:.2f}"),
    ("TTFT p50, s", lambda f: f.summary.ttft_p50_s, "{:.2f}"),
    ("TTFT p90, s", lambda f: f.summary.ttft_p90_s, "{:.2f}"),
    ("TTFT p99, s", lambda f: f.summary.ttft_p99_s, "{:.2f}"),
    ("whole request, mean, s", lambda f: f.summary.request_mean_s, "{:.2f}"),
    ("time per further token, ms", lambda f: f.token_s and f.token_s * 1000, "{:.1f}"),
    ("the same, p99, ms", lambda f: f.token_p99_s and f.token_p99_s * 1000, "{:.1f}"),
    ("within SLO", lambda f: f.within_slo, "{:.1%}"),
    ("goodput, requests/s", lambda f: f.goodput_per_s, "{:.2f}"),
    ("tokens from cache", lambda f: f.summary.hit_rate, "{:.1%}"),
    ("split", lambda f: f.split, "{:.1%}"),
    ("fetched", lambda f: f.fetched, "{:.1%}"),
    ("busiest worker / mean", lambda f: f.summary.balance, "{:.2f}"),
    ("refused, all full", lambda f: float(f.summary.failed), "{:.0f}"),
    ("preemptions", lambda f: float(f.preemptions), "{:.0f}"),
    ("reservations refused", lambda f: float(f.conflicts), "{:.0f}"),
)
RELATIVE = frozenset({"TTFT mean, s", "TTFT p99, s", "whole request, mean, s"})
"""Rows whose figures are also given as multiples of the last policy's."""


def _mean(seeds: Sequence[Figures], of: Callable[[Figures], float | None]) -> float | None:
    values = [value for value in map(of, seeds) if value is not None]
    return float(np.mean(values)) if values else None


def table(title: str, played: Played) -> Table:
    """One column per policy, with means over seeds."""
    cells = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    cells.add_column(no_wrap=True)
    for policy in played:
        cells.add_column(policy, justify="right")
    for label, of, form in ROWS:
        values = [_mean(seeds, of) for seeds in played.values()]
        last = values[-1]
        row = ["-" if value is None else form.format(value) for value in values]
        if label in RELATIVE and len(values) > 1 and last:
            times = [value / last if value is not None else math.nan for value in values]
            row = [f"{cell} {ratio:5.2f}x" for cell, ratio in zip(row, times, strict=True)]
        cells.add_row(label, *row)
    for label, means in _by_priority(played):
        cells.add_row(label, *(f"{value:.2f}" for value in means))
    return cells


def _by_priority(played: Played) -> Iterator[tuple[str, list[float]]]:
    priorities = {one: None for seeds in played.values() for f in seeds for one in f.by_priority}
    for priority in priorities:
        for label, of, _ in ROWS:
            if label in RELATIVE:
                values = [
                    _mean([replace(f, summary=f.by_priority[priority]) for f in seeds], of)
                    for seeds in played.values()
                ]
                yield f"{priority}: {label}", [math.nan if v is None else v for v in values]


def plot(figures: Sequence[Figures], title: str, path: Path) -> None:
    """Writes a PNG: four figures plotted over the load, with a line for each policy."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7.2), layout="constrained", facecolor="white")
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=report.INK)
    shown = [row for row in ROWS if row[0] in RELATIVE or row[0] == "within SLO"]
    for axes, (label, of, _) in zip(figure.subplots(2, 2).flat, shown, strict=True):
        by_policy = groupby(sorted(figures, key=lambda f: f.policy), lambda f: f.policy)
        for (policy, its), colour in zip(by_policy, cycle(report.COLOURS), strict=False):
            at = {
                load: _mean(list(seeds), of)
                for load, seeds in groupby(sorted(its, key=lambda f: f.load), lambda f: f.load)
            }
            loads, values = list(at), [math.nan if v is None else v for v in at.values()]
            axes.plot(loads, values, color=colour, linewidth=2, marker="o", label=policy)
        if label in RELATIVE:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.grid(color=report.FAINT, linewidth=0.7)
        axes.set_xlabel("load, times the recorded rate", color=report.GREY)
        report.style(axes, label)
    figure.axes[0].legend(frameon=False)
    report.save_figure(figure, path)
