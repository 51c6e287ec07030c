"""Rules for the size of a fleet compared offline: a day's traffic in virtual time.

    python -m loadtest.autoscale --hours 4 --jobs 2
    python -m loadtest.autoscale --policy threshold:0.3 --policy slo:0.97
    python -m loadtest.autoscale --policy curve:5 --victim newest --victim unique_value

The planner's policies are the real ones, as are those of the routers and the engine. The day is
made of a shorter trace, see loadtest/day.py. `undone`: changes that undo one of the last ten
minutes. `again`: seconds of prefill that workers that had left would have spared. `off by`: from
the share within the SLO that was predicted for one worker less to what then was; a median.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import click

from app.core.roles import Role
from app.options import FACTOR, Number
from app.planner.rules.policies import POLICIES
from app.planner.rules.state import Rules
from app.simulation.profiles import PROFILES, Link
from app.simulation.setting import Setting
from loadtest.command import option, read, trace_option
from loadtest.day import curve, day_of
from loadtest.experiment import Rows, experiment
from loadtest.scaling import Scaled, Scaling
from loadtest.scaling_figures import COLUMNS, figures_of
from loadtest.setting_options import ROLES
from loadtest.traces import Trace
from loadtest.victims import VICTIMS
from loadtest.virtual import TracePrompts

ROUTING = "latency"
STATIC = "static"
CURVE = "curve"
FORMS = (*POLICIES, STATIC, CURVE)


@dataclass(frozen=True, slots=True)
class ScalingVariant:
    """`threshold:X` has X times the usual thresholds; `slo:X` keeps the SLO for a share of X;
    `static:X` has X workers; `curve:X` has X on average, as many as the day's curve without its
    bursts says."""

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
        if self.name == "slo":
            return replace(rules, slo=replace(rules.slo, target=x))
        scaled = ("prefill_queue_up", "prefill_queue_down", "kv_load_up", "kv_load_down")
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


def play(
    scenario_of: Callable[[int], Scenario], policy: ScalingVariant, victim: str, seed: int
) -> Mapping[str, Any]:
    scenario = scenario_of(seed)
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
    else:
        scaling = Scaling(policy.name, rules, victim, scenario.startup_s)
    end_s = 3600 * scenario.hours
    scaled = Scaled(scaling, setting, ROUTING, scenario.prompts, end_s)
    return asdict(figures_of(scaled.run(scenario.day), setting.profiles[0], rules))


def rows(
    trace_file: Path,
    policies: tuple[str, ...],
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
) -> Rows:
    variants = [ScalingVariant(policy) for policy in policies]
    trace = read(trace_file)
    setting = Setting(num_workers=num_workers, profiles=(PROFILES[profile],))
    if roles:
        if any(variant.name == CURVE for variant in variants):
            raise click.UsageError(f"--roles: {CURVE} knows none")
        link = Link(link_gbit * 1e9 / 8)
        setting = replace(setting, num_workers=len(roles), roles=roles, link=link)

    @cache
    def scenario(seed: int) -> Scenario:
        return Scenario(
            day_of(trace, curve(round(3600 * hours), bursts=bursts, seed=seed), load),
            hours,
            replace(setting, seed=seed),
            Rules(max_workers=max_workers),
            startup_s,
            TracePrompts(setting.block_size),
        )

    day = scenario(0).day
    title = (
        f"{day.name}: {day.num_requests:,} requests, peak to trough 4:1, {bursts:.0%} in bursts; "
        f"a start takes {startup_s:g} s"
    )
    return {
        f"{title}; {victim} leaves": {
            f"`{variant.text}`": partial(play, scenario, variant, victim) for variant in variants
        }
        for victim in victims
    }


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


main = experiment(
    rows,
    COLUMNS,
    trace_option,
    option(
        "--policy policies",
        ("static:4", "static:6", "static:8", "threshold", "slo"),
        "Rule for the size. threshold:X has X times the usual thresholds, slo:X aims at a share of "
        "X within the SLO, static:X has X workers, curve:X that many on average.",
        _PolicyName(),
        several=True,
    ),
    option(
        "--victim victims",
        ("unique_value",),
        "How to choose the worker that leaves.",
        click.Choice(list(VICTIMS)),
        several=True,
    ),
    option("--hours", 1.0, "How long the day lasts.", Number(0.1, 24)),
    option(
        "--load",
        0.5,
        "Mean arrival rate, as a multiple of the recorded one.",
        Number(0, 64, min_open=True),
    ),
    option("--bursts", 0.2, "Share of the traffic that comes in bursts.", Number(0, 1)),
    option("--startup-s", 60.0, "Until a worker that was asked for is live.", Number(0, 3600)),
    option("--workers num_workers", 3, "Workers at the start."),
    option(
        "--roles",
        None,
        "Of the workers at the start, such as 1p2d (1 prefill, 2 decode), in place of --workers: "
        "then there are two pools.",
        ROLES,
    ),
    option("--link-gbit", 100.0, "With --roles: Gbit/s at which KV leaves a worker.", FACTOR),
    option("--max-workers", 16, "Workers at most."),
    option("--profile", "70b-4xh100", "Timing of the workers.", click.Choice(list(PROFILES))),
)

if __name__ == "__main__":
    main()
