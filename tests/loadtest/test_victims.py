"""Ways to choose the worker that leaves."""

import numpy as np
import pytest

from app.planner.rules.state import FleetState, Phase, WorkerLoad, WorkerState
from loadtest.victims import VICTIMS


def worker(name, since_s, requests, value_s):
    load = WorkerLoad(0.0, 0.0, 0.0, 0.0, requests)
    return WorkerState(name, Phase.LIVE, since_s, load, value_s)


FLEET = FleetState(
    100.0,
    [
        worker("a", since_s=0, requests=1, value_s=40.0),
        worker("b", since_s=90, requests=5, value_s=30.0),
        worker("c", since_s=50, requests=6, value_s=12.0),
        WorkerState("leaving", Phase.DRAINING, 95.0),
    ],
)


@pytest.mark.parametrize(
    ("name", "leaves"),
    [("unique_value", "c"), ("newest", "b"), ("least_loaded", "a"), ("random", "abc")],
)
def test_each_way_to_choose_a_victim(name, leaves):
    rng = np.random.default_rng(0)
    assert {VICTIMS[name](FLEET, rng) for _ in range(50)} == set(leaves)
