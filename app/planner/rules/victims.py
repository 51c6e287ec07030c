"""Which worker to lose: what each one's cache is worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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


def least_valued(state: FleetState) -> str:
    """The live worker whose cache is worth least, with the prefills promised to it; there must be
    one."""
    return min(state.those(Phase.LIVE), key=_loss_s).name


def least_loss_s(state: FleetState) -> float:
    """Seconds of prefill that losing that worker would cost; 0 if there is none."""
    return min(map(_loss_s, state.those(Phase.LIVE)), default=0.0)


def _loss_s(worker: WorkerState) -> float:
    return worker.unique_value_s + (worker.load.queue_s if worker.load is not None else 0.0)
