"""How much load a policy bears in virtual time: the knee, and what meets the SLO."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from loadtest.scenario import Scenario, simulate

NO_LOAD = 0.1
"""A load at which requests hardly ever meet."""
KNEE = 3.0
"""Multiple of the mean TTFT without load: where the queues begin to run away."""
MAX_LOAD = 64.0
STEP = 1.02
"""How close a search comes, as a ratio of loads."""


def highest(is_fine: Callable[[float], bool]) -> float:
    """The highest load that is fine, to within STEP; 0 if none is, MAX_LOAD if all are."""
    low, high = 0.0, 1.0
    while is_fine(high):
        low, high = high, 2 * high
        if low >= MAX_LOAD:
            return MAX_LOAD
    while high / STEP > low and high > NO_LOAD:
        middle = math.sqrt(low * high) if low else high / 2
        low, high = (middle, high) if is_fine(middle) else (low, middle)
    return low


def knee(scenario: Scenario, policy: str) -> float:
    """The highest load at which mean TTFT is at most KNEE times that without load."""
    ttft_s = partial(_ttft_mean_s, scenario, policy)
    bound_s = KNEE * ttft_s(NO_LOAD)
    return highest(lambda load: ttft_s(load) <= bound_s)


def _ttft_mean_s(scenario: Scenario, policy: str, load: float) -> float:
    mean_s = simulate(scenario, policy, load)["ttft_mean_s"]
    return math.inf if mean_s is None else mean_s


def limit(scenario: Scenario, policy: str, share: float, seed: int) -> float:
    """The highest load at which this share of the requests meets the SLO."""
    return highest(lambda load: simulate(scenario, policy, load, seed)["within_slo"] >= share)
