"""Several cells against one namespace of as many workers, in virtual time.

    python -m loadtest.cells --trace conversation.jsonl --load 2

A cell is a namespace with a Redis, routers and workers of its own. What stands before the cells
sees neither caches nor loads, only a request and how many each cell has yet to answer. Rows: one
namespace; cells by chance; those with the fewest requests; by a hash of what a request begins with,
and by the same unless a cell then had too many (consistent hashing with bounded loads, Mirrokni,
Thorup and Zadimoghaddam 2018, as `hash-balance-factor` of HAProxy), also bounded by the tokens of
prompts, and by the less loaded of the two cells that the hash names first. Requests begin with
their first blocks or, in sessions of several turns, with what their first turn was.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache, partial
from pathlib import Path

import click
import numpy as np
from xxhash import xxh3_64_intdigest

from app.options import FACTOR, Number
from app.simulation.fleet import SimFleet
from app.simulation.flights import SimAnswer
from app.simulation.setting import Setting
from app.simulation.steps import SimRequest
from loadtest.command import Command, jobs_option, json_option, option, read, save, trace_option
from loadtest.processes import forked
from loadtest.report import PolicyRun, summarise
from loadtest.scenario import WARMUP, offered
from loadtest.traces import Session, Trace
from loadtest.virtual import Simulation, TracePrompts

LATENCY = "latency"

Key = Callable[[Session, SimRequest], bytes]
"""What requests that belong together have in common."""


def first_blocks(number: int, _: Session, request: SimRequest) -> bytes:
    return repr(request.blocks[:number][-1:]).encode()


def first_turn(session: Session, _: SimRequest) -> bytes:
    return str(session.turns[0].index).encode()


@dataclass(frozen=True, slots=True)
class Door:
    """Chooses a cell. key: None chooses by requests alone.

    bound: how many times the mean under way a cell may have; infinite: any number. by_tokens: of
    prompts, in place of requests. of_two: the one with less of the first two by the hash.
    """

    key: Key | None = None
    bound: float = math.inf
    by_tokens: bool = False
    of_two: bool = False

    def weight(self, request: SimRequest) -> int:
        return request.prompt_tokens if self.by_tokens else 1

    def choose(
        self,
        session: Session,
        request: SimRequest,
        under_way: Sequence[int],
        rng: np.random.Generator,
    ) -> int:
        """under_way: weights of what each cell has yet to answer."""
        order: list[int] = rng.permutation(len(under_way)).tolist()
        if self.key is not None:
            key = self.key(session, request)
            order = sorted(order, key=lambda cell: xxh3_64_intdigest(key, seed=cell))
        if self.of_two:
            return min(order[:2], key=under_way.__getitem__)
        most = self.bound * (sum(under_way) + self.weight(request)) / len(under_way)
        return next((cell for cell in order if under_way[cell] < most), order[0])


class CellSimulation(Simulation):
    """As Simulation, with the workers of the setting divided among cells. Workers of the outcomes
    are named by their place in their cell, and counted by cell in `requests`."""

    def __init__(
        self, policy: str, setting: Setting, prompts: TracePrompts, num_cells: int, door: Door
    ) -> None:
        each = replace(setting, num_workers=setting.num_workers // num_cells)
        super().__init__(policy, each, prompts)
        others = (SimFleet(policy, each, self.fleet.agenda) for _ in range(num_cells - 1))
        self._cells = [self.fleet, *others]
        self._under_way = [0] * num_cells
        self._door = door
        self._rng = np.random.default_rng(setting.seed)
        self.requests: Counter[int] = Counter()

    def _arrive(self, session: Session, turn: int) -> None:
        request = self._prompts.of(session.turns[turn])
        cell = self._door.choose(session, request, self._under_way, self._rng)
        weight = self._door.weight(request)
        self.requests[cell] += 1
        self._under_way[cell] += weight

        def end(answer: SimAnswer, now_s: float) -> None:
            self._under_way[cell] -= weight
            self._end(session, turn, answer, now_s)

        self._cells[cell].ask(request, end)


@dataclass(frozen=True, slots=True)
class CellFigures:
    """Of one row and seed; the first quarter of the requests is not measured but in `busiest`."""

    hit_rate: float
    ttft_mean_s: float
    ttft_p99_s: float
    request_mean_s: float
    busiest: float
    """Share of all requests that the busiest cell got, over its fair share."""
    failed: int


@cache
def _prompts(block_size: int) -> TracePrompts:
    return TracePrompts(block_size)


def simulate(
    trace: Trace, setting: Setting, num_cells: int, door: Door, load: float, seed: int
) -> CellFigures:
    setting, prompts = replace(setting, seed=seed), _prompts(setting.block_size)
    simulation = CellSimulation(LATENCY, setting, prompts, num_cells, door)
    outcomes = simulation.run(offered(trace, load))
    summary = summarise(PolicyRun(LATENCY, trace.name, 1.0, load, WARMUP, tuple(outcomes), ()))
    return CellFigures(
        hit_rate=summary.hit_rate or 0.0,
        ttft_mean_s=summary.ttft_mean_s or 0.0,
        ttft_p99_s=summary.ttft_p99_s or 0.0,
        request_mean_s=summary.request_mean_s or 0.0,
        busiest=max(simulation.requests.values()) * num_cells / len(outcomes),
        failed=summary.failed,
    )


def rows(
    trace: Trace, num_cells: int, nums_blocks: Sequence[int], bound: float
) -> dict[str, tuple[int, Door]]:
    """What is compared, by name: numbers of cells, and how one is chosen."""
    keys: dict[str, Key] = {
        f"first {number} blocks": partial(first_blocks, number) for number in nums_blocks
    }
    if any(len(session.turns) > 1 for session in trace.sessions):
        keys["session"] = first_turn
    hashed = {
        f"hash of {name}{f', bounded by {most:g}' * math.isfinite(most)}": (
            num_cells,
            Door(key, most),
        )
        for name, key in keys.items()
        for most in (math.inf, bound)
    }
    for name, key in keys.items():
        by_tokens = Door(key, bound, by_tokens=True)
        hashed[f"hash of {name}, bounded by {bound:g} in tokens"] = (num_cells, by_tokens)
        if num_cells > 2:
            of_two = Door(key, of_two=True)
            hashed[f"hash of {name}, fewer requests of two"] = (num_cells, of_two)
    by_load = {"random": (num_cells, Door()), "fewest requests": (num_cells, Door(bound=1.0))}
    return {"one namespace": (1, Door())} | by_load | hashed


def table(played: Mapping[str, Sequence[CellFigures]]) -> str:
    """In Markdown, means over seeds."""
    lines = [
        "| | from cache | TTFT mean, s | p99 | whole request, s | busiest cell / mean |",
        "|---|---|---|---|---|---|",
    ]
    for name, seeds in played.items():
        hits, ttft_s, p99_s, whole_s, busiest, _ = np.mean([astuple(one) for one in seeds], axis=0)
        lines.append(
            f"| {name} | {hits:.1%} | {ttft_s:.2f} | {p99_s:.1f} | {whole_s:.2f} | {busiest:.2f} |"
        )
    return "\n".join(lines)


@click.command(cls=Command)
@trace_option
@option("--requests", None, "Play at most this many.")
@option("--load", 2.0, "Times the recorded rate.", FACTOR)
@option("--workers num_workers", 16, "Of all cells.")
@option("--cells num_cells", 2)
@option(
    "--blocks nums_blocks",
    (1, 4),
    "Leading blocks of a prompt that are hashed, of 256 tokens.",
    several=True,
)
@option(
    "--bound", 1.5, "Times the mean of requests under way that a cell may have.", Number(1, 100)
)
@option("--seeds", 1, "Runs of each row.")
@jobs_option
@json_option
def main(
    trace_file: Path,
    requests: int | None,
    load: float,
    num_workers: int,
    num_cells: int,
    nums_blocks: tuple[int, ...],
    bound: float,
    seeds: int,
    jobs: int,
    json_file: Path | None,
) -> None:
    """Compare cells, however requests come to them, with one namespace."""
    if num_workers % num_cells:
        raise click.UsageError(f"{num_workers} workers are no {num_cells} cells of the same size")
    trace = read(trace_file).cut(requests=requests)
    setting = Setting(num_workers=num_workers)
    compared = rows(trace, num_cells, nums_blocks, bound)
    with forked(jobs) as executor:
        running = {
            name: [
                executor.submit(simulate, trace, setting, *row, load, seed) for seed in range(seeds)
            ]
            for name, row in compared.items()
        }
        played = {name: [one.result() for one in those] for name, those in running.items()}
    title = f"{trace.name} at {load:g}x the recorded rate, {num_workers} workers, {num_cells} cells"
    click.echo(f"\n{title}\n\n{table(played)}")
    save(played, json_file)


if __name__ == "__main__":
    main()
