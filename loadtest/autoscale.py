"""Rules for the size of a fleet compared offline: a day's traffic in virtual time.

    python -m loadtest.autoscale --hours 4 --jobs 2
    python -m loadtest.autoscale --policy threshold:0.3 --policy slo:0.97
    python -m loadtest.autoscale --equal 0.95 --policy threshold --policy slo
    python -m loadtest.autoscale --policy curve:5 --victim newest --victim unique_value

The planner's policies are the real ones, as are those of the routers and the engine. The day is
made of a trace that is shorter: see loadtest/day.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

from app.core.roles import Role
from app.options import FACTOR, Number
from app.planner.rules.policies import POLICIES
from app.planner.rules.pools import POOL_POLICIES
from app.planner.rules.state import Rules
from app.simulation.link import Link
from app.simulation.profiles import PROFILES
from app.simulation.setting import Setting
from loadtest.command import (
    FILE,
    Command,
    jobs_option,
    json_option,
    option,
    read,
    save,
    trace_option,
)
from loadtest.console import Console
from loadtest.day import curve, day_of
from loadtest.processes import forked
from loadtest.scaling import Coming, Scaled, Scaling
from loadtest.scaling_figures import LEGEND, ScalingFigures, figures_of, plot, table
from loadtest.setting_options import ROLES
from loadtest.traces import Trace
from loadtest.victims import VICTIMS
from loadtest.virtual import Simulation, TracePrompts

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
    prompts: TracePrompts


def play(scenario: Scenario, policy: ScalingVariant, victim: str) -> ScalingFigures:
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


def equal(scenario: Scenario, name: str, victim: str, share: float) -> ScalingFigures:
    """The policy with the number that keeps the SLO for `share` of the requests with the fewest
    worker hours; if none does, what came next to it."""
    few, many = LIMITS[name]
    best: ScalingFigures | None = None
    for _ in range(HALVINGS):
        x = (few + many) / 2
        x = round(x) if name == STATIC else float(f"{x:.3g}")
        figures = play(scenario, ScalingVariant(f"{name}:{x}"), victim)
        if figures.within_slo >= share:
            many = x
            if best is None or best.within_slo < share or figures.worker_hours < best.worker_hours:
                best = figures
        else:
            few = x
            if best is None or best.within_slo < figures.within_slo < share:
                best = figures
    assert best is not None
    return best


def _coming(scenario: Scenario) -> Coming:
    """What will be asked, and when: of sessions, when a fleet of the largest size answers them."""
    setting = replace(scenario.setting, num_workers=scenario.rules.max_workers)
    outcomes = Simulation(ROUTING, setting, scenario.prompts).run(scenario.day)
    turns = {str(turn.index): turn for session in scenario.day.sessions for turn in session.turns}
    return [(o.arrival_s, scenario.prompts.of(turns[o.request_id])) for o in outcomes]


# What a worker process plays. Inherited, because sending a trace takes long.
_scenario: Scenario
_share: float | None = None


def _play(policy: str, victim: str) -> ScalingFigures:
    return play(_scenario, ScalingVariant(policy), victim)


def _equal(policy: str, victim: str) -> ScalingFigures:
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
@option(
    "--policy policies",
    ("static:4", "static:6", "static:8", "threshold", "waiting", "slo", "oracle"),
    "Rule for the size. threshold:X, waiting:X and ongoing:X have "
    "X times the usual thresholds, slo:X and oracle:X aim at a share of X within the SLO, static:X "
    "has X workers, curve:X that many on average. oracle is slo, shown what will be asked instead "
    "of what was.",
    _PolicyName(),
    several=True,
)
@option(
    "--equal share",
    None,
    "Instead of the numbers given, look for those of each policy that keep the SLO for this "
    "share of the requests.",
    Number(0.5, 0.999),
)
@option(
    "--victim victims",
    ("unique_value",),
    "How to choose the worker that leaves.",
    click.Choice(list(VICTIMS)),
    several=True,
)
@option("--hours", 1.0, "How long the day lasts.", Number(0.1, 24))
@option(
    "--load",
    0.5,
    "Mean arrival rate, as a multiple of the recorded one.",
    Number(0, 64, min_open=True),
)
@option("--bursts", 0.2, "Share of the traffic that comes in bursts.", Number(0, 1))
@option("--startup-s", 60.0, "Until a worker that was asked for is live.", Number(0, 3600))
@option("--workers num_workers", 3, "Workers at the start.")
@option(
    "--roles",
    None,
    "Of the workers at the start, such as 1p2d (1 prefill, 2 decode), in place of --workers: "
    "then there are two pools.",
    ROLES,
)
@option("--link-gbit", 100.0, "With --roles: Gbit/s at which KV leaves a worker.", FACTOR)
@option("--max-workers", 16, "Workers at most.")
@option("--profile", "70b-4xh100", "Timing of the workers.", click.Choice(list(PROFILES)))
@option("--seed", 0, "Of the bursts and of ties.", int)
@jobs_option
@json_option
@option("--png png_file", None, "File to draw the sizes to.", FILE)
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
        TracePrompts(setting.block_size),
    )
    asked = [(policy, victim) for policy in policies for victim in victims]
    with forked(jobs) as executor:
        figures = list(executor.map(_equal if share else _play, *zip(*asked, strict=True)))
    title = (
        f"{_scenario.day.name}: {_scenario.day.num_requests:,} requests, peak to trough 4:1, "
        f"{bursts:.0%} in bursts; a start takes {startup_s:g} s"
    )
    _print(title, victims, figures)
    save({"title": title, "figures": [asdict(one) for one in figures]}, json_file)
    if png_file:
        plot([one for one in figures if one.victim == victims[0]], rates, title, png_file)


def _print(title: str, victims: Sequence[str], figures: Sequence[ScalingFigures]) -> None:
    console = Console()
    for victim in victims:
        console.print(
            table(f"{title}; {victim} leaves", [f for f in figures if f.victim == victim])
        )
    console.print(LEGEND)


if __name__ == "__main__":
    main()
