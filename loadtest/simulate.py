"""Policies compared offline: a trace against simulated workers, in virtual time, without sockets.

    python -m loadtest.simulate --policy blocks --policy latency
    python -m loadtest.simulate --load 1.1 --replicas 16 --sharing late --sync-ms 50

The policies and the engine are the real ones, and the books of reservations follow the rules of the
Lua scripts (app/simulation/). Without --load, the knee is found first, and the trace is played
at 50, 70 and 90 % of it.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import click

from app.options import FACTOR, Number
from app.policy.cost import POLICIES
from loadtest.command import (
    FILE,
    Command,
    distinct,
    jobs_option,
    json_option,
    option,
    read,
    save,
    trace_option,
)
from loadtest.console import Console
from loadtest.figures import Figures, plot, table
from loadtest.knee import KNEE, knee, limit
from loadtest.scenario import IDEAL, Scenario, play, processes, with_trace
from loadtest.setting_options import PolicyName, setting_of, setting_options

SHARES_OF_KNEE = (0.5, 0.7, 0.9)


@click.command(cls=Command)
@trace_option
@option("--requests", None, "Play at most this many.")
@click.option(
    "--policy",
    "policies",
    multiple=True,
    default=tuple(POLICIES)[::-1],
    callback=distinct,
    type=PolicyName(),
    help="Policy to play; may be given several times. Default: all, latency last. blocks:W is "
    "blocks with a prefill weight of W; ideal is no policy but a yardstick: every request alone, "
    "on a worker with the memory of all.",
)
@option(
    "--load loads",
    None,
    "Arrival rate, as a multiple of the recorded one. Default: "
    "50, 70 and 90 % of the knee, the load at which the last policy's mean TTFT is "
    f"{KNEE:g} times that without load.",
    FACTOR,
    several=True,
)
@option(
    "--limit share",
    None,
    "Also find the highest load at which this share of the requests meets the SLO.",
    Number(0, 1, min_open=True),
)
@setting_options
@option("--seeds", 1, "Runs of each policy and load, whose figures are averaged; arrivals differ.")
@jobs_option
@json_option
@option("--png png_file", None, "File to draw the figures to.", FILE)
def main(
    trace_file: Path,
    requests: int | None,
    policies: tuple[str, ...],
    loads: tuple[float, ...],
    share: float | None,
    seeds: int,
    jobs: int,
    json_file: Path | None,
    png_file: Path | None,
    **fleet: Any,
) -> None:
    """Compare policies on a trace in virtual time, with a table for each load."""
    console = Console()
    scenario = Scenario(read(trace_file).cut(requests=requests), setting_of(**fleet))
    _check_fit(scenario)
    result: dict[str, Any] = {
        "trace": scenario.trace.name,
        "requests": scenario.trace.num_requests,
        "setting": asdict(scenario.setting) | {"profiles": fleet["profiles"]},
    }
    # What knows no queues has neither knee nor limit.
    real = [policy for policy in policies if policy != IDEAL]
    if not loads and not real:
        raise click.UsageError(f"{IDEAL} has no knee to take loads from: set --load")
    if not loads:
        result["knee"] = knee_load = knee(scenario, real[-1])
        console.print(f"{real[-1]} reaches its knee at {knee_load:.2f}x the recorded rate")
        loads = tuple(part * knee_load for part in SHARES_OF_KNEE)
    rows = {policy: (scenario.setting, policy) for policy in policies}
    figures: list[Figures] = []
    with processes(scenario.trace, jobs) as executor:
        for load, played in play(executor, rows, loads, seeds):
            console.print(table(_title(scenario, load), played))
            figures += chain.from_iterable(played.values())
        if share is not None:
            find = partial(with_trace, limit, scenario.setting, share=share, seeds=seeds)
            limits = dict(zip(real, executor.map(find, real), strict=True))
            result["limit"] = {"share": share, "load": limits}
            for policy, load in limits.items():
                console.print(f"{policy} keeps {share:.0%} within the SLO up to {load:.2f}x")
    result["figures"] = [asdict(one) for one in figures]
    save(result, json_file)
    if png_file:
        plot(figures, _title(scenario, None), png_file)


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
