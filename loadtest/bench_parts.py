"""Where the CPU time of a decision goes: the parts of a replica, in µs per request.

    python -m loadtest.bench_parts

A server samples its own stack at every tick of its CPU time, while 32 clients send requests as in
bench_decision. Time in the kernel and in libuv counts for the part where Python continues.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from tempfile import TemporaryDirectory
from types import CodeType, FrameType
from typing import Any

import orjson
from rich.console import Console

from app.http.server import run
from loadtest.bench_decision import (
    NUM_TOKENS,
    NUM_WORKERS,
    PER_REPLICA,
    answer_forever,
    register,
    route_forever,
    shapes,
)
from loadtest.command import option, table
from loadtest.harness import bench
from loadtest.servers import Shape, load, server, server_core

TICK_S = 0.004
PARTS = {
    "body: read, packed and checked": ("app.http.body:read_body", "app.edge.ask:parse"),
    "chain: known, or hashed": ("app.router.prompt:Prompt.chain",),
    "lookup: commands, replies, view of the workers": ("app.router.lookup:LookUp.batch",),
    "prices and choice": ("app.policy.plan:WorkerSelector.plan",),
    "reservation: command and reply": ("app.router.decider:Decider._reserve",),
    "stream of decisions": ("app.router.history:History._record_forever",),
    "endpoint: request, answer, queue, counters": (
        *("app.edge.app:Application.__call__", "app.router.router:Router.route"),
        *(
            "app.router.decider:Decider._answer_reserved",
            "app.router.decider:Decider._decide_forever",
        ),
    ),
    "housekeeping": (
        *(
            "app.router.maintenance:Maintenance.run",
            "app.router.measurements:Measurements.follow",
            "app.router.history:History._write_forever",
        ),
    ),
}
"""Functions are given by name, as the measuring process does not import the servers' HTTP code."""
REST = "HTTP and event loop"
"""Time spent in none of these functions."""


def part_of(frame: FrameType | None, part_of_code: dict[CodeType, str]) -> str:
    """The part of the innermost function on the stack that belongs to one."""
    while frame is not None:
        part = part_of_code.get(frame.f_code)
        if part is not None:
            return part
        frame = frame.f_back
    return REST


def sampled(target: Callable[[str, int], None], out: Path, redis_url: str, port: int) -> None:
    """Run `target` until it ends; then write the ticks of each part and the total CPU time."""
    ticks: Counter[str] = Counter()
    codes = {resolve_name(name).__code__: part for part, names in PARTS.items() for name in names}
    signal.signal(signal.SIGPROF, lambda _, frame: ticks.update((part_of(frame, codes),)))
    signal.setitimer(signal.ITIMER_PROF, TICK_S, TICK_S)
    begin = time.process_time()
    target(redis_url, port)
    signal.setitimer(signal.ITIMER_PROF, 0)
    out.write_bytes(orjson.dumps({"ticks": ticks, "cpu_s": time.process_time() - begin}))


def parts_of(redis_url: str, shape: Shape, requests: int) -> dict[str, float]:
    """µs of CPU per request, by part."""
    target = answer_forever if shape.bare else route_forever
    with TemporaryDirectory() as folder:
        out = Path(folder, "ticks.json")
        with server(partial(sampled, target, out), redis_url, server_core(0)) as serving:
            run(load([serving], redis_url, shape, PER_REPLICA, requests))
        profile: dict[str, Any] = orjson.loads(out.read_bytes())
    us_per_tick = profile["cpu_s"] * 1e6 / requests / sum(profile["ticks"].values())
    return {part: profile["ticks"].get(part, 0) * us_per_tick for part in (*PARTS, REST)}


def measure(redis_url: str, requests: int) -> dict[str, dict[str, float]]:
    """The parts of each shape of bench_decision."""
    asyncio.run(register(redis_url))
    return {shape.name: parts_of(redis_url, shape, requests) for shape in shapes()}


def show(results: dict[str, dict[str, float]], console: Console) -> None:
    title = f"µs of CPU a request: {PER_REPLICA} at once of {NUM_TOKENS:,} tokens"
    cells = table("", *results, left=("",), title=f"{title}, {NUM_WORKERS} workers")
    for part in (*PARTS, REST):
        cells.add_row(part, *(f"{parts[part]:.0f}" for parts in results.values()))
    cells.add_row("in all", *(f"{sum(parts.values()):.0f}" for parts in results.values()))
    console.print(cells)


main = bench(measure, show, option("--requests", 20_000, "Requests per shape."), redis=True)

if __name__ == "__main__":
    main()
