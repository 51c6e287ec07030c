"""Policies compared offline: a trace against simulated workers, in virtual time, without sockets.

    python -m loadtest.simulate --policy blocks --policy latency
    python -m loadtest.simulate --load 1.1 --replicas 16 --sharing late --sync-ms 50

The policies and the engine are the real ones, and the books of reservations follow the rules of the
Lua scripts (app/simulation/). Without --load, the knee is found first, and the trace is played
at 50, 70 and 90 % of it.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import cycle, groupby
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from app.core.settings import LONGEST_S
from app.core.worker_report import Role
from app.options import COUNT, FACTOR, POSITIVE, PROCESSES, Number
from app.policy.cost import POLICIES
from app.policy.sources import OWN_TRANSFER, Form
from app.simulation.link import Link
from app.simulation.profiles import PROFILES, Profile
from app.simulation.setting import PolicyVariant, Setting, Sharing
from loadtest import report
from loadtest.client import Outcome
from loadtest.command import FILE, Command, distinct, json_option, save, trace_option
from loadtest.ideal import ideal
from loadtest.processes import forked
from loadtest.report import PolicyRun, PolicySummary, summarise
from loadtest.traces import Trace, TraceError, read_trace
from loadtest.virtual import Prompts, Simulation

IDEAL = "ideal"
"""Not a policy, but a yardstick for them: see loadtest/ideal.py."""
WARMUP = 0.25
NO_LOAD = 0.1
"""A load at which requests hardly ever meet."""
KNEE = 3.0
"""Multiple of the mean TTFT without load: where the queues begin to run away."""
SHARES_OF_KNEE = (0.5, 0.7, 0.9)
MAX_LOAD = 64.0
STEP = 1.02
"""How close a search comes, as a ratio of loads."""
SLO_TTFT_S = 2.0
SLO_PREFILLS = 1.5
SLO_TOKEN_S = 0.1

Played = Mapping[str, Sequence["Figures"]]
"""By policy, the figures of each seed."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything but policy, load and seed."""

    trace: Trace
    setting: Setting


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
    conflicts: int
    """Reservations refused because another replica's came first."""


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
    ("reservations refused", lambda f: float(f.conflicts), "{:.0f}"),
)
RELATIVE = frozenset({"TTFT mean, s", "TTFT p99, s", "whole request, mean, s"})
"""Rows whose figures are also given as multiples of the last policy's."""


@cache
def alone_s(profile: Profile, prompt_tokens: int) -> float:
    """Seconds to prefill a prompt with nothing cached, on a worker with nothing else to do."""
    starts = range(0, prompt_tokens, profile.max_batch_tokens)
    chunks = [(start, min(profile.max_batch_tokens, prompt_tokens - start)) for start in starts]
    return sum(profile.compute_s(n, n * (start + n / 2), 0) for start, n in chunks)


def meets_slo(outcome: Outcome, profile: Profile) -> bool:
    if outcome.first_token_s is None or outcome.end_s is None:
        return False
    ttft_s = outcome.first_token_s - outcome.arrival_s
    allowed_s = SLO_TTFT_S + SLO_PREFILLS * alone_s(profile, outcome.prompt_tokens)
    return ttft_s <= allowed_s and _token_s(outcome) <= SLO_TOKEN_S


def _token_s(outcome: Outcome) -> float:
    assert outcome.first_token_s is not None
    assert outcome.end_s is not None
    return (outcome.end_s - outcome.first_token_s) / max(1, outcome.output_tokens - 1)


@cache
def _prompts(trace_name: str, block_size: int) -> Prompts:
    return Prompts(block_size)


def offered(trace: Trace, load: float) -> Trace:
    """The trace at a multiple of its recorded rate.

    Sessions that wait for their answers are copied. If they were compressed in time instead, all of
    them would soon be under way, and the load could rise no further.
    """
    is_closed_loop = any(len(session.turns) > 1 for session in trace.sessions)
    copies = math.ceil(load) if is_closed_loop else 1
    return (trace.repeated(copies) if copies > 1 else trace).at_load(load / copies)


