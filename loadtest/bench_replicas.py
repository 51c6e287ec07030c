"""Does a cluster of many router replicas place real traffic as well as one router does?

    nice python -m loadtest.bench_replicas --seeds 2 --requests 600

Real router processes take the calls in turn; workers have simulated engines; there is one Redis.
Every run starts a fresh cluster with the largest number of routers. Those that the run does not use
idle, so that the machine is as busy with one replica as with many. What differs between runs of the
same number (--json) is noise, and a difference between numbers of replicas must be larger. Engines
run in real time, so a machine without spare CPU affects the figures: its use is shown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from app.core.settings.router import RouterSettings
from app.core.settings.worker import WorkerSettings
from app.http.server import run
from app.local.cluster import Cluster
from app.options import FACTOR, PROCESSES
from loadtest.command import option
from loadtest.demo import BLOCK_SIZE, NUM_REQUESTS
from loadtest.experiment import Rows, experiment
from loadtest.processes import TICKS_PER_S
from loadtest.replay import replay_policy
from loadtest.report import summarise
from loadtest.traces import DEMO_TRACE, Trace, read_trace

REPLICAS = (1, 4, 16)
METRICS_TIMEOUT_S = 5.0


def play(
    trace: Trace,
    count: int,
    most: int,
    seed: int,
    *,
    num_workers: int,
    load: float,
    speedup: float,
) -> Mapping[str, Any]:
    """Figures of PolicySummary; conflicts and retries per decision; machine: its busy share."""
    with Cluster(
        num_workers=num_workers,
        num_replicas=most,
        haproxy=False,
        router=RouterSettings(log_level="error"),
        worker=WorkerSettings(speedup=speedup, block_size=BLOCK_SIZE, log_level="error"),
    ) as cluster:
        urls = [member.url for member in cluster.routers[:count]]
        before = _cpu_s()
        played = run(replay_policy(trace, urls, None, speedup=speedup, load=load, seed=seed))
        available, used = (b - a for a, b in zip(before, _cpu_s(), strict=True))
        counted = counters(urls)
    decisions = max(1.0, counted["kvroute_decisions_total"])
    return asdict(summarise(played)) | {
        "conflicts": counted["kvroute_reserve_conflicts_total"] / decisions,
        "retries": counted["kvroute_decision_retries_total"] / decisions,
        "degraded": counted["kvroute_degraded_decisions_total"],
        "machine": min(1.0, used / available),
    }


def _cpu_s() -> tuple[float, float]:
    """CPU seconds of all cores so far, and those in which the cores were busy."""
    ticks = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9])
    user, nice, system, idle, iowait, *rest = (each / TICKS_PER_S for each in ticks)
    busy = user + nice + system + sum(rest)
    return busy + idle + iowait, busy


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


def rows(counts: Sequence[int], requests: int, **fleet: Any) -> Rows:
    trace = read_trace(DEMO_TRACE).cut(requests=requests)
    return {"": {str(n): partial(play, trace, n, max(counts), **fleet) for n in counts}}


main = experiment(
    rows,
    (
        ("TTFT mean, s", "ttft_mean_s", "{:.3f}"),
        ("p99", "ttft_p99_s", "{:.2f}"),
        ("from cache", "hit_rate", "{:.2%}"),
        ("whole request, s", "request_mean_s", "{:.2f}"),
        ("failed", "failed", "{:g}"),
        ("client late, s", "send_delay_p99_s", "{:.3f}"),
        ("conflicts", "conflicts", "{:.4f}"),
        ("retries", "retries", "{:.4f}"),
        ("degraded", "degraded", "{:g}"),
        ("machine busy", "machine", "{:.0%}"),
    ),
    option("--replicas counts", REPLICAS, kind=PROCESSES, several=True),
    option("--requests", NUM_REQUESTS),
    option("--workers num_workers", 8, kind=PROCESSES),
    option("--load", 1.1, "Arrival rate, as a multiple of the recorded one.", FACTOR),
    option(
        "--speedup",
        4.0,
        "Run this many times faster than real time; halve it if the CPU is over half in use.",
        FACTOR,
    ),
    labels="replicas",
    seeds=3,
    middle=median,
    one_by_one=True,
)

if __name__ == "__main__":
    main()
