"""A trace played once against simulated workers, in virtual time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

import numpy as np

from app.core.settings.kinds import PRIORITIES
from app.policy.transfer import TransferKind
from app.simulation.setting import Setting
from loadtest.client import Outcome
from loadtest.figures import Figures, Played
from loadtest.ideal import ideal
from loadtest.processes import forked
from loadtest.report import PolicyRun, PolicySummary, summarise
from loadtest.slo import meets_slo, token_s
from loadtest.traces import Trace
from loadtest.virtual import Simulation, TracePrompts

T = TypeVar("T")

IDEAL = "ideal"
"""Not a policy, but a yardstick for them: see loadtest/ideal.py."""
WARMUP = 0.25


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


def simulate(scenario: Scenario, policy: str, load: float, seed: int = 0) -> Figures:
    """Play the scenario's trace once; the first quarter of the requests is not measured."""
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
    run = PolicyRun(policy, trace.name, 1.0, load, WARMUP, tuple(outcomes), workers)
    good = sum(meets_slo(outcome, setting.profiles[0]) for outcome in run.measured)
    per_token_s = [token_s(outcome) for outcome in run.measured if outcome.output_tokens > 1]
    span_s = run.measured[-1].arrival_s - run.measured[0].arrival_s
    return Figures(
        policy=policy,
        load=load,
        seed=seed,
        summary=summarise(run),
        within_slo=good / len(run.measured),
        goodput_per_s=good / span_s if span_s else None,
        token_s=float(np.mean(per_token_s)) if per_token_s else None,
        token_p99_s=float(np.percentile(per_token_s, 99)) if per_token_s else None,
        split=kinds[TransferKind.SPLIT] / len(outcomes),
        fetched=kinds[TransferKind.FETCH] / len(outcomes),
        preemptions=preemptions,
        conflicts=conflicts,
        by_priority=_by_priority(played, run),
    )


def _by_priority(trace: Trace, run: PolicyRun) -> dict[str, PolicySummary]:
    of = {r.index: r.priority for session in trace.sessions for r in session.turns}
    groups: dict[str, list[Outcome]] = {}
    for outcome in run.measured:
        groups.setdefault(of[int(outcome.request_id)], []).append(outcome)
    return {
        priority: summarise(replace(run, outcomes=tuple(groups[priority]), warmup=0.0))
        for priority in PRIORITIES
        if len(groups) > 1 and priority in groups
    }


_trace: Trace
"""What the processes play. Inherited, because sending it takes long."""


@contextmanager
def processes(trace: Trace, number: int) -> Iterator[Executor]:
    """Processes for `with_trace` and `play`."""
    global _trace
    _trace = trace
    with forked(number) as executor:
        yield executor


def with_trace(function: Callable[..., T], setting: Setting, *args: Any, **kwargs: Any) -> T:
    """In one of `processes`: the function of a scenario with their trace."""
    return function(Scenario(_trace, setting), *args, **kwargs)


def play(
    executor: Executor,
    rows: Mapping[str, tuple[Setting, str]],
    loads: Sequence[float],
    seeds: int,
) -> Iterator[tuple[float, Played]]:
    """For each load, the figures of every seed of every row. rows: settings and policies by name.

    executor: of `processes`.
    """
    running = {
        load: {
            name: [
                executor.submit(with_trace, simulate, setting, policy, load, seed)
                for seed in range(seeds)
            ]
            for name, (setting, policy) in rows.items()
        }
        for load in loads
    }
    for load, at_load in running.items():
        yield load, {name: [one.result() for one in those] for name, those in at_load.items()}