def simulate(scenario: Scenario, policy: str, load: float, seed: int = 0) -> Figures:
    """Play the scenario's trace once; the first quarter of the requests is not measured."""
    trace, setting = scenario.trace, replace(scenario.setting, seed=seed)
    prompts = _prompts(trace.name, setting.block_size)
    conflicts, forms = 0, Counter[Form]()
    if policy == IDEAL:
        outcomes = ideal(setting, offered(trace, load), prompts)
    else:
        simulation = Simulation(policy, setting, prompts)
        outcomes = simulation.run(offered(trace, load))
        conflicts, forms = simulation.fleet.conflicts, simulation.forms
    workers = tuple(f"w{i}:0" for i in range(setting.num_workers))
    run = PolicyRun(policy, trace.name, 1.0, load, WARMUP, tuple(outcomes), workers)
    good = sum(meets_slo(outcome, setting.profiles[0]) for outcome in run.measured)
    token_s = [_token_s(outcome) for outcome in run.measured if outcome.output_tokens > 1]
    span_s = run.measured[-1].arrival_s - run.measured[0].arrival_s
    return Figures(
        policy=policy,
        load=load,
        seed=seed,
        summary=summarise(run),
        within_slo=good / len(run.measured),
        goodput_per_s=good / span_s if span_s else None,
        token_s=float(np.mean(token_s)) if token_s else None,
        token_p99_s=float(np.percentile(token_s, 99)) if token_s else None,
        split=forms[Form.SPLIT] / len(outcomes),
        fetched=forms[Form.FETCH] / len(outcomes),
        conflicts=conflicts,
    )


def highest(is_fine: Callable[[float], bool]) -> float:
    """The highest load that is fine, to within STEP; 0 if none is, MAX_LOAD if all are."""
    low, high = 0.0, 1.0
    while is_fine(high):
        low, high = high, 2 * high
        if low >= MAX_LOAD:
            return MAX_LOAD
    while high / STEP > low and high > NO_LOAD:
        middle = math.sqrt(low * high) if low else high / 2
        low, high = (middle, high) if is_fine(middle) else (low, middle)
    return low


def knee(scenario: Scenario, policy: str) -> float:
    """The highest load at which mean TTFT is at most KNEE times that without load."""
    ttft_s = partial(_ttft_mean_s, scenario, policy)
    bound_s = KNEE * ttft_s(NO_LOAD)
    return highest(lambda load: ttft_s(load) <= bound_s)


def _ttft_mean_s(scenario: Scenario, policy: str, load: float) -> float:
    mean_s = simulate(scenario, policy, load).summary.ttft_mean_s
    return math.inf if mean_s is None else mean_s


def limit(scenario: Scenario, policy: str, share: float, seeds: int) -> float:
    """The highest load at which this share of the requests, averaged over seeds, meets the SLO."""

    def is_fine(load: float) -> bool:
        played = (simulate(scenario, policy, load, seed) for seed in range(seeds))
        return sum(figures.within_slo for figures in played) >= share * seeds

    return highest(is_fine)


# What a worker process plays. Inherited, because sending a trace takes long.
_scenario: Scenario


def _simulate(policy: str, load: float, seed: int) -> Figures:
    return simulate(_scenario, policy, load, seed)


def _knee(policy: str) -> float:
    return knee(_scenario, policy)


def _limit(policy: str, share: float, seeds: int) -> float:
    return limit(_scenario, policy, share, seeds)


@contextmanager
def processes(scenario: Scenario, number: int) -> Iterator[Executor]:
    global _scenario
    _scenario = scenario
    with forked(number) as executor:
        yield executor


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
    return cells


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


MILLISECONDS = Number(0, 1000 * LONGEST_S)
WEIGHT = Number(0, 1_000_000)


class _PolicyName(click.ParamType[str]):
    """A policy's name, `blocks:W`, or `ideal`."""

    name = "policy"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value == IDEAL:
            return IDEAL
        try:
            policy = PolicyVariant(value)
            weight = policy.weight
            if policy.key not in POLICIES or (weight is not None and policy.key != "blocks"):
                raise ValueError
            if weight is not None:
                WEIGHT.convert(weight, param, ctx)
        except ValueError:
            self.fail(
                f"{value!r} is none of {', '.join(POLICIES)}, blocks:WEIGHT, ideal", param, ctx
            )
        return str(value)


class _Roles(click.ParamType[tuple[Role, ...]]):
    """Numbers of workers with a role, such as 2p6d or 8b."""

    name = "roles"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Role, ...]:
        if not re.fullmatch(r"([1-9][0-9]{0,3}[pdb])+", value):
            self.fail(f"{value!r} is not like 2p6d (prefill, decode) or 8b (both)", param, ctx)
        letters = {role.value[0]: role for role in Role}
        groups = re.findall(r"([0-9]+)([pdb])", value)
        roles = tuple(letters[letter] for number, letter in groups for _ in range(int(number)))
        if set(roles) == {Role.PREFILL}:
            self.fail(f"{value!r} has no worker that decodes", param, ctx)
        return roles


