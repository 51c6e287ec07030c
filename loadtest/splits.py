"""Prefill apart from decode, as compared to none of it: a trace in virtual time, one table a load.

    python -m loadtest.splits --trace conversation.jsonl --requests 1500

Rows: all requests whole on one worker; each fixed split, by the rule of other routers; and the
price over workers that do both, with whole prompts alone (`splits`), or prefixes too (`and
fetches`). Figures are medians over seeds. Loads are shares of the first row's knee, as in simulate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click
import numpy as np

from app.core.roles import Role
from app.options import COUNT, FACTOR
from app.policy.transfer import OWN_TRANSFER
from app.simulation.link import Link
from app.simulation.setting import Setting
from loadtest.command import Command, jobs_option, json_option, option, read, save, trace_option
from loadtest.figures import Figures, Played
from loadtest.knee import knee
from loadtest.scenario import Scenario, play, processes
from loadtest.setting_options import ROLES

LATENCY = "latency"
SHARES_OF_KNEE = (0.7, 0.9)
COLUMNS = ("TTFT", "p99", "whole request", "ms/token", "p99", "within SLO", "split", "fetched")


def rows(
    splits: Sequence[tuple[Role, ...]], links_gbit: Sequence[float], above: int
) -> dict[str, Setting]:
    """What is compared, by name."""
    workers = len(splits[0])
    compared = {"all local": Setting(num_workers=workers)}
    for gbit in links_gbit:
        linked = replace(compared["all local"], link=Link(gbit * 1e9 / 8))
        for roles in splits:
            num_prefill = roles.count(Role.PREFILL)
            name = f"{num_prefill}p{workers - num_prefill}d, {gbit:g} Gbit/s"
            fixed = replace(linked, kv_transfer="nixl", roles=roles, split_above=above)
            compared[name] = fixed
        compared[f"splits, {gbit:g} Gbit/s"] = replace(linked, kv_transfer="nixl")
        compared[f"and fetches, {gbit:g} Gbit/s"] = replace(linked, kv_transfer=OWN_TRANSFER)
    return compared


def table(played: Played) -> str:
    """In Markdown."""
    lines = [" | ".join(("|", *COLUMNS)) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name, seeds in played.items():
        ttft_s, p99_s, whole_s, token_s, token_p99_s, *shares = np.median(
            [_cells(one) for one in seeds], axis=0
        )
        cells = f"{ttft_s:.2f} | {p99_s:.1f} | {whole_s:.2f} | {token_s:.1f} | {token_p99_s:.0f}"
        lines.append(" | ".join((f"| {name}", cells, *(f"{one:.1%}" for one in shares))) + " |")
    return "\n".join(lines)


def _cells(figures: Figures) -> tuple[float, ...]:
    summary = figures.summary
    return (
        summary.ttft_mean_s or 0.0,
        summary.ttft_p99_s or 0.0,
        summary.request_mean_s or 0.0,
        1000 * (figures.token_s or 0.0),
        1000 * (figures.token_p99_s or 0.0),
        figures.within_slo,
        figures.split,
        figures.fetched,
    )


@click.command(cls=Command)
@trace_option
@option("--requests", None, "Play at most this many.")
@option(
    "--load loads",
    None,
    "Arrival rate, as a multiple of the recorded one. Default: 70 and "
    "90 % of the knee without transfers.",
    FACTOR,
    several=True,
)
@option(
    "--roles splits",
    ("1p7d", "2p6d", "3p5d", "4p4d", "5p3d", "6p2d"),
    "A fixed split; may be given several times, always of as many workers.",
    ROLES,
    multiple=True,
)
@option("--split-above", 2048, "Uncached tokens from which fixed splits split a request.", COUNT)
@option(
    "--link-gbit links_gbit",
    (100.0, 400.0),
    "Gbit/s at which KV leaves a worker.",
    FACTOR,
    several=True,
)
@option("--seeds", 3, "Runs of each row.")
@jobs_option
@json_option
def main(
    trace_file: Path,
    requests: int | None,
    loads: tuple[float, ...],
    splits: tuple[tuple[Role, ...], ...],
    split_above: int,
    links_gbit: tuple[float, ...],
    seeds: int,
    jobs: int,
    json_file: Path | None,
) -> None:
    """Compare whole requests, fixed splits and the price of transfers, one table a load."""
    if len({len(roles) for roles in splits}) > 1:
        raise click.UsageError("--roles of different numbers of workers cannot be compared")
    trace = read(trace_file).cut(requests=requests)
    compared = rows(splits, links_gbit, split_above)
    if not loads:
        knee_load = knee(Scenario(trace, compared["all local"]), LATENCY)
        loads = tuple(share * knee_load for share in SHARES_OF_KNEE)
    named = {name: (setting, LATENCY) for name, setting in compared.items()}
    result = {}
    with processes(trace, jobs) as executor:
        for load, played in play(executor, named, loads, seeds):
            click.echo(f"\n{trace.name} at {load:.2f}x the recorded rate\n\n{table(played)}")
            result[load] = played
    save(result, json_file)


if __name__ == "__main__":
    main()
