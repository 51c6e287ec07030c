"""Several cells against one namespace of as many workers, in virtual time.

    python -m loadtest.experiments.cells --trace conversation.jsonl --load 2

A cell is a namespace with a Redis, routers and workers of its own. What stands before the cells
sees neither caches nor loads, only a request and how many each cell has yet to answer. Rows: one
namespace; cells by chance; those with the fewest requests; by a hash of what a request begins with,
and by the same unless a cell then had too many (consistent hashing with bounded loads, Mirrokni,
Thorup and Zadimoghaddam 2018, as `hash-balance-factor` of HAProxy). Requests begin with their first
blocks or, in sessions of several turns, with what their first turn was.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
from xxhash import xxh3_64_intdigest

from app.options import FACTOR, Number
from app.simulation.fleet import SimFleet
from app.simulation.flights import SimAnswer
from app.simulation.setting import Setting
from app.simulation.steps import SimRequest
from loadtest.command import option, read, trace_option
from loadtest.experiment import Rows, experiment, measured
from loadtest.scenario import offered, warm
from loadtest.traces import Session, Trace
from loadtest.virtual import Simulation, TracePrompts

LATENCY = "latency"

Key = Callable[[Session, SimRequest], bytes]


def first_blocks(number: int, _: Session, request: SimRequest) -> bytes:
    return repr(request.blocks[:number][-1:]).encode()


def first_turn(session: Session, _: SimRequest) -> bytes:
    return str(session.turns[0].index).encode()


@dataclass(frozen=True, slots=True)
class Door:
    """Chooses a cell. key: None chooses by requests alone.

    bound: how many times the mean under way a cell may have; infinite: any number.
    """

    key: Key | None = None
    bound: float = math.inf

    def choose(
        self,
        session: Session,
        request: SimRequest,
        under_way: Sequence[int],
        rng: np.random.Generator,
    ) -> int:
        """under_way: requests that each cell has yet to answer."""
        order: list[int] = rng.permutation(len(under_way)).tolist()
        if self.key is not None:
            key = self.key(session, request)
            order = sorted(order, key=lambda cell: xxh3_64_intdigest(key, seed=cell))
        most = self.bound * (sum(under_way) + 1) / len(under_way)
        return next((cell for cell in order if under_way[cell] < most), order[0])


class CellSimulation(Simulation):
    """A Simulation with the workers of the setting divided among cells. Workers of the outcomes
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
        self.requests[cell] += 1
        self._under_way[cell] += 1

        def end(answer: SimAnswer, now_s: float) -> None:
            self._under_way[cell] -= 1
            self._end(session, turn, answer, now_s)

        self._cells[cell].ask(request, end)


def play(
    trace: Trace, setting: Setting, num_cells: int, door: Door, load: float, seed: int
) -> Mapping[str, Any]:
    """The first quarter of the requests is not measured but in `busiest`: the share of all requests
    that the busiest cell got, over its fair share."""
    setting = replace(setting, seed=seed)
    simulation = CellSimulation(LATENCY, setting, TracePrompts(setting.block_size), num_cells, door)
    outcomes = simulation.run(offered(trace, load))
    busiest = max(simulation.requests.values()) * num_cells / len(outcomes)
    return measured(warm(outcomes), setting.profiles[0]) | {"busiest": busiest}


def doors(
    trace: Trace, num_cells: int, nums_blocks: Sequence[int], bound: float
) -> dict[str, tuple[int, Door]]:
    """Returns the rows by name: numbers of cells, and how one is chosen."""
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
    by_load = {"random": (num_cells, Door()), "fewest requests": (num_cells, Door(bound=1.0))}
    return {"one namespace": (1, Door())} | by_load | hashed


def rows(
    trace_file: Path,
    requests: int | None,
    load: float,
    num_workers: int,
    num_cells: int,
    nums_blocks: tuple[int, ...],
    bound: float,
) -> Rows:
    if num_workers % num_cells:
        raise click.UsageError(f"{num_workers} workers are no {num_cells} cells of the same size")
    trace = read(trace_file).cut(requests=requests)
    setting = Setting(num_workers=num_workers)
    title = f"{trace.name} at {load:g}x the recorded rate, {num_workers} workers, {num_cells} cells"
    return {
        title: {
            name: partial(play, trace, setting, number, door, load)
            for name, (number, door) in doors(trace, num_cells, nums_blocks, bound).items()
        }
    }


main = experiment(
    rows,
    (
        ("from cache", "hit_rate", "{:.1%}"),
        ("TTFT mean, s", "ttft_mean_s", "{:.2f}"),
        ("p99", "ttft_p99_s", "{:.1f}"),
        ("whole request, s", "request_mean_s", "{:.2f}"),
        ("busiest cell / mean", "busiest", "{:.2f}"),
    ),
    trace_option,
    option("--requests", None, "Play at most this many."),
    option("--load", 2.0, "Times the recorded rate.", FACTOR),
    option("--workers num_workers", 16, "Of all cells."),
    option("--cells num_cells", 2),
    option(
        "--blocks nums_blocks",
        (1, 4),
        "Leading blocks of a prompt that are hashed, of 256 tokens.",
        several=True,
    ),
    option(
        "--bound", 1.5, "Times the mean of requests under way that a cell may have.", Number(1, 100)
    ),
)

if __name__ == "__main__":
    main()
