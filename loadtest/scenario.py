"""A trace played once against simulated workers, in virtual time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from app.policy.transfer import TransferKind
from app.simulation.setting import Setting
from loadtest.client import Outcome
from loadtest.experiment import measured
from loadtest.ideal import ideal
from loadtest.traces import Trace
from loadtest.virtual import Simulation, TracePrompts

IDEAL = "ideal"
"""Not a policy, but a yardstick for them: see loadtest/ideal.py."""
NO_LOAD = 0.1
"""A load at which requests hardly ever meet."""
KNEE = 3.0
"""Multiple of the mean TTFT without load: where the queues begin to run away."""
MAX_LOAD = 64.0
STEP = 1.02
"""How close a search comes, as a ratio of loads."""
WARMUP = 0.25
"""Share of the requests, the first ones, that the figures leave out: caches start empty."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything but policy, load and seed."""

    trace: Trace
    setting: Setting


@cache
def _prompts(trace_name: str, block_size: int) -> TracePrompts:
    return TracePrompts(block_size)


def offered(trace: Trace, load: float) -> Trace:
    """The trace at a multiple of its recorded rate.

    Sessions that wait for their answers are copied. If they were compressed in time instead, all of
    them would soon be under way, and the load could rise no further.
    """
    is_closed_loop = any(len(session.turns) > 1 for session in trace.sessions)
    copies = math.ceil(load) if is_closed_loop else 1
    return (trace.repeated(copies) if copies > 1 else trace).at_load(load / copies)


def warm(outcomes: Sequence[Outcome]) -> Sequence[Outcome]:
    return outcomes[int(len(outcomes) * WARMUP) :]


def simulate(scenario: Scenario, policy: str, load: float, seed: int = 0) -> dict[str, Any]:
    """Play the scenario's trace once. Returns the figures of `measured`, and of all requests:

    `split`, `fetched`: shares of requests whose prompt a source computed, for which a prefix was
    fetched; `preemptions` on all workers; `conflicts`: reservations refused because another
    replica's came first.
    """
    trace, setting = scenario.trace, replace(scenario.setting, seed=seed)
    played = offered(trace, load)
    prompts = _prompts(trace.name, setting.block_size)
    preemptions, conflicts, kinds = 0, 0, Counter[TransferKind]()
    if policy == IDEAL:
        outcomes = ideal(setting, played, prompts)
    else:
        simulation = Simulation(policy, setting, prompts)
        outcomes = simulation.run(played)
        conflicts, kinds = simulation.fleet.conflicts, simulation.kinds
        preemptions = sum(worker.engine.num_preemptions for worker in simulation.fleet.workers)
    workers = tuple(f"w{i}:0" for i in range(setting.num_workers))
    return measured(warm(outcomes), setting.profiles[0], workers) | {
        "load": load,
        "split": kinds[TransferKind.SPLIT] / len(outcomes) if setting.link else None,
        "fetched": kinds[TransferKind.FETCH] / len(outcomes) if setting.link else None,
        "preemptions": preemptions,
        "conflicts": conflicts,
    }


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
