"""Does a cluster of many router replicas place real traffic as well as one router does?

    nice python -m loadtest.bench_replicas --json out/replicas.json

Real router processes take the calls in turn; workers have simulated engines; there is one Redis.
Every run starts a fresh cluster with the largest number of routers. Those that the run does not use
idle, so that the machine is as busy with one replica as with many. The numbers of replicas take
turns over several rounds. What differs between rounds is noise, and a difference between numbers of
replicas must be larger. Engines run in real time, so a machine without spare CPU affects the
figures: CPU use is printed.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import urlopen

import click
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from app.core.settings.router import RouterSettings
from app.core.settings.worker import WorkerSettings
from app.http.server import run
from app.local.cluster import Cluster
from app.options import FACTOR, POLICY, PROCESSES
from loadtest.command import option, table
from loadtest.demo import BLOCK_SIZE, NUM_REQUESTS
from loadtest.harness import bench
from loadtest.processes import TICKS_PER_S, cpu_s
from loadtest.replay import replay_policy
from loadtest.report import PolicySummary, summarise
from loadtest.traces import DEMO_TRACE, Trace, read_trace

REPLICAS = (1, 4, 16)
METRICS_TIMEOUT_S = 5.0
ROWS = (
    ("TTFT mean", "summary.ttft_mean_s", "{:.3f} s"),
    ("TTFT p50", "summary.ttft_p50_s", "{:.3f} s"),
    ("TTFT p99", "summary.ttft_p99_s", "{:.2f} s"),
    ("tokens from cache", "summary.hit_rate", "{:.2%}"),
    ("whole request, mean", "summary.request_mean_s", "{:.2f} s"),
    ("failed", "summary.failed", "{:g}"),
    ("decision p50 (wall)", "summary.decision_p50_ms", "{:.1f} ms"),
    ("decision p99 (wall)", "summary.decision_p99_ms", "{:.1f} ms"),
    ("client late, p99", "summary.send_delay_p99_s", "{:.3f} s"),
    ("conflicts per decision", "conflicts", "{:.4f}"),
    ("retries per decision", "retries", "{:.4f}"),
    ("degraded decisions", "degraded", "{:g}"),
    ("CPU of the machine in use", "machine_cpu", "{:.0%}"),
    ("CPU that this cluster uses", "cluster_cpu", "{:.0%}"),
    ("CPU that its routers use", "routers_cpu", "{:.1%}"),
)


@dataclass(frozen=True, slots=True)
class Round:
    """One replay. conflicts, retries: per decision. *_cpu: share of all cores, 0-1.

    cluster_cpu: includes this process, which plays the clients.
    """

    summary: PolicySummary
    conflicts: float
    retries: float
    degraded: float
    machine_cpu: float
    cluster_cpu: float
    routers_cpu: float


def replay_each(
    trace: Trace,
    counts: Sequence[int],
    rounds: int,
    *,
    num_workers: int,
    load: float,
    speedup: float,
    policy: str = "latency",
) -> dict[int, list[Round]]:
    """By number of replicas, one replay of the trace per round."""
    made: dict[int, list[Round]] = {count: [] for count in counts}
    for number in range(rounds):
        first = number % len(counts)  # no number always comes first
        for count in (*counts[first:], *counts[:first]):
            with Cluster(
                num_workers=num_workers,
                num_replicas=max(counts),
                haproxy=False,
                router=RouterSettings(policy=policy, log_level="error"),
                worker=WorkerSettings(speedup=speedup, block_size=BLOCK_SIZE, log_level="error"),
            ) as cluster:
                one = _play(trace, cluster, count, load, speedup, seed=number)
            made[count].append(one)
            click.echo(
                f"round {number + 1}, {count} replicas: TTFT {_ttft(one.summary):.3f} s, "
                f"{one.summary.hit_rate:.2%} from cache, CPU {one.machine_cpu:.0%}"
            )
    return made


def _play(
    trace: Trace, cluster: Cluster, count: int, load: float, speedup: float, *, seed: int
) -> Round:
    urls = [member.url for member in cluster.routers[:count]]
    before = _cpu_s(cluster)
    played = run(replay_policy(trace, urls, None, speedup=speedup, load=load, seed=seed))
    available, *used = (b - a for a, b in zip(before, _cpu_s(cluster), strict=True))
    machine_cpu, cluster_cpu, routers_cpu = (min(1.0, seconds / available) for seconds in used)
    counted = counters(urls)
    decisions = counted["kvroute_decisions_total"]
    return Round(
        summarise(played),
        conflicts=counted["kvroute_reserve_conflicts_total"] / decisions,
        retries=counted["kvroute_decision_retries_total"] / decisions,
        degraded=counted["kvroute_degraded_decisions_total"],
        machine_cpu=machine_cpu,
        cluster_cpu=cluster_cpu,
        routers_cpu=routers_cpu,
    )


def _cpu_s(cluster: Cluster) -> tuple[float, float, float, float]:
    """CPU seconds so far: all cores', the busy ones of these, the cluster's, its routers'."""
    ticks = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9])
    user, nice, system, idle, iowait, *rest = (each / TICKS_PER_S for each in ticks)
    busy = user + nice + system + sum(rest)
    assert cluster.redis is not None
    assert cluster.redis.pid is not None
    routers = sum(cpu_s(member.process.pid) for member in cluster.routers)
    workers = sum(cpu_s(member.process.pid) for member in cluster.workers)
    own = cpu_s(os.getpid()) + cpu_s(cluster.redis.pid)
    return busy + idle + iowait, busy, routers + workers + own, routers


