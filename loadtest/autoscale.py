"""Rules for the size of a fleet compared offline: a day's traffic in virtual time.

    python -m loadtest.autoscale --hours 4 --jobs 2
    python -m loadtest.autoscale --policy curve:5 --victim newest --victim unique_value

The planner's policies are the real ones, as are those of the routers and the engine. The day is
made of a shorter trace: from night to night, 4:1 from peak to trough, with a dip at noon, and
bursts that last for minutes. `again`: seconds of prefill that workers that had left would have
spared. `foreseen`: the share within the SLO that replays gave the fleet as it was, on average of
the proposals; `came`: the share of those requests that came until as long after each proposal as
a replay looks back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from app.core.roles import Role
from app.core.settings.planner import ScalingPolicy
from app.options import Number
from app.planner.rules.policies import POLICIES
from app.planner.rules.state import Rules
from app.simulation.profiles import Link, Profile
from app.simulation.setting import Setting
from loadtest.command import option, read, trace_option
from loadtest.experiment import Rows, experiment, meets_slo
from loadtest.scaling import VICTIMS, PlayedTrace, Scaled, Scaling
from loadtest.setting_options import ROLES
from loadtest.traces import Trace
from loadtest.virtual import TracePrompts

ROUTING = "latency"
STATIC = "static"
CURVE = "curve"
FORMS = (*POLICIES, STATIC, CURVE)
STARTUP_S = 60.0
LINK_GBIT = 100.0
PEAK_TO_TROUGH = 4.0
NOON_DIP = 0.3
BURST_S = 120.0
BURST_SHAPE = 0.5

Rates = NDArray[np.float64]


def curve(seconds: int, *, bursts: float, seed: int) -> Rates:
    """Arrival rate in each second of the day, over the day's mean. bursts: their share of it."""
    at = (np.arange(seconds) + 0.5) / seconds
    shape = 1.0 - np.cos(2 * math.pi * at)
    shape -= 2 * NOON_DIP * np.exp(-(((at - 0.5) / 0.06) ** 2))
    shape = (shape - shape.min()) / (shape.max() - shape.min())
    rates = 1.0 + (PEAK_TO_TROUGH - 1.0) * shape
    rng = np.random.default_rng(seed)
    number = math.ceil(seconds / BURST_S)
    height = rng.gamma(BURST_SHAPE, 1.0 / BURST_SHAPE, number).repeat(round(BURST_S))[:seconds]
    rates *= 1.0 - bursts + bursts * height
    shares: Rates = rates / rates.mean()
    return shares


def day_of(trace: Trace, rates: Rates, load: float) -> Trace:
    """A trace that lasts as long as `rates`, at `load` times the recorded rate on average.

    The trace is repeated, each time with tokens of its own. Sessions keep their order and the gaps
    within them.
    """
    wanted_s = load * rates.size
    sessions = trace.repeated(math.ceil(wanted_s / trace.span_s), in_turn=True).sessions
    # How far the recording has got at the end of each second.
    reached_s = np.concatenate(([0.0], rates.cumsum())) * load
    ends = np.arange(rates.size + 1)
    moved = [
        replace(session, start_s=float(np.interp(session.start_s, reached_s, ends)))
        for session in sessions
        if session.start_s < wanted_s
    ]
    return Trace(f"{trace.name}, a day in {rates.size / 3600:g} h", tuple(moved))


@dataclass(frozen=True, slots=True)
class ScalingVariant:
    """`static:X` has X workers; `curve:X` has X on average, as many as the day's curve without
    its bursts says; `threshold:X` adds one above X waiting prefills a worker, and takes one away
    below 0.4 times X."""

    text: str

    @property
    def name(self) -> str:
        return self.text.partition(":")[0]

    @property
    def value(self) -> float | None:
        """Raises ValueError if it is not a number."""
        value = self.text.partition(":")[2]
        return float(value) if value else None


@dataclass(frozen=True, slots=True)
class Scenario:
    day: Trace
    hours: float
    setting: Setting
    rules: Rules
    prompts: TracePrompts