ROLES = _Roles()


@click.command(cls=Command)
@trace_option
@click.option("--requests", type=POSITIVE, help="Play at most this many.")
@click.option(
    "--policy",
    "policies",
    multiple=True,
    default=tuple(POLICIES)[::-1],
    callback=distinct,
    type=_PolicyName(),
    help="Policy to play; may be given several times. Default: all, latency last. blocks:W is "
    "blocks with a prefill weight of W; ideal is no policy but a yardstick: every request alone, "
    "on a worker with the memory of all.",
)
@click.option(
    "--load",
    "loads",
    multiple=True,
    callback=distinct,
    type=FACTOR,
    help="Arrival rate, as a multiple of the recorded one; may be given several times. Default: "
    "50, 70 and 90 % of the knee, the load at which the last policy's mean TTFT is "
    f"{KNEE:g} times that without load.",
)
@click.option(
    "--limit",
    "share",
    type=Number(0, 1, min_open=True),
    help="Also find the highest load at which this share of the requests meets the SLO.",
)
@click.option(
    "--workers",
    "num_workers",
    default=8,
    show_default=True,
    type=POSITIVE,
    help="Number of workers.",
)
@click.option(
    "--profile",
    "profiles",
    multiple=True,
    default=("70b-4xh100",),
    show_default=True,
    type=click.Choice(list(PROFILES)),
    help="Timing of the workers. If several are given, workers of unequal speed take them in turn.",
)
@click.option(
    "--host-tokens", default=0, show_default=True, type=COUNT, help="Host tokens per worker."
)
@click.option(
    "--roles",
    type=ROLES,
    help="Of the workers, such as 2p6d (2 prefill, 6 decode) or 8b (both), in place of --workers.",
)
@click.option(
    "--link-gbit",
    type=FACTOR,
    help="Gbit/s at which KV leaves a worker. Default: none does.",
)
@click.option(
    "--kv-transfer",
    default=OWN_TRANSFER,
    show_default=True,
    help=f"How it does: by {OWN_TRANSFER}, prefixes are fetched, too; by others, whole prompts.",
)
@click.option(
    "--split-above",
    type=COUNT,
    help="A yardstick: split if the worker lacks at least so many tokens, whatever it costs.",
)
@click.option(
    "--block-size", default=256, show_default=True, type=POSITIVE, help="Tokens per KV block."
)
@click.option(
    "--replicas", default=1, show_default=True, type=PROCESSES, help="Number of router replicas."
)
@click.option(
    "--sharing",
    default="exact",
    show_default=True,
    type=click.Choice([str(sharing) for sharing in Sharing]),
    help="What replicas know about each other's reservations.",
)
@click.option(
    "--sync-ms", default=5.0, show_default=True, type=MILLISECONDS, help="Delay of `late` sharing."
)
@click.option(
    "--trip-ms",
    default=0.5,
    show_default=True,
    type=MILLISECONDS,
    help="Time from lookup to reservation.",
)
@click.option(
    "--event-delay-ms",
    default=0.0,
    show_default=True,
    type=MILLISECONDS,
    help="Time from a change in a cache until routers see it.",
)
@click.option(
    "--metrics-ms",
    default=100.0,
    show_default=True,
    type=Number(1, 1000 * LONGEST_S),
    help="Interval between metrics.",
)
@click.option(
    "--misjudged-prefill",
    default=1.0,
    show_default=True,
    type=FACTOR,
    help="Prefill and load times as routers believe them, over what was learned.",
)
@click.option(
    "--misjudged-decode", default=1.0, show_default=True, type=FACTOR, help="The same for decodes."
)
@click.option(
    "--count-in-flight", is_flag=True, help="Count blocks as cached from the reservation on."
)
@click.option(
    "--seeds",
    default=1,
    show_default=True,
    type=POSITIVE,
    help="Runs of each policy and load, whose figures are averaged; arrivals differ.",
)
@click.option(
    "--jobs",
    default=os.cpu_count() or 1,
    show_default=True,
    type=PROCESSES,
    help="Processes to simulate in.",
)
@json_option
@click.option("--png", "png_file", type=FILE, help="File to draw the figures to.")
def main(
    trace_file: Path,
    requests: int | None,
    policies: tuple[str, ...],
    loads: tuple[float, ...],
    share: float | None,
    profiles: tuple[str, ...],
    seeds: int,
    jobs: int,
    json_file: Path | None,
    png_file: Path | None,
    **options: Any,
) -> None:
    """Compare policies on a trace in virtual time, with a table for each load."""
    console = Console()
    try:
        trace = read_trace(trace_file).cut(requests=requests)
    except TraceError as error:
        raise click.ClickException(str(error)) from error
    if options["link_gbit"] is None and (options["roles"] or options["split_above"] is not None):
        raise click.UsageError("--roles and --split-above need --link-gbit, by which KV travels")
    scenario = Scenario(
        trace, _setting(profiles=tuple(PROFILES[name] for name in profiles), **options)
    )
    _check_fit(scenario)
    result: dict[str, Any] = {
        "trace": scenario.trace.name,
        "requests": scenario.trace.num_requests,
        "setting": asdict(scenario.setting) | {"profiles": profiles},
    }
    # What knows no queues has neither knee nor limit.
    real = [policy for policy in policies if policy != IDEAL]
    if not loads and not real:
        raise click.UsageError(f"{IDEAL} has no knee to take loads from: set --load")
    with processes(scenario, jobs) as executor:
        if not loads:
            result["knee"] = found = executor.submit(_knee, real[-1]).result()
            console.print(f"{real[-1]} reaches its knee at {found:.2f}x the recorded rate")
            loads = tuple(part * found for part in SHARES_OF_KNEE)
        asked = [(p, load, seed) for load in loads for p in policies for seed in range(seeds)]
        figures = list(executor.map(_simulate, *zip(*asked, strict=True)))
        for load, at_load in groupby(figures, key=lambda f: f.load):
            played = {policy: list(its) for policy, its in groupby(at_load, lambda f: f.policy)}
            console.print(table(_title(scenario, load), played))
        if share is not None:
            limits = dict(
                zip(
                    real,
                    executor.map(partial(_limit, share=share, seeds=seeds), real),
                    strict=True,
                )
            )
            result["limit"] = {"share": share, "load": limits}
            for policy, load in limits.items():
                console.print(f"{policy} keeps {share:.0%} within the SLO up to {load:.2f}x")
    result["figures"] = [asdict(one) for one in figures]
    save(result, json_file)
    if png_file:
        plot(figures, _title(scenario, None), png_file)


