"""What of prompts comes from cache where engines do not tell what they cache, and where they do.

    python -m loadtest.approximate --at-once 1 --at-once 32

The demo's prompts in their order, so many at once, through the front door, to simulated engines
with an agent beside each: once with KV events, once without. Answers are short, as what counts is
what of prompts is cached.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import click
from rich.table import Table

from app.core.settings.agent import EngineAgentSettings
from app.core.settings.router import RouterSettings
from app.core.settings.worker import WorkerSettings
from app.http.server import run
from app.local.child import start_child
from app.local.cluster import Cluster
from app.local.redis_server import free_port
from app.options import FACTOR
from loadtest.client import Outcome, clock
from loadtest.command import Command, json_option, option, read, save, trace_option
from loadtest.console import Console
from loadtest.door_client import DoorClient
from loadtest.traces import TraceRequest

BLOCK_SIZE = 64
WARM_UP = 0.25
"""Share of the prompts that the figures leave out, as those of the demo do."""
OUTPUT_TOKENS = 8
DEADLINE_S = 600.0
FACES = {"exact": "vllm", "approximate": "vllm-without-events"}


@dataclass(frozen=True, slots=True)
class PlayedKind:
    """cached: share of the prompts' tokens that engines had cached, 0-1."""

    kind: str
    at_once: int
    requests: int
    failed: int
    cached: float
    ttft_s: float


@contextmanager
def engines(number: int, face: str, speedup: float) -> Iterator[list[str]]:
    """Base URLs of simulated engines that are being started."""
    ports = [free_port() for _ in range(number)]
    with ExitStack() as running:
        for port in ports:
            process = start_child(
                (
                    *(sys.executable, "-P", "-m", "app.cli", "worker", f"--port={port}"),
                    *(f"--publish-events={face}", f"--speedup={speedup}", "--log-level=warning"),
                    f"--block-size={BLOCK_SIZE}",
                )
            )
            running.callback(process.wait)
            running.callback(process.terminate)
        yield [f"http://127.0.0.1:{port}" for port in ports]


async def play(url: str, prompts: Sequence[TraceRequest], at_once: int) -> list[Outcome]:
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


def played(kind: str, at_once: int, outcomes: Sequence[Outcome]) -> PlayedKind:
    counted = outcomes[round(WARM_UP * len(outcomes)) :]
    answered = [one for one in counted if one.first_token_s is not None]
    tokens = sum(one.prompt_tokens for one in answered)
    waited = [one.first_token_s - one.arrival_s for one in answered if one.first_token_s]
    return PlayedKind(
        kind,
        at_once,
        len(counted),
        len(counted) - len(answered),
        sum(one.cached_tokens for one in answered) / max(1, tokens),
        sum(waited) / max(1, len(waited)),
    )


@click.command(cls=Command)
@trace_option
@option("--engines number", 4)
@option("--requests", 1800)
@option("--at-once", (1, 32), "So many requests at once.", several=True)
@option("--speedup", 100.0, "Of the engines' clock.", FACTOR)
@option(
    "--prediction-ttl-s keeps_s", 120.0, "As the routers'; in seconds of the wall clock.", FACTOR
)
@json_option
def main(
    trace_file: Path,
    number: int,
    requests: int,
    at_once: tuple[int, ...],
    speedup: float,
    keeps_s: float,
    json_file: Path | None,
) -> None:
    """Play the demo's prompts to engines that tell what they cache, and to others."""
    trace = read(trace_file).cut(requests=requests)
    prompts = [turn for session in trace.sessions for turn in session.turns]
    kinds_played = []
    for many in at_once:
        for kind, face in FACES.items():
            with (
                TemporaryDirectory() as memory,
                engines(number, face, speedup) as urls,
                Cluster(
                    num_workers=0,
                    num_replicas=1,
                    haproxy=False,
                    router=RouterSettings(
                        log_level="error", redis_timeout_ms=5000, prediction_ttl_s=keeps_s
                    ),
                    worker=WorkerSettings(),
                    engines=urls,
                    agent=EngineAgentSettings(log_level="error", memory_folder=memory),
                ) as cluster,
            ):
                outcomes = run(play(cluster.balancer_url, prompts, many))
            kinds_played.append(played(kind, many, outcomes))
    Console().print(table(kinds_played))
    if json_file is not None:
        save([asdict(one) for one in kinds_played], json_file)


def table(played: Sequence[PlayedKind]) -> Table:
    exact = {one.at_once: one.cached for one in played if one.kind == "exact"}
    shown = Table("at once", "engines are", "failed", "from cache", "of exact", "TTFT, s")
    for one in played:
        of_exact = one.cached / exact[one.at_once] if exact[one.at_once] else 0.0
        shown.add_row(
            *(str(one.at_once), one.kind, str(one.failed)),
            *(f"{one.cached:.1%}", f"{of_exact:.2f}", f"{one.ttft_s:.3f}"),
        )
    return shown


if __name__ == "__main__":
    main()
