"""The demo: real traffic against a cluster on this machine, one policy after another."""

from __future__ import annotations

import importlib
from pathlib import Path

import click

from app.core.extras import extra
from app.core.settings.router import RouterSettings
from app.core.settings.worker import WorkerSettings
from app.http.server import run
from app.local.cluster import Cluster
from app.options import FACTOR, POLICY, cluster_size
from loadtest import report
from loadtest.command import Command, Console, make_folder, option, read, save
from loadtest.door_client import Api
from loadtest.replay import api_option, progress_display, replay_policy
from loadtest.traces import DEMO_TRACE

SPEEDUP = 8.0
BLOCK_SIZE = 64
NUM_REQUESTS = 1800


@click.command(cls=Command)
@cluster_size()
@option(
    "--policy policies",
    ("round_robin", "latency"),
    "Policy to play, on a fresh cluster. Give it several times to compare; the ratio is "
    "between the first and the last.",
    POLICY,
    several=True,
)
@api_option
@option("--load", 1.1, "Arrival rate, as a multiple of the recorded one.", FACTOR)
@option(
    "--out",
    Path("out"),
    "Folder for demo.json.",
    click.Path(path_type=Path, file_okay=False),
)
def demo(
    num_workers: int,
    num_replicas: int,
    policies: tuple[str, ...],
    api: Api,
    load: float,
    out: Path,
) -> None:
    """Replay real traffic on a cluster on this machine, one policy after another."""
    with extra("worker"):
        importlib.import_module("workers.main")  # each worker would say that it cannot start
    make_folder(out)
    console = Console()
    trace = read(DEMO_TRACE).cut(requests=NUM_REQUESTS)
    console.print(
        f"{trace.num_requests:,} requests of real chat traffic, {num_workers} simulated workers "
        f"(70B, 4 x H100 each) at {SPEEDUP:g} times life speed, {num_replicas} router replicas"
    )
    runs = []
    for policy in policies:
        with (
            Cluster(
                num_workers=num_workers,
                num_replicas=num_replicas,
                router=RouterSettings(policy=policy, show_decision=True, log_level="warning"),
                worker=WorkerSettings(speedup=SPEEDUP, block_size=BLOCK_SIZE, log_level="warning"),
            ) as cluster,
            progress_display(console, trace.num_requests) as on_progress,
        ):
            runs.append(
                run(
                    replay_policy(
                        trace,
                        cluster.balancer_url,
                        policy,
                        api=api,
                        speedup=SPEEDUP,
                        load=load,
                        on_progress=on_progress,
                    )
                )
            )
    console.print(report.table(runs))
    save(report.as_json(runs), out / "demo.json")
    console.print(f"Also in {out / 'demo.json'}")