def play(
    scenario_of: Callable[[int], Scenario], policy: ScalingVariant, victim: str, seed: int
) -> Mapping[str, Any]:
    scenario = scenario_of(seed)
    rules, setting = scenario.rules, scenario.setting
    if policy.name == STATIC:
        size = int(policy.value or 1)
        setting = replace(setting, num_workers=size)
        scaling = Scaling(STATIC, rules, victim, STARTUP_S, sizes=lambda _: size)
    elif policy.name == CURVE:
        mean, shape = policy.value or 1.0, curve(round(3600 * scenario.hours), bursts=0.0, seed=0)

        def planned(at_s: float) -> int:
            return max(1, round(mean * float(shape[min(int(at_s), shape.size - 1)])))

        setting = replace(setting, num_workers=planned(0.0))
        scaling = Scaling(CURVE, rules, victim, STARTUP_S, sizes=planned)
    else:
        if up := policy.value:
            rules = replace(rules, prefill_queue_up=up, prefill_queue_down=0.4 * up)
        scaling = Scaling(policy.name, rules, victim, STARTUP_S)
    end_s = 3600 * scenario.hours
    scaled = Scaled(scaling, setting, ROUTING, scenario.prompts, end_s)
    return figures_of(scaled.run(scenario.day), setting.profiles[0], rules.window_s)


COLUMNS = (
    ("within SLO", "within_slo", "{:.1%}"),
    ("worker hours", "worker_hours", "{:.2f}"),
    ("TTFT p99, s", "ttft_p99_s", "{:.1f}"),
    ("changes", "changes", "{:.0f}"),
    ("lost", "lost", "{:.0f}"),
    ("again, s", "recomputed_s", "{:.0f}"),
    ("foreseen", "foreseen", "{:.1%}"),
    ("came", "came", "{:.1%}"),
)


def figures_of(played: PlayedTrace, profile: Profile, window_s: float) -> dict[str, Any]:
    """The figures of COLUMNS, `requests`, and `sizes`: the size from each time on. window_s: for
    which requests after a proposal are compared with what it foresaw."""
    outcomes = played.outcomes
    ttfts = [o.first_token_s - o.arrival_s for o in outcomes if o.first_token_s is not None]
    met = np.array([(o.arrival_s, meets_slo(o, profile)) for o in outcomes])
    pairs = [
        (proposal.inputs["attainment"], met[came, 1].mean())
        for proposal in played.proposals
        if "attainment" in proposal.inputs
        and proposal.size == proposal.desired
        and (came := (met[:, 0] >= proposal.at_s) & (met[:, 0] < proposal.at_s + window_s)).any()
    ]
    foreseen, came_then = np.mean(pairs, axis=0) if pairs else (None, None)
    return {
        "requests": len(outcomes),
        "within_slo": sum(meets_slo(outcome, profile) for outcome in outcomes) / len(outcomes),
        "worker_hours": played.worker_s / 3600,
        "ttft_p99_s": float(np.percentile(ttfts, 99)),
        "changes": sum(p.desired != p.size for p in played.proposals),
        "lost": sum(outcome.failure is not None for outcome in outcomes),
        "recomputed_s": played.recomputed_s,
        "foreseen": foreseen,
        "came": came_then,
        "sizes": [(p.at_s, p.desired) for p in played.proposals],
    }


def rows(
    trace_file: Path,
    policies: tuple[str, ...],
    victims: tuple[str, ...],
    hours: float,
    load: float,
    num_workers: int,
    roles: tuple[Role, ...] | None,
    max_workers: int,
    bursts: float,
) -> Rows:
    variants = [ScalingVariant(policy) for policy in policies]
    trace = read(trace_file)
    setting = Setting(num_workers=num_workers)
    if roles:
        if any(variant.name == CURVE for variant in variants):
            raise click.UsageError(f"--roles: {CURVE} knows none")
        setting = replace(
            setting, num_workers=len(roles), roles=roles, link=Link(LINK_GBIT * 1e9 / 8)
        )

    @cache
    def scenario(seed: int) -> Scenario:
        return Scenario(
            day_of(trace, curve(round(3600 * hours), bursts=bursts, seed=seed), load),
            hours,
            replace(setting, seed=seed),
            Rules(max_workers=max_workers),
            TracePrompts(setting.block_size),
        )

    day = scenario(0).day
    title = (
        f"{day.name}: {day.num_requests:,} requests, peak to trough 4:1, {bursts:.0%} in bursts; "
        f"a start takes {STARTUP_S:g} s"
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
            if x is None and policy.name in (STATIC, CURVE):
                raise ValueError
            if x is not None and policy.name == ScalingPolicy.SLO:
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
        "Rule for the size. static:X has X workers, curve:X that many on average, threshold:X adds "
        "one above X waiting prefills a worker.",
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
    option("--workers num_workers", 3, "Workers at the start."),
    option(
        "--roles",
        None,
        "Of the workers at the start, such as 1p2d (1 prefill, 2 decode), in place of --workers: "
        "then there are two pools.",
        ROLES,
    ),
    option("--max-workers", 16, "Workers at most."),
    option("--bursts", 0.2, "Share of the traffic that comes in bursts.", Number(0, 1)),
)

if __name__ == "__main__":
    main()
