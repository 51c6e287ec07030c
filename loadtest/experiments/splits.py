"""Prefill apart from decode, as compared to none of it: a trace in virtual time, one table a load.

    python -m loadtest.experiments.splits --trace conversation.jsonl --requests 1500

Rows: all requests whole on one worker; each fixed split, by the rule of other routers; and the
price over workers that do both, with whole prompts alone (`splits`), or prefixes too (`and
fetches`). Figures are medians over seeds. Loads are shares of the first row's knee, as in simulate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import click
import numpy as np

from app.core.roles import Role
from app.options import COUNT, FACTOR
from app.policy.pairing import OWN_TRANSFER
from app.simulation.profiles import Link
from app.simulation.setting import Setting
from loadtest.command import option, read, trace_option
from loadtest.experiment import Rows, experiment
from loadtest.scenario import Scenario, knee, simulate
from loadtest.setting_options import ROLES

LATENCY = "latency"
SHARES_OF_KNEE = (0.7, 0.9)


def settings(
    splits: Sequence[tuple[Role, ...]], links_gbit: Sequence[float], above: int
) -> dict[str, Setting]:
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


def rows(
    trace_file: Path,
    requests: int | None,
    loads: tuple[float, ...],
    splits: tuple[tuple[Role, ...], ...],
    split_above: int,
    links_gbit: tuple[float, ...],
) -> Rows:
    if len({len(roles) for roles in splits}) > 1:
        raise click.UsageError("--roles of different numbers of workers cannot be compared")
    trace = read(trace_file).cut(requests=requests)
    compared = {
        name: Scenario(trace, setting)
        for name, setting in settings(splits, links_gbit, split_above).items()
    }
    if not loads:
        knee_load = knee(compared["all local"], LATENCY)
        loads = tuple(share * knee_load for share in SHARES_OF_KNEE)
    return {
        f"{trace.name} at {load:.2f}x the recorded rate": {
            name: partial(simulate, scenario, LATENCY, load) for name, scenario in compared.items()
        }
        for load in loads
    }


main = experiment(
    rows,
    (
        ("TTFT, s", "ttft_mean_s", "{:.2f}"),
        ("p99", "ttft_p99_s", "{:.1f}"),
        ("whole request, s", "request_mean_s", "{:.2f}"),
        ("s/token", "token_s", "{:.4f}"),
        ("its p99", "token_p99_s", "{:.3f}"),
        ("within SLO", "within_slo", "{:.1%}"),
        ("split", "split", "{:.1%}"),
        ("fetched", "fetched", "{:.1%}"),
    ),
    trace_option,
    option("--requests", None, "Play at most this many."),
    option(
        "--load loads",
        None,
        "Times the recorded rate. Default: 70 and 90 % of the knee without transfers.",
        FACTOR,
        several=True,
    ),
    option(
        "--roles splits",
        ("1p7d", "2p6d", "3p5d", "4p4d", "5p3d", "6p2d"),
        "A fixed split; may be given several times, always of as many workers.",
        ROLES,
        multiple=True,
    ),
    option("--split-above", 2048, "Uncached tokens from which fixed splits split.", COUNT),
    option("--link-gbit links_gbit", (100.0, 400.0), "Of KV.", FACTOR, several=True),
    seeds=3,
    middle=np.median,
)

if __name__ == "__main__":
    main()
