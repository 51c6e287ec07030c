"""Rules for the size of a fleet compared offline: a day's traffic in virtual time.

    python -m loadtest.autoscale --hours 4 --jobs 2
    python -m loadtest.autoscale --policy threshold:0.3 --policy slo:0.97
    python -m loadtest.autoscale --equal 0.95 --policy threshold --policy slo
    python -m loadtest.autoscale --policy curve:5 --victim newest --victim unique_value

The planner's policies are the real ones, as are those of the routers and the engine. The day is
made of a trace that is shorter: see loadtest/day.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from app.core.worker_report import Role
from app.options import FACTOR, POSITIVE, Number
from app.planner.rules.policies import POLICIES
from app.planner.rules.pools import POOL_POLICIES
from app.planner.rules.state import Proposal, Rules
from app.simulation.link import Link
from app.simulation.profiles import PROFILES, Profile
from app.simulation.setting import Setting
from loadtest import report
from loadtest.client import Outcome
from loadtest.command import (
    FILE,
    Command,
    distinct,
    jobs_option,
    json_option,
    read,
    save,
    trace_option,
)
from loadtest.day import Rates, curve, day_of
from loadtest.processes import forked
from loadtest.scaling import Coming, Played, Scaled, Scaling
from loadtest.setting_options import ROLES
from loadtest.slo import meets_slo
from loadtest.traces import Trace
from loadtest.victims import VICTIMS
from loadtest.virtual import Prompts, Simulation

ROUTING = "latency"
ORACLE = "oracle"
STATIC = "static"
CURVE = "curve"
FORMS = (*POLICIES, ORACLE, STATIC, CURVE)
LIMITS = {
    "threshold": (1.0, 0.02),
    "waiting": (1.0, 0.02),
    "ongoing": (20.0, 0.5),
    "slo": (0.7, 0.995),
    ORACLE: (0.7, 0.995),
    STATIC: (1.0, 16.0),
    CURVE: (1.0, 16.0),
}
"""Between which --equal looks for a policy's number, from the fewest workers to the most."""
HALVINGS = 6
REVERSAL_S = 600.0
FEW = 20
"""Of fewer requests no share within the SLO is compared with what was predicted."""


@dataclass(frozen=True, slots=True)
class ScalingVariant:
    """`threshold:X`, `waiting:X` and `ongoing:X` have X times the usual thresholds; `slo:X` and
    `oracle:X` keep the SLO for a share of X; `static:X` has X workers; `curve:X` has X on average,
    as many as the day's curve without its bursts says."""

    text: str

    @property
    def name(self) -> str:
        return self.text.partition(":")[0]

    @property
    def value(self) -> float | None:
        """Raises ValueError if it is not a number."""
        value = self.text.partition(":")[2]
        return float(value) if value else None

    def rules(self, rules: Rules) -> Rules:
        x = self.value
        if x is None:
            return rules
        if self.name in ("slo", ORACLE):
            return replace(rules, slo=replace(rules.slo, target=x))
        scaled = (
            *("prefill_queue_up", "prefill_queue_down", "kv_load_up", "kv_load_down"),
            "waiting_per_worker",
            "ongoing_per_worker",
        )
        return replace(rules, **{name: x * getattr(rules, name) for name in scaled})


@dataclass(frozen=True, slots=True)
class Scenario:
    """All but the policy and the choice of victims."""

    day: Trace
    hours: float
    setting: Setting
    rules: Rules
    startup_s: float
    prompts: Prompts


