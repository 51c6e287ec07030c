"""Tokens from cache where engines do not tell what they cache, and where they do.

    python -m loadtest.experiments.approximate --at-once 1 --at-once 32

The demo's prompts in their order, so many at once, through the front door of a real cluster: to
workers that publish their blocks, and to the same engines with an agent beside each, which takes
them for servers that publish nothing. Answers are short, as what counts is what of prompts is
cached.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from app.core.settings.agent import EngineAgentSettings
from app.core.settings.router import RouterSettings
from app.core.settings.worker import WorkerSettings
from app.http.server import run
from app.local.cluster import Cluster
from app.options import FACTOR
from app.simulation.profiles import PROFILES
from loadtest.client import Outcome, clock
from loadtest.command import option, read, trace_option
from loadtest.door_client import DoorClient
from loadtest.experiment import Rows, experiment, measured
from loadtest.scenario import warm
from loadtest.traces import TraceRequest

BLOCK_SIZE = 64
OUTPUT_TOKENS = 8
DEADLINE_S = 600.0


async def send(url: str, prompts: Sequence[TraceRequest], at_once: int) -> list[Outcome]:
    """One after another, so many at once."""
    waiting = list(reversed(prompts))
    outcomes: list[Outcome] = []

    async def client(door: DoorClient) -> None:
        while waiting:
            turn = waiting.pop()
            prompt = turn.prompt(0).astype("<u4", copy=False).tobytes()
            sent = await door.send(
                f"approximate-{turn.index}",
                lambda prompt=prompt: prompt,  # type: ignore[misc]
                output_tokens=min(turn.output_tokens, OUTPUT_TOKENS),
                arrival=clock(),
            )
            outcomes.append(sent)

    async with DoorClient(url, deadline_s=DEADLINE_S) as door, asyncio.TaskGroup() as tasks:
        for _ in range(at_once):
            tasks.create_task(client(door))
    return outcomes


def play(
    prompts: Sequence[TraceRequest],
    at_once: int,
    is_exact: bool,
    number: int,
    speedup: float,
    _: int,
) -> Mapping[str, Any]:
    def cluster(num_workers: int, **more: Any) -> Cluster:
        return Cluster(
            num_workers=num_workers,
            num_replicas=1,
            haproxy=False,
            router=RouterSettings(log_level="error", redis_timeout_ms=5000),
            worker=WorkerSettings(speedup=speedup, block_size=BLOCK_SIZE, log_level="warning"),
            **more,
        )

    with ExitStack() as stack:
        asked = stack.enter_context(cluster(number))
        if not is_exact:
            agent = EngineAgentSettings(
                log_level="error", memory_folder=stack.enter_context(TemporaryDirectory())
            )
            engines = [worker.url for worker in asked.workers]
            asked = stack.enter_context(cluster(0, engines=engines, agent=agent))
        outcomes = run(send(asked.balancer_url, prompts, at_once))
    return measured(warm(outcomes), PROFILES["70b-4xh100"])


def rows(trace_file: Path, requests: int, at_once: tuple[int, ...], **fleet: Any) -> Rows:
    trace = read(trace_file).cut(requests=requests)
    prompts = [turn for session in trace.sessions for turn in session.turns]
    return {
        "": {
            f"{many} | {kind}": lambda seed, many=many, kind=kind: play(
                prompts, many, kind == "exact", _=seed, **fleet
            )
            for many in at_once
            for kind in ("exact", "approximate")
        }
    }


main = experiment(
    rows,
    (
        ("failed", "failed", "{:.0f}"),
        ("from cache", "hit_rate", "{:.1%}"),
        ("TTFT, s", "ttft_mean_s", "{:.3f}"),
    ),
    trace_option,
    option("--engines number", 4),
    option("--requests", 1800),
    option("--at-once", (1, 32), "So many requests at once.", several=True),
    option("--speedup", 100.0, "Of the engines' clock.", FACTOR),
    labels="at once | engines are",
    one_by_one=True,
)

if __name__ == "__main__":
    main()