def _setting(
    sharing: str,
    host_tokens: int,
    sync_ms: float,
    trip_ms: float,
    event_delay_ms: float,
    metrics_ms: float,
    roles: tuple[Role, ...] | None,
    link_gbit: float | None,
    num_workers: int,
    **same: Any,
) -> Setting:
    return Setting(
        num_workers=len(roles) if roles else num_workers,
        roles=roles or (Role.BOTH,),
        link=None if link_gbit is None else Link(link_gbit * 1e9 / 8),
        sharing=Sharing(sharing),
        host_pool_tokens=host_tokens,
        sync_s=sync_ms / 1000,
        trip_s=trip_ms / 1000,
        event_delay_s=event_delay_ms / 1000,
        metrics_interval_s=metrics_ms / 1000,
        **same,
    )


def _check_fit(scenario: Scenario) -> None:
    """Raises ClickException for a request that not every worker could hold."""
    size = scenario.setting.block_size
    pool_blocks = min(profile.kv_pool_tokens for profile in scenario.setting.profiles) // size
    for session in scenario.trace.sessions:
        for turn in session.turns:
            if turn.input_tokens + turn.output_tokens > pool_blocks * size:
                raise click.ClickException(
                    f"request {turn.index} has {turn.input_tokens:,} tokens and an answer of "
                    f"{turn.output_tokens:,}; a worker holds {pool_blocks:,} blocks of {size:,}"
                )


def _title(scenario: Scenario, load: float | None) -> str:
    trace, setting = scenario.trace, scenario.setting
    at = "" if load is None else f" at {load:.2f}x the recorded rate"
    host = f", {setting.host_pool_tokens:,} tokens on the host" * bool(setting.host_pool_tokens)
    return (
        f"{trace.name}: {trace.num_requests:,} requests{at}, {setting.num_workers} workers{host}, "
        f"{setting.replicas} replica{'s' * (setting.replicas > 1)} ({setting.sharing})"
    )


if __name__ == "__main__":
    main()
