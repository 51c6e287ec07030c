"""What a request costs the doors of two checkouts, in turn on the same core."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import click
from rich.table import Table

from app.http.server import run
from app.local.redis_server import EmbeddedRedis, free_port
from loadtest.harness import grid, in_turn
from loadtest.processes import CORES
from loadtest.servers import Server, Shape, figures, load, server_core, until_serving

START_S = 60.0
_REGISTER = "import asyncio, sys; from loadtest.bench_door import register; "
_REGISTER += "asyncio.run(register(*sys.argv[1:]))"


@dataclass(frozen=True)
class Door:
    """A checkout's, which decides by a Redis of its own: what is in it may differ."""

    serving: Server
    redis_url: str


@contextmanager
def door_of(
    checkout: Path, python: str, engine_url: str, namespace: str, tokenizers: str
) -> Iterator[Door]:
    """The checkout's own code registers the engine, and its own command starts the door.

    Raises ClickException if the engine cannot be registered.
    """
    port = free_port()
    with EmbeddedRedis() as redis:
        assert redis.pid is not None
        os.sched_setaffinity(redis.pid, CORES[:1])
        environment = {
            **os.environ,
            "REDIS_URL": redis.url,
            "KVROUTE_PORT": str(port),
            "KVROUTE_NAMESPACE": namespace,
            "KVROUTE_TOKENIZERS": tokenizers,
            "KVROUTE_REDIS_TIMEOUT_MS": "5000",
            "KVROUTE_LOG_LEVEL": "error",
        }
        # Code is found in the folder that a process starts in, before any that is installed.
        about: dict[str, Any] = {"cwd": checkout, "env": environment}
        command = [python, "-c", _REGISTER, redis.url, engine_url]
        ran = subprocess.run(command, **about, capture_output=True, text=True, timeout=START_S)
        if ran.returncode:
            raise click.ClickException(f"{checkout} cannot register a worker: {ran.stderr}")
        with subprocess.Popen([python, "-m", "app.cli", "router"], **about) as process:
            os.sched_setaffinity(process.pid, {server_core(0)})
            try:
                yield Door(Server(process.pid, port), redis.url)
            finally:
                process.terminate()


def compare(
    doors: Sequence[Door], shapes: Sequence[Shape], concurrency: int, requests: int, rounds: int
) -> dict[str, dict[str, float]]:
    """By shape: µs of CPU a request at the first door and at the second, and the median of how many
    times the first's the second's is, round by round."""
    for door in doors:
        for shape in shapes:
            run(until_serving(door.serving.port, shape))

    def cpu_us(door: Door, shape: Shape) -> float:
        took = run(load([door.serving], door.redis_url, shape, concurrency, requests))
        return figures([took])["cpu_us"]

    ways = {(s.name, door): partial(cpu_us, door, s) for s in shapes for door in doors}
    made = in_turn(ways, rounds)
    compared = {}
    for shape in shapes:
        other, here = (made[shape.name, door] for door in doors)
        times = [b / a for a, b in zip(other, here, strict=True)]
        compared[shape.name] = {
            "other_us": median(other),
            "here_us": median(here),
            "times": median(times),
        }
    return compared


def shown(result: dict[str, dict[str, float]]) -> Table:
    columns = {
        "other, µs of CPU": "{other_us:.0f}",
        "this one, µs of CPU": "{here_us:.0f}",
        "times": "{times:.2f}",
    }
    return grid([""], columns, (([shape], numbers) for shape, numbers in result.items()))
