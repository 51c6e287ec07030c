"""The results of replays of one trace under several policies: figures, table, JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
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
    """Outcomes in order of arrival. Times are engine seconds (wall x speedup) from the start of the
    replay, except decision_s, in wall seconds: workers run faster than real time, routers do
    not."""
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
    warmup_requests: int
    hit_rate: float | None
    """Cached tokens over prompt tokens, 0-1."""
    ttft_mean_s: float | None
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    ttft_p99_s: float | None
    request_mean_s: float | None
    requests_per_worker: dict[str, int]
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
"""Share of the mean TTFT by which the client may be late. Past it, figures reflect the machine."""
LATE_TEXT = "The client itself was late ({}): this machine is too busy for these figures to count."
FAILED_TEXT = "Requests failed ({}): times and tokens from cache are those of the others only."


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
