"""`latency` beside other policies on traffic that strains one thing each, as rows of a table.

    python -m loadtest.strains --seeds 2 --jobs 1
    python -m loadtest.strains --only tenants

The traffic is that of loadtest.traffic, on 8 workers in virtual time. Each row has the mean of its
seeds, of the longest wait too.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import click
import numpy as np

from app.simulation.profiles import PROFILES
from app.simulation.setting import Setting
from loadtest import traffic
from loadtest.client import Outcome
from loadtest.command import Command, jobs_option, option
from loadtest.processes import forked
from loadtest.scenario import WARMUP, offered
from loadtest.slo import meets_slo
from loadtest.traces import Trace, read_trace
from loadtest.virtual import Simulation, TracePrompts


@dataclass(frozen=True, slots=True)
class Row:
    """load: of the traffic's rate. only: of requests of that priority. at_least: and with so many
    tokens."""

    name: str
    traffic: str
    load: float = 1.0
    profile: str = "70b-4xh100"
    priorities: bool = False
    only: str = ""
    at_least: int = 0
    rivals: Sequence[str] = ("logit", "blocks:16")

    @property
    def setting(self) -> Setting:
        above_s = 0.5 if self.priorities else None
        profiles = (PROFILES[self.profile],)
        return Setting(profiles=profiles, priorities=self.priorities, wait_above_s=above_s)


ROWS = (
    Row("prefixes, load 0.8", "prefixes", 0.8),
    Row("prefixes, load 1", "prefixes"),
    Row("one-offs, all", "one-offs"),
    Row("one-offs, those of 80,000 tokens and more", "one-offs", at_least=80_000),
    Row("jobs: the chats", "jobs", only="normal"),
    Row("the same, in line by priority", "jobs", priorities=True, only="normal"),
    Row("the same: the jobs", "jobs", priorities=True, only="low"),
    Row("tenants", "tenants"),
    Row("reasoning", "reasoning"),
    Row("sub-agents, load 0.67", "sub-agents", 0.67),
    Row("sub-agents, load 1", "sub-agents"),
    Row("a crowd", "crowd", only="low"),
    Row("a crowd: the chats beside it", "crowd", only="normal"),
    Row("short prompts", "short", profile="8b-1xh100", rivals=("logit", "blocks:32")),
)


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds; within_slo: of 1."""

    ttft_mean: float
    ttft_p99: float
    ttft_longest: float
    request_mean: float
    within_slo: float


def _measured(row: Row, trace: Trace, outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Those of the row, but for the first quarter of all."""
    priority = {turn.index: turn.priority for one in trace.sessions for turn in one.turns}
    return [
        outcome
        for outcome in outcomes[int(len(outcomes) * WARMUP) :]
        if outcome.prompt_tokens >= row.at_least
        and row.only in ("", priority[int(outcome.request_id)])
    ]


def simulate(row: Row, trace: Trace, policy: str, seed: int) -> Waits:
    setting = row.setting
    played = offered(trace, row.load)
    seeded = Setting(
        profiles=setting.profiles,
        priorities=setting.priorities,
        wait_above_s=setting.wait_above_s,
        seed=seed,
    )
    outcomes = Simulation(policy, seeded, TracePrompts(setting.block_size)).run(played)
    some = _measured(row, played, outcomes)
    firsts_s = [one.first_token_s - one.arrival_s for one in some if one.first_token_s is not None]
    wholes_s = [one.end_s - one.arrival_s for one in some if one.end_s is not None]
    return Waits(
        float(np.mean(firsts_s)),
        float(np.percentile(firsts_s, 99)),
        max(firsts_s),
        float(np.mean(wholes_s)),
        sum(meets_slo(one, setting.profiles[0]) for one in some) / len(some),
    )


def made(name: str) -> Trace:
    """The traffic of that name, as it is read from a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.jsonl"
        path.write_bytes(b"\n".join(traffic.lines(name)))
        return read_trace(path)


def cells(row: Row, policy: str, seeds: Sequence[Waits]) -> str:
    mean = Waits(*np.mean([astuple(one) for one in seeds], axis=0).tolist())
    figures = (
        f"{mean.ttft_mean:.3f} | {mean.ttft_p99:.2f} | {mean.ttft_longest:.1f} | "
        f"{mean.request_mean:.2f} | {mean.within_slo:.1%}".replace("%", " %")
    )
    return f"| {row.name} | `{policy}` | {figures} |"


def _chosen(only: Sequence[str]) -> Iterator[Row]:
    return (row for row in ROWS if not only or row.traffic in only)


@click.command(cls=Command)
@option(
    "--only",
    None,
    "Rows of that traffic. Default: all.",
    click.Choice(list(traffic.TRAFFIC)),
    several=True,
)
@option("--seeds", 3, "Runs of each row.")
@jobs_option
def main(only: Sequence[str], seeds: int, jobs: int) -> None:
    """Print a table of all rows."""
    click.echo("| | policy | TTFT mean, s | p99 | longest | whole request, s | within SLO |")
    click.echo("|---|---|---|---|---|---|---|")
    traces = {row.traffic: made(row.traffic) for row in _chosen(only)}
    with forked(jobs) as executor:
        running = [
            (
                row,
                policy,
                [
                    executor.submit(simulate, row, traces[row.traffic], policy, n)
                    for n in range(seeds)
                ],
            )
            for row in _chosen(only)
            for policy in ("latency", *row.rivals)
        ]
        for row, policy, those in running:
            click.echo(cells(row, policy, [one.result() for one in those]))


if __name__ == "__main__":
    main()
