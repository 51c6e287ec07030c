"""Which worker to lose: what each one's cache is worth, and other ways to choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from numpy.random import Generator

from app.core.worker_report import Speed
from app.planner.rules.state import FleetState, PastRequest, Phase, WorkerState, prefill_s

Held = Mapping[str, int]
"""Leading blocks of one prompt that each worker holds now."""


def unique_values(
    recent: Sequence[PastRequest],
    held: Sequence[Held],
    *,
    now_s: float,
    half_life_s: float,
    block_size: int,
    speed: Speed,
) -> dict[str, float]:
    """Seconds of prefill that recent prompts, asked again, would take longer without each worker.

    A prompt counts half for each `half_life_s` since it was asked. Only blocks count that some
    worker held when it was asked: they have been asked for again before. held: of each prompt.
    Workers whose loss would cost nothing are absent.
    """
    values: dict[str, float] = {}
    for asked, blocks in zip(recent, held, strict=True):
        best, second, owner = 0, 0, ""
        for worker, number in blocks.items():
            reused = min(number, asked.best_blocks)
            if reused > best:
                best, second, owner = reused, best, worker
            elif reused > second:
                second = reused
        if best > second:
            lost_s = prefill_s(second * block_size, best * block_size, speed)
            weight = 0.5 ** ((now_s - asked.at_s) / half_life_s)
            values[owner] = values.get(owner, 0.0) + weight * lost_s
    return values


def _in_flight_s(worker: WorkerState) -> float:
    return worker.load.queue_s if worker.load is not None else 0.0


def _requests(worker: WorkerState) -> float:
    return worker.load.requests if worker.load is not None else 0.0


ChooseVictim = Callable[[Sequence[WorkerState], Generator], WorkerState]


def least_unique_value(workers: Sequence[WorkerState], _: Generator) -> WorkerState:
    """The one whose cache is worth least, with the prefills promised to it."""
    return min(workers, key=lambda worker: worker.unique_value_s + _in_flight_s(worker))


def newest(workers: Sequence[WorkerState], _: Generator) -> WorkerState:
    """The one that joined last: what Kubernetes removes."""
    return max(workers, key=lambda worker: worker.since_s)


def least_loaded(workers: Sequence[WorkerState], _: Generator) -> WorkerState:
    """The one with the fewest requests in flight."""
    return min(workers, key=_requests)


def fewest_blocks(workers: Sequence[WorkerState], _: Generator) -> WorkerState:
    """The one that holds the fewest blocks."""
    return min(workers, key=lambda worker: worker.cached_blocks)


def at_random(workers: Sequence[WorkerState], rng: Generator) -> WorkerState:
    return workers[int(rng.integers(len(workers)))]


VICTIMS: Mapping[str, ChooseVictim] = {
    "unique_value": least_unique_value,
    "newest": newest,
    "least_loaded": least_loaded,
    "fewest_blocks": fewest_blocks,
    "random": at_random,
}
"""By the names that settings use."""


def victim(name: str, state: FleetState, rng: Generator) -> str:
    """The live worker that `name`, a key of VICTIMS, would lose; there must be one."""
    return VICTIMS[name](state.those(Phase.LIVE), rng).name
