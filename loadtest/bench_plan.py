"""What a plan costs: prices, choice and what to reserve, with and without sources.

    python -m loadtest.bench_plan

The time of the fastest of many short rounds, which other processes disturb least.
"""

from __future__ import annotations

import time
from functools import partial

import numpy as np
from rich.console import Console

from app.core.loads import Load, Loads, Snapshot
from app.core.overlaps import Overlaps
from app.core.settings.router import RouterSettings
from app.core.types import Incarnation, SequenceHash, TierOverlap, WorkerKey
from app.core.worker_report import WorkerInfo
from app.policy.decision import Query, RouteRequest
from app.policy.plan import Plan, WorkerSelector
from app.policy.view import View
from app.policy.workers import UNMEASURED, Workers
from loadtest.command import option
from loadtest.harness import bench, grid

BLOCKS = 128
PLANS = 20
"""In one round."""
FORMS = {"none": "", "splits": "nixl", "splits and fetches": "kvroute"}
"""Ways of transfer, by what they allow."""


def view_of(workers: int, kv_transfer: str) -> View:
    """Workers with a queue of up to two seconds each."""
    rng = np.random.default_rng(1)
    infos = [
        WorkerInfo(
            WorkerKey(f"w{n}"),
            "http://worker",
            block_size=16,
            kv_total_blocks=25_000,
            max_requests=256,
            kv_transfer=kv_transfer,
            kv_compatible="bench",
        )
        for n in range(workers)
    ]
    loads = {
        Incarnation(n): Load(
            prefill_us=int(rng.integers(2_000_000)),
            blocks=int(rng.integers(20_000)),
            requests=5,
            decoding=2,
        )
        for n in range(workers)
    }
    known = [(inc, info, UNMEASURED) for inc, info in zip(loads, infos, strict=True)]
    return View(Snapshot(5000, Loads.of(loads)), Workers(known))


def query_of(holders: int) -> Query:
    """A prompt of which so many workers hold half."""
    chain = [SequenceHash(n) for n in range(BLOCKS)]
    request = RouteRequest("bench", chain, 16 * BLOCKS, "latency")
    half = TierOverlap(BLOCKS // 2)
    return Query(request, "tag", 1, Overlaps({Incarnation(n): half for n in range(holders)}))


def fastest_us(plan: partial[Plan], rounds: int) -> float:
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(PLANS):
            plan()
        best = min(best, time.perf_counter() - start)
    return best / PLANS * 1e6


def measure(workers: int, rounds: int) -> dict[str, dict[str, float]]:
    """µs of a plan, by where KV may come from, then by who holds half of the prompt."""
    selector = WorkerSelector(RouterSettings())
    result = {}
    for name, way in FORMS.items():
        view = view_of(workers, way)
        result[name] = {
            who: fastest_us(partial(selector.plan, query_of(holders), view), rounds)
            for who, holders in (("nobody", 0), ("one", 1), (f"all {workers}", workers))
        }
    return result


def show(result: dict[str, dict[str, float]], console: Console) -> None:
    columns = {f"held by {who}": f"{{{who}:.0f}}" for who in next(iter(result.values()))}
    rows = (([name], figures) for name, figures in result.items())
    console.print(grid(["sources"], columns, rows, title="µs a plan"))


main = bench(measure, show, option("--workers", 8), option("--rounds", 500))

if __name__ == "__main__":
    main()