@dataclass(frozen=True, slots=True)
class Figures:
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
COLUMNS: tuple[tuple[str, Callable[[Figures], float | None], str], ...] = (
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


def play(scenario: Scenario, policy: ScalingVariant, victim: str) -> Figures:
    rules, setting = policy.rules(scenario.rules), scenario.setting
    if policy.name == STATIC:
        size = int(policy.value or 1)
        setting = replace(setting, num_workers=size)
        scaling = Scaling(STATIC, rules, victim, scenario.startup_s, sizes=lambda _: size)
    elif policy.name == CURVE:
        mean, shape = policy.value or 1.0, curve(round(3600 * scenario.hours), bursts=0.0, seed=0)

        def planned(at_s: float) -> int:
            return max(1, round(mean * float(shape[min(int(at_s), shape.size - 1)])))

        setting = replace(setting, num_workers=planned(0.0))
        scaling = Scaling(CURVE, rules, victim, scenario.startup_s, sizes=planned)
    elif policy.name == ORACLE:
        coming = _coming(scenario)
        scaling = Scaling("slo", rules, victim, scenario.startup_s, coming=coming)
    else:
        scaling = Scaling(policy.name, rules, victim, scenario.startup_s)
    end_s = 3600 * scenario.hours
    scaled = Scaled(scaling, setting, ROUTING, scenario.prompts, end_s)
    return figures_of(policy.text, victim, scaled.run(scenario.day), setting.profiles[0], rules)


def equal(scenario: Scenario, name: str, victim: str, share: float) -> Figures:
    """The policy with the number that keeps the SLO for `share` of the requests with the fewest
    worker hours; if none does, what came next to it."""
    few, many = LIMITS[name]
    best: Figures | None = None
    for _ in range(HALVINGS):
        x = (few + many) / 2
        x = round(x) if name == STATIC else float(f"{x:.3g}")
        found = play(scenario, ScalingVariant(f"{name}:{x}"), victim)
        if found.within_slo >= share:
            many = x
            if best is None or best.within_slo < share or found.worker_hours < best.worker_hours:
                best = found
        else:
            few = x
            if best is None or best.within_slo < found.within_slo < share:
                best = found
    assert best is not None
    return best


def _coming(scenario: Scenario) -> Coming:
    """What will be asked, and when: of sessions, when a fleet of the largest size answers them."""
    setting = replace(scenario.setting, num_workers=scenario.rules.max_workers)
    outcomes = Simulation(ROUTING, setting, scenario.prompts).run(scenario.day)
    turns = {str(turn.index): turn for session in scenario.day.sessions for turn in session.turns}
    return [(o.arrival_s, scenario.prompts.of(turns[o.request_id])) for o in outcomes]


def figures_of(policy: str, victim: str, played: Played, profile: Profile, rules: Rules) -> Figures:
    outcomes = played.outcomes
    good = [meets_slo(outcome, profile) for outcome in outcomes]
    ttfts = [o.first_token_s - o.arrival_s for o in outcomes if o.first_token_s is not None]
    changes = [p for p in played.proposals if p.desired != p.size]
    return Figures(
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


def table(title: str, figures: Sequence[Figures]) -> Table:
    cells = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    cells.add_column("policy", no_wrap=True)
    for label, _, _ in COLUMNS:
        cells.add_column(label, justify="right")
    for one in figures:
        values = [(of(one), form) for _, of, form in COLUMNS]
        cells.add_row(one.policy, *("-" if v is None else form.format(v) for v, form in values))
    return cells


def plot(figures: Sequence[Figures], rates: Rates, title: str, path: Path) -> None:
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


# What a worker process plays. Inherited, because sending a trace takes long.
_scenario: Scenario
_share: float | None = None


def _play(policy: str, victim: str) -> Figures:
    return play(_scenario, ScalingVariant(policy), victim)


def _equal(policy: str, victim: str) -> Figures:
    assert _share is not None
    return equal(_scenario, ScalingVariant(policy).name, victim, _share)


def _check_roles(policies: Sequence[str]) -> None:
    known = (*POOL_POLICIES, ORACLE, STATIC)
    for policy in policies:
        if ScalingVariant(policy).name not in known:
            raise click.UsageError(f"--roles: {policy} knows none; use {', '.join(known)}")


class _PolicyName(click.ParamType[str]):
    name = "policy"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            policy = ScalingVariant(value)
            x = policy.value
            if policy.name not in FORMS or (x is not None and not 0 < x < 1e6):
                raise ValueError
            if policy.name in (STATIC, CURVE) and x is None:
                raise ValueError
            if policy.name == STATIC and x is not None and x != int(x):
                raise ValueError
        except ValueError:
            self.fail(f"{value!r} is none of {', '.join(FORMS)}, or has a bad number", param, ctx)
        return str(value)


@click.command(cls=Command)
@trace_option
@click.option(
    "--policy",
    "policies",
    multiple=True,
    default=("static:4", "static:6", "static:8", "threshold", "waiting", "slo", "oracle"),
    show_default=True,
    callback=distinct,
    type=_PolicyName(),
    help="Rule for the size; may be given several times. threshold:X, waiting:X and ongoing:X have "
    "X times the usual thresholds, slo:X and oracle:X aim at a share of X within the SLO, static:X "
    "has X workers, curve:X that many on average. oracle is slo, shown what will be asked instead "
    "of what was.",
)
@click.option(
    "--equal",
    "share",
    type=Number(0.5, 0.999),
    help="Instead of the numbers given, look for those of each policy that keep the SLO for this "
    "share of the requests.",
)
@click.option(
    "--victim",
    "victims",
    multiple=True,
    default=("unique_value",),
    show_default=True,
    callback=distinct,
    type=click.Choice(list(VICTIMS)),
    help="How to choose the worker that leaves; may be given several times.",
)
@click.option(
    "--hours",
    default=1.0,
    show_default=True,
    type=Number(0.1, 24),
    help="How long the day lasts.",
)
@click.option(
    "--load",
    default=0.5,
    show_default=True,
    type=Number(0, 64, min_open=True),
    help="Mean arrival rate, as a multiple of the recorded one.",
)
@click.option(
    "--bursts",
    default=0.2,
    show_default=True,
    type=Number(0, 1),
    help="Share of the traffic that comes in bursts.",
)
@click.option(
    "--startup-s",
    default=60.0,
    show_default=True,
    type=Number(0, 3600),
    help="Until a worker that was asked for is live.",
)
@click.option(
    "--workers",
    "num_workers",
    default=3,
    show_default=True,
    type=POSITIVE,
    help="Workers at the start.",
)
@click.option(
    "--roles",
    type=ROLES,
    help="Of the workers at the start, such as 1p2d (1 prefill, 2 decode), in place of --workers: "
    "then there are two pools.",
)
@click.option(
    "--link-gbit",
    default=100.0,
    show_default=True,
    type=FACTOR,
    help="With --roles: Gbit/s at which KV leaves a worker.",
)
@click.option(
    "--max-workers", default=16, show_default=True, type=POSITIVE, help="Workers at most."
)
@click.option(
    "--profile",
    default="70b-4xh100",
    show_default=True,
    type=click.Choice(list(PROFILES)),
    help="Timing of the workers.",
)
@click.option("--seed", default=0, show_default=True, type=int, help="Of the bursts and of ties.")
@jobs_option
@json_option
@click.option("--png", "png_file", type=FILE, help="File to draw the sizes to.")
def main(
    trace_file: Path,
    policies: tuple[str, ...],
    share: float | None,
    victims: tuple[str, ...],
    hours: float,
    load: float,
    bursts: float,
    startup_s: float,
    num_workers: int,
    roles: tuple[Role, ...] | None,
    link_gbit: float,
    max_workers: int,
    profile: str,
    seed: int,
    jobs: int,
    json_file: Path | None,
    png_file: Path | None,
) -> None:
    """Compare rules for the size of a fleet on a day's traffic in virtual time."""
    global _scenario, _share
    _share = share
    trace = read(trace_file)
    rates = curve(round(3600 * hours), bursts=bursts, seed=seed)
    setting = Setting(num_workers=num_workers, profiles=(PROFILES[profile],), seed=seed)
    if roles:
        _check_roles(policies)
        link = Link(link_gbit * 1e9 / 8)
        setting = replace(setting, num_workers=len(roles), roles=roles, link=link)
    _scenario = Scenario(
        day_of(trace, rates, load),
        hours,
        setting,
        Rules(max_workers=max_workers),
        startup_s,
        Prompts(setting.block_size),
    )
    asked = [(policy, victim) for policy in policies for victim in victims]
    with forked(jobs) as executor:
        figures = list(executor.map(_equal if share else _play, *zip(*asked, strict=True)))
    title = (
        f"{_scenario.day.name}: {_scenario.day.num_requests:,} requests, peak to trough 4:1, "
        f"{bursts:.0%} in bursts; a start takes {startup_s:g} s"
    )
    console = Console()
    for victim in victims:
        console.print(
            table(f"{title}; {victim} leaves", [f for f in figures if f.victim == victim])
        )
    console.print(LEGEND)
    save({"title": title, "figures": [asdict(one) for one in figures]}, json_file)
    if png_file:
        plot([one for one in figures if one.victim == victims[0]], rates, title, png_file)


if __name__ == "__main__":
    main()
