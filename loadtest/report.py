"""The results of replays of one trace under several policies: figures, table, JSON, picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from app.options import naming_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Group

    # Only for types: benchmarks must not load anything heavy into the servers they measure.
    from loadtest.client import Outcome


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """One replay of a trace under one policy."""

    policy: str
    trace: str
    speedup: float
    load: float
    """Arrival rate, as a multiple of the recorded one."""
    warmup: float
    """Share of the requests, the first ones, that the figures leave out: caches start empty."""
    outcomes: tuple[Outcome, ...]
    """In order of arrival. Times are engine seconds (wall x speedup) from the start of the replay,
    except decision_s, in wall seconds: workers run faster than real time, routers do not."""
    workers: tuple[str, ...] = ()
    """Names of the workers that were live at the start."""
    held_back: int = 0
    """Requests that waited for a slot of the client."""
    lost_calls: int = 0
    """Confirmations and releases that no router accepted."""

    @property
    def measured(self) -> tuple[Outcome, ...]:
        return self.outcomes[int(len(self.outcomes) * self.warmup) :]


@dataclass(frozen=True, slots=True)
class PolicySummary:
    """Figures of the measured requests. A figure over no request at all is None.

    Seconds are engine seconds, from when a request was due; milliseconds are wall time.
    """

    requests: int
    failed: int
    failures: dict[str, int]
    """By kind of failure."""
    warmup_requests: int
    hit_rate: float | None
    """Cached tokens over prompt tokens, 0-1."""
    ttft_mean_s: float | None
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    ttft_p99_s: float | None
    request_mean_s: float | None
    requests_per_worker: dict[str, int]
    """By name, including workers that got none."""
    balance: float | None
    """Requests of the busiest worker over the mean of all; 1 is even."""
    decision_p50_ms: float | None
    decision_p99_ms: float | None
    degraded: int
    """Placed without the cache index, from last known loads."""
    retried: int
    """Requests that needed more than one attempt."""
    send_delay_p99_s: float | None
    """How late the client itself was. Unless it is near zero, the client was the bottleneck."""
    held_back: int
    lost_calls: int


RATIO_METRICS = (
    "hit_rate",
    "ttft_mean_s",
    "ttft_p50_s",
    "ttft_p90_s",
    "ttft_p99_s",
    "request_mean_s",
    "balance",
    "decision_p50_ms",
    "decision_p99_ms",
)

ROWS = (
    ("requests measured", "requests", "{:,}"),
    ("failed", "failed", "{:,}"),
    ("tokens from cache", "hit_rate", "{:.1%}"),
    ("TTFT mean", "ttft_mean_s", "{:.2f} s"),
    ("TTFT p50", "ttft_p50_s", "{:.2f} s"),
    ("TTFT p90", "ttft_p90_s", "{:.2f} s"),
    ("TTFT p99", "ttft_p99_s", "{:.2f} s"),
    ("whole request, mean", "request_mean_s", "{:.2f} s"),
    ("busiest worker / mean", "balance", "{:.2f}"),
    ("decision p50 (wall)", "decision_p50_ms", "{:.1f} ms"),
    ("decision p99 (wall)", "decision_p99_ms", "{:.1f} ms"),
    ("degraded decisions", "degraded", "{:,}"),
    ("retried", "retried", "{:,}"),
    ("client late, p99", "send_delay_p99_s", "{:.2f} s"),
)

LATE_SHARE = 0.25
"""Of the mean TTFT, which includes the client's own delay. Past it, figures reflect the machine."""
LATE_TEXT = "The client itself was late ({}): this machine is too busy for these figures to count."
FAILED_TEXT = "Requests failed ({}): times and tokens from cache are those of the others only."

# Okabe and Ito's palette, which colour-blind readers can tell apart.
COLOURS = ("#E69F00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8C8C8C")
INK = "#222222"
GREY = "#666666"
FAINT = "#D9D9D9"