def counters(urls: Sequence[str]) -> Mapping[str, float]:
    """Each counter summed over all these routers and all of its labels."""
    totals: defaultdict[str, float] = defaultdict(float)
    for url in urls:
        with urlopen(f"{url}/metrics", timeout=METRICS_TIMEOUT_S) as answer:  # noqa: S310 - ours
            for family in text_string_to_metric_families(answer.read().decode()):
                for sample in family.samples:
                    if family.type == "counter" and sample.name.endswith("_total"):
                        totals[sample.name] += sample.value
    return totals


def compare(made: dict[int, list[Round]]) -> dict[str, Any]:
    """Each number of replicas against the first one, round by round, and the noise."""
    base, *others = made
    alone = [one.summary for one in made[base]]
    middle = median(_ttft(summary) for summary in alone)
    noise = [_ttft(summary) / middle for summary in alone]
    against: dict[str, Any] = {}
    for count in others:
        pairs = [(one.summary, first) for one, first in zip(made[count], alone, strict=True)]
        ratios = [_ttft(one) / _ttft(first) for one, first in pairs]
        points = [100 * ((one.hit_rate or 0) - (first.hit_rate or 0)) for one, first in pairs]
        against[str(count)] = {
            "ttft_mean": {"median": median(ratios), "least": min(ratios), "most": max(ratios)},
            "hit_points": {"median": median(points), "least": min(points), "most": max(points)},
        }
    return {"base": base, "noise": {"least": min(noise), "most": max(noise)}, "against": against}


def _ttft(summary: PolicySummary) -> float:
    if summary.ttft_mean_s is None:
        raise click.ClickException("no request was answered")
    return summary.ttft_mean_s


def measure(
    counts: Sequence[int],
    rounds: int,
    requests: int,
    num_workers: int,
    policy: str,
    load: float,
    speedup: float,
) -> dict[str, Any]:
    """`rounds`: by number of replicas; and what `compare` makes of them."""
    trace = read_trace(DEMO_TRACE).cut(requests=requests)
    click.echo(
        f"{trace.num_requests:,} requests of {trace.name} at {load:g} times the recorded rate, "
        f"{num_workers} simulated workers at {speedup:g} times life speed, policy {policy}, "
        f"{rounds} rounds: medians (least to most); seconds are the engines'"
    )
    made = replay_each(
        trace, counts, rounds, num_workers=num_workers, load=load, speedup=speedup, policy=policy
    )
    return {
        "trace": trace.name,
        "requests": trace.num_requests,
        "workers": num_workers,
        "policy": policy,
        "load": load,
        "speedup": speedup,
        "rounds": made,
        **compare(made),
    }


def show(result: dict[str, Any], console: Console) -> None:
    """Print medians with the least and the most of the rounds, and the comparison."""
    made = result["rounds"]
    cells = table("replicas", *map(str, made), left=("replicas",))
    for label, name, form in ROWS:
        figure = attrgetter(name)
        rows = [[figure(one) for one in rounds] for rounds in made.values()]
        cells.add_row(label, *(_spread(values, form) for values in rows))
    console.print(cells)
    noise = result["noise"]
    console.print(
        f"noise: with {result['base']}, the rounds' TTFT mean is {noise['least']:.3f} to "
        f"{noise['most']:.3f} times their median"
    )
    for count, numbers in result["against"].items():
        ratio, points = numbers["ttft_mean"], numbers["hit_points"]
        console.print(
            f"{count} against {result['base']}: TTFT mean {ratio['median']:.3f} times "
            f"({ratio['least']:.3f} to {ratio['most']:.3f}), {points['median']:+.2f} points from "
            f"cache ({points['least']:+.2f} to {points['most']:+.2f})"
        )
    if any(one.degraded for rounds in made.values() for one in rounds):
        console.print("The machine was too busy for Redis to answer in time: measure again.")


def _spread(values: Sequence[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    middle, least, most = (form.format(of(known)) for of in (median, min, max))
    return f"{middle} ({least} to {most})"


main = bench(
    measure,
    show,
    option("--replicas counts", REPLICAS, kind=PROCESSES, several=True),
    option("--rounds", 3),
    option("--requests", NUM_REQUESTS),
    option("--workers num_workers", 8, kind=PROCESSES),
    option("--policy", "latency", kind=POLICY),
    option("--load", 1.1, "Arrival rate, as a multiple of the recorded one.", FACTOR),
    option(
        "--speedup",
        4.0,
        "Run this many times faster than real time; halve it if the CPU is over half in use.",
        FACTOR,
    ),
)

if __name__ == "__main__":
    main()
