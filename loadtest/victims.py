"""Ways to choose the worker that leaves, to compare the planner's own with."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from numpy.random import Generator

from app.planner.rules.policies import least_valued
from app.planner.rules.state import FleetState, Phase, WorkerState


def newest(state: FleetState, _: Generator) -> str:
    """The one that joined last: what Kubernetes removes."""
    return max(state.those(Phase.LIVE), key=lambda worker: worker.since_s).name


def least_loaded(state: FleetState, _: Generator) -> str:
    """The one with the fewest requests in flight."""

    def requests(worker: WorkerState) -> float:
        return worker.load.requests if worker.load is not None else 0.0

    return min(state.those(Phase.LIVE), key=requests).name


def at_random(state: FleetState, rng: Generator) -> str:
    live = state.those(Phase.LIVE)
    return live[int(rng.integers(len(live)))].name


VICTIMS: Mapping[str, Callable[[FleetState, Generator], str]] = {
    "unique_value": lambda state, _: least_valued(state),
    "newest": newest,
    "least_loaded": least_loaded,
    "random": at_random,
}
"""By the names that `loadtest.autoscale --victim` uses. Each needs a live worker."""