def summarise(run: PolicyRun) -> PolicySummary:
    measured = run.measured
    answered = [o for o in measured if o.failure is None]
    ttft = ttft_s(run)
    decisions = [o.decision_s * 1000 for o in measured if o.decision_s is not None]
    prompt_tokens = sum(o.prompt_tokens for o in answered)
    cached_tokens = sum(o.cached_tokens for o in answered)
    per_worker = requests_per_worker(run)
    mean_per_worker = _mean(list(per_worker.values()))
    return PolicySummary(
        requests=len(measured),
        failed=len(measured) - len(answered),
        failures=dict(Counter(str(o.failure) for o in measured if o.failure is not None)),
        warmup_requests=len(run.outcomes) - len(measured),
        hit_rate=cached_tokens / prompt_tokens if prompt_tokens else None,
        ttft_mean_s=_mean(ttft),
        ttft_p50_s=_percentile(ttft, 50),
        ttft_p90_s=_percentile(ttft, 90),
        ttft_p99_s=_percentile(ttft, 99),
        request_mean_s=_mean([o.end_s - o.arrival_s for o in answered if o.end_s is not None]),
        requests_per_worker=per_worker,
        balance=max(per_worker.values()) / mean_per_worker if mean_per_worker else None,
        decision_p50_ms=_percentile(decisions, 50),
        decision_p99_ms=_percentile(decisions, 99),
        degraded=sum(o.degraded for o in measured),
        retried=sum(o.attempts > 1 for o in measured),
        send_delay_p99_s=_percentile([o.sent_s - o.arrival_s for o in measured], 99),
        held_back=run.held_back,
        lost_calls=run.lost_calls,
    )


def ttft_s(run: PolicyRun) -> list[float]:
    """Time to first token of each measured request that was answered."""
    return [o.first_token_s - o.arrival_s for o in run.measured if o.first_token_s is not None]


def requests_per_worker(run: PolicyRun) -> dict[str, int]:
    """Measured requests of each worker that was live at the start or was chosen later."""
    counts = Counter(o.worker for o in run.measured)
    names = {*run.workers, *(o.worker for o in run.outcomes if o.worker is not None)}
    return {name: counts[name] for name in sorted(names)}


def ratio(first: PolicySummary, last: PolicySummary) -> dict[str, float | None]:
    """`first / last` for each of RATIO_METRICS; None if either is missing or last is 0."""

    def one(metric: str) -> float | None:
        a, b = getattr(first, metric), getattr(last, metric)
        return a / b if a is not None and b else None

    return {metric: one(metric) for metric in RATIO_METRICS}


def as_json(runs: Sequence[PolicyRun]) -> dict[str, Any]:
    """The whole report except the individual requests, as plain JSON values.

    runs: at least one, all of the same trace. `ratio` is the first policy's figures over the
    last one's; it is empty for a single policy.
    """
    summaries = {run.policy: summarise(run) for run in runs}
    first, last = summaries[runs[0].policy], summaries[runs[-1].policy]
    return {
        "trace": runs[0].trace,
        "speedup": runs[0].speedup,
        "load": runs[0].load,
        "warmup": runs[0].warmup,
        "policies": {policy: asdict(summary) for policy, summary in summaries.items()},
        "ratio": ratio(first, last) if len(runs) > 1 else {},
    }


