"""Policies compared offline: a trace against simulated workers, in virtual time, without sockets.

    python -m loadtest.simulate --policy blocks --policy latency
    python -m loadtest.simulate --load 1.1 --replicas 16 --sharing late

The policies and the engine are the real ones, and the books of reservations follow the rules of the
Lua scripts (app/simulation/). Without --load, the knee is found first, and the trace is played
at 50, 70 and 90 % of it.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from app.options import FACTOR
from app.policy.policies import POLICIES
from loadtest.command import option, read, trace_option
from loadtest.experiment import Rows, experiment
from loadtest.scenario import IDEAL, KNEE, Scenario, knee, simulate
from loadtest.setting_options import PolicyName, setting_of, setting_options

SHARES_OF_KNEE = (0.5, 0.7, 0.9)
TIMES = (
    ("TTFT mean, s", "ttft_mean_s", "{:.2f}"),
    ("p99", "ttft_p99_s", "{:.2f}"),
    ("whole request, s", "request_mean_s", "{:.2f}"),
)
COLUMNS = (
    TIMES[0],
    ("p50", "ttft_p50_s", "{:.2f}"),
    ("p90", "ttft_p90_s", "{:.2f}"),
    *TIMES[1:],
    ("s/token", "token_s", "{:.4f}"),
    ("its p99", "token_p99_s", "{:.3f}"),
    ("within SLO", "within_slo", "{:.1%}"),
    ("of them per s", "goodput_per_s", "{:.2f}"),
    ("from cache", "hit_rate", "{:.1%}"),
    ("split", "split", "{:.1%}"),
    ("fetched", "fetched", "{:.1%}"),
    ("busiest / mean", "balance", "{:.2f}"),
    ("refused, all full", "failed", "{:.0f}"),
    ("preemptions", "preemptions", "{:.0f}"),
    ("reservations refused", "conflicts", "{:.0f}"),
)


def rows(
    trace_file: Path,
    requests: int | None,
    policies: tuple[str, ...],
    loads: tuple[float, ...],
    **fleet: Any,
) -> Rows:
    scenario = Scenario(read(trace_file).cut(requests=requests), setting_of(**fleet))
    _check_fit(scenario)
    # What knows no queues has no knee.
    real = [policy for policy in policies if policy != IDEAL]
    if not loads and not real:
        raise click.UsageError(f"{IDEAL} has no knee to take loads from: set --load")
    if not loads:
        knee_load = knee(scenario, real[-1])
        click.echo(f"{real[-1]} reaches its knee at {knee_load:.2f}x the recorded rate")
        loads = tuple(part * knee_load for part in SHARES_OF_KNEE)
    return {
        f"{_title(scenario)} at {load:.2f}x the recorded rate": {
            f"`{policy}`": partial(simulate, scenario, policy, load) for policy in policies
        }
        for load in loads
    }


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


def _title(scenario: Scenario) -> str:
    trace, setting = scenario.trace, scenario.setting
    host = f", {setting.host_pool_tokens:,} tokens on the host" * bool(setting.host_pool_tokens)
    return (
        f"{setting.num_workers} workers{host}, {setting.replicas} "
        f"replica{'s' * (setting.replicas > 1)} ({setting.sharing}); {trace.num_requests:,} "
        f"requests of {trace.name}"
    )


main = experiment(
    rows,
    COLUMNS,
    trace_option,
    option("--requests", None, "Play at most this many."),
    option(
        "--policy policies",
        tuple(POLICIES)[::-1],
        "Policy to play. Default: all, latency last. blocks:W is blocks with a prefill weight of "
        "W; ideal is no policy but a yardstick: every request alone, on a worker with the memory "
        "of all.",
        PolicyName(),
        several=True,
        show_default=False,
    ),
    option(
        "--load loads",
        None,
        "Arrival rate, as a multiple of the recorded one. Default: 50, 70 and 90 % of the knee, "
        f"the load at which the last policy's mean TTFT is {KNEE:g} times that without load.",
        FACTOR,
        several=True,
    ),
    setting_options,
)

if __name__ == "__main__":
    main()
