"""`latency` beside other policies on traffic that strains one thing each, as rows of a table.

    python -m loadtest.experiments.strains --seeds 2 --jobs 1
    python -m loadtest.experiments.strains --only tenants

The traffic is that of loadtest.traffic, on 8 workers in virtual time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import click

from app.simulation.profiles import PROFILES
from app.simulation.setting import Setting
from loadtest.command import option
from loadtest.experiment import Rows, experiment, measured
from loadtest.scenario import offered, warm
from loadtest.traces import Trace
from loadtest.traffic import TRAFFIC, made_trace
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
    Row(
        "short prompts, load 0.6", "short", 0.6, profile="8b-1xh100", rivals=("logit", "blocks:32")
    ),
)


def play(row: Row, trace: Trace, policy: str, seed: int) -> Mapping[str, Any]:
    setting = Setting(
        profiles=(PROFILES[row.profile],),
        priorities=row.priorities,
        wait_above_s=0.5 if row.priorities else None,
        seed=seed,
    )
    played = offered(trace, row.load)
    priority = {turn.index: turn.priority for one in played.sessions for turn in one.turns}
    outcomes = Simulation(policy, setting, TracePrompts(setting.block_size)).run(played)
    counted = (
        outcome
        for outcome in warm(outcomes)
        if outcome.prompt_tokens >= row.at_least
        and row.only in ("", priority[int(outcome.request_id)])
    )
    return measured(counted, setting.profiles[0])


def rows(only: Sequence[str]) -> Rows:
    chosen = [row for row in ROWS if not only or row.traffic in only]
    traces = {row.traffic: made_trace(row.traffic) for row in chosen}
    plays = {
        f"{row.name} | `{policy}`": partial(play, row, traces[row.traffic], policy)
        for row in chosen
        for policy in ("latency", *row.rivals)
    }
    return {"": plays}


main = experiment(
    rows,
    (
        ("TTFT mean, s", "ttft_mean_s", "{:.3f}"),
        ("p99", "ttft_p99_s", "{:.2f}"),
        ("longest", "ttft_longest_s", "{:.1f}"),
        ("whole request, s", "request_mean_s", "{:.2f}"),
        ("within SLO", "within_slo", "{:.1%}"),
        ("refused", "refused", "{:.2%}"),
    ),
    option("--only", None, "Rows of that traffic.", click.Choice(list(TRAFFIC)), several=True),
    labels=" | policy",
    seeds=3,
)

if __name__ == "__main__":
    main()