def table(runs: Sequence[PolicyRun]) -> Group:
    """One column per policy and, if there are several, one with the first over the last."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    summaries = [summarise(run) for run in runs]
    ratios: dict[str, float | None] = {}
    cells = Table(box=box.SIMPLE_HEAD)
    cells.add_column(no_wrap=True)
    for run in runs:
        cells.add_column(run.policy, justify="right")
    if len(runs) > 1:
        ratios = ratio(summaries[0], summaries[-1])
        cells.add_column(f"{runs[0].policy} / {runs[-1].policy}", justify="right", style="bold")
    for label, metric, form in ROWS:
        row = [_cell(getattr(summary, metric), form) for summary in summaries]
        if ratios:
            row.append(_cell(ratios.get(metric), "{:.2f}x"))
        cells.add_row(label, *row)
    late = [run.policy for run, s in zip(runs, summaries, strict=True) if _is_late(s)]
    failed = [run.policy for run, s in zip(runs, summaries, strict=True) if s.failed]
    warnings = [
        Text(text.format(", ".join(policies)), "red")
        for text, policies in ((LATE_TEXT, late), (FAILED_TEXT, failed))
        if policies
    ]
    return Group(Text(_title(runs[0]), "bold"), cells, Text(_caption(runs[0]), "dim"), *warnings)


def plot(runs: Sequence[PolicyRun], path: Path) -> None:
    """Writes a PNG: TTFT distribution, mean TTFT, hit rate and requests per worker by policy."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    summaries = [summarise(run) for run in runs]
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1, wspace=0.04, hspace=0.04)
    figure = Figure(figsize=(12, 7.2), layout=layout, facecolor="white")
    figure.suptitle(_title(runs[0]), x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    figure.supxlabel(_caption(runs[0]), x=0.01, ha="left", fontsize=9, color=GREY)
    grid = figure.add_gridspec(2, 12, height_ratios=(1.35, 1))
    plot_distribution(figure.add_subplot(grid[0, :7]), runs)
    _plot_bars(
        figure.add_subplot(grid[0, 7:]),
        runs,
        [s.ttft_mean_s for s in summaries],
        "Mean time to first token",
        "{:.2f} s",
    )
    _plot_workers(figure.add_subplot(grid[1, :7]), runs, summaries)
    _plot_bars(
        figure.add_subplot(grid[1, 7:]),
        runs,
        [s.hit_rate for s in summaries],
        "Prompt tokens found in the cache",
        "{:.1%}",
    )
    save_figure(figure, path)


def save_figure(figure: Figure, path: Path) -> None:
    with naming_file(path):
        figure.savefig(path, dpi=150, format="png")


def plot_distribution(axes: Axes, runs: Sequence[PolicyRun]) -> None:
    for run, colour in zip(runs, cycle(COLOURS), strict=False):
        times = np.sort(ttft_s(run))
        share = np.arange(1, times.size + 1) / len(run.measured)
        axes.plot(times, share, color=colour, linewidth=2, label=run.policy)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_ylim(0, 1.005)
    axes.grid(color=FAINT, linewidth=0.7)
    axes.set_xlabel("seconds, log scale", color=GREY)
    axes.legend(frameon=False, loc="lower right")
    style(axes, "Requests with their first token within ...")


def _plot_bars(
    axes: Axes, runs: Sequence[PolicyRun], values: Sequence[float | None], title: str, form: str
) -> None:
    bars = axes.barh(
        [run.policy for run in runs],
        [value or 0.0 for value in values],
        color=[COLOURS[i % len(COLOURS)] for i in range(len(runs))],
        height=0.6,
    )
    axes.bar_label(bars, [_cell(value, form) for value in values], padding=4, color=INK)
    axes.invert_yaxis()
    axes.margins(x=0.18)
    axes.xaxis.set_visible(False)
    axes.spines["bottom"].set_visible(False)
    style(axes, title)


def _plot_workers(
    axes: Axes, runs: Sequence[PolicyRun], summaries: Sequence[PolicySummary]
) -> None:
    workers = sorted({worker for s in summaries for worker in s.requests_per_worker})
    places = np.arange(len(workers))
    width = 0.8 / len(runs)
    for i, (run, summary) in enumerate(zip(runs, summaries, strict=True)):
        heights = [summary.requests_per_worker.get(worker, 0) for worker in workers]
        axes.bar(
            places + (i - (len(runs) - 1) / 2) * width,
            heights,
            width=width * 0.92,
            color=COLOURS[i % len(COLOURS)],
            label=run.policy,
        )
    axes.set_xticks(places, workers)
    axes.grid(axis="y", color=FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    style(axes, "Requests per worker")


def style(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.tick_params(which="both", colors=GREY, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)


def _title(run: PolicyRun) -> str:
    return f"{run.trace}: {len(run.outcomes):,} requests at {run.load:g}x the recorded rate"


def _is_late(summary: PolicySummary) -> bool:
    delay_s, ttft_s = summary.send_delay_p99_s, summary.ttft_mean_s
    return delay_s is not None and ttft_s is not None and delay_s > LATE_SHARE * ttft_s


def _caption(run: PolicyRun) -> str:
    skipped = len(run.outcomes) - len(run.measured)
    return (
        f"Without the first {skipped:,} requests (caches start empty). Seconds are the engine's: "
        f"wall time x {run.speedup:g}. TTFT counts from when a request was due."
    )


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _percentile(values: Sequence[float], percent: float) -> float | None:
    """Linear between neighbours, as numpy does by default."""
    return float(np.percentile(values, percent)) if values else None
