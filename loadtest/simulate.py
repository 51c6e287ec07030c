"""Policies compared offline: a trace against simulated workers, in virtual time, without sockets.

    python -m loadtest.simulate --policy blocks --policy latency --load 1.1 --load 1.5

The policies, the engine and the books of reservations are the real ones; Redis, HTTP and clocks are
not there, so every decision sees the exact state of the moment, as routers that share one Redis do.
The demo's part of the trace takes a few seconds per policy.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import click
import numpy as np
from rich.console import Console

from app.core.config import POLICY_NAMES, POSITIVE
from app.core.reservations import Load, Reservation
from app.policy.cost import Candidates, RequestSize, predicted_prefill_s
from app.policy.select import choose
from loadtest import report
from loadtest.client import Outcome
from loadtest.report import PolicyRun
from loadtest.traces import DEMO_TRACE, Session, Trace, TraceRequest, read_trace
from workers.engines.profiles import PROFILES
from workers.engines.sim import SimEngine
from workers.engines.steps import Finished, SimRequest, Step
from workers.speed import SpeedLearner

BLOCK_SIZE = 64
SPEED_INTERVAL_S = 1.0
"""How often routers learn of a worker's speed. Live it is ten times a second, for the same values:
they hardly move."""


class Worker:
    """One engine, and what is reserved on it: the books that lua/ keeps in Redis."""

    def __init__(self, profile: str) -> None:
        self.engine = SimEngine(PROFILES[profile], block_size=BLOCK_SIZE)
        self.load = Load()
        self.is_stepping = False
        self.learner = SpeedLearner(PROFILES[profile].max_batch_tokens)
        self.speed = self.learner.speed()
        self._reserved: dict[str, Reservation] = {}
        self._prefilling: list[str] = []

    def reserve(self, reservation: Reservation, now_s: float) -> None:
        self.load.add(reservation, round(now_s * 1000))
        self._reserved[reservation.request_id] = reservation
        self._prefilling.append(reservation.request_id)

    def prefill_complete(self, request_id: str, now_s: float) -> None:
        """As lua/prefill_complete.lua: the next in line becomes the head."""
        reservation = self._reserved[request_id]
        self.load.prefill_tokens -= reservation.prefill_tokens
        self.load.prefill_us -= reservation.prefill_us
        self.load.decoding += 1
        was_head = self._prefilling[0] == request_id
        self._prefilling.remove(request_id)
        if was_head:
            head = self._reserved[self._prefilling[0]] if self._prefilling else None
            self.load.head_us = head.prefill_us if head else 0
            self.load.head_since_ms = round(now_s * 1000)

    def release(self, request_id: str) -> None:
        """As lua/release.lua, for a request that has its first token."""
        self.load.blocks -= self._reserved.pop(request_id).blocks
        self.load.requests -= 1
        self.load.decoding -= 1

    def column(self, request: SimRequest, now_s: float) -> tuple[float, ...]:
        """This worker in the order of Candidates."""
        load, m, s = self.load, self.engine.metrics(), self.speed
        return (
            *(self.engine.pool.match(request.blocks), 0.0, 0.0),
            *(load.prefill_tokens, load.queue_s(round(now_s * 1000)), load.blocks),
            *(load.requests, load.decoding, m.request_total_slots),
            *(m.kv_active_blocks, m.kv_total_blocks, m.num_requests_waiting),
            *(m.gpu_cache_usage_perc, m.request_active_slots, m.request_total_slots),
            *(s.prefill_s_per_token, s.prefill_s_per_token2),
            *(s.decode_s_per_kv_token, s.decode_s_per_seq),
            *(s.host_s_per_token, s.disk_s_per_token, s.mean_output_tokens),
        )


@dataclass(slots=True)
class _Flight:
    """A request on its way: its turn of a session, and when what happened."""

    session: Session
    turn: int
    arrival_s: float
    worker: int = 0
    first_token_s: float = 0.0

    @property
    def request(self) -> TraceRequest:
        return self.session.turns[self.turn]


class Simulation:
    """One policy against one trace. `run` once."""

    def __init__(self, policy: str, num_workers: int, profile: str, seed: int) -> None:
        self.workers = [Worker(profile) for _ in range(num_workers)]
        self.outcomes: list[Outcome] = []
        self._policy = policy
        self._rng = np.random.default_rng(seed)
        self._seed = seed
        self._turn = 0
        self._agenda: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self._flights: dict[str, _Flight] = {}

    def run(self, trace: Trace) -> list[Outcome]:
        """Outcomes in order of arrival; times in engine seconds."""
        for session in trace.sessions:
            self._send_at(_Flight(session, 0, session.start_s + session.turns[0].think_s))
        self._at(SPEED_INTERVAL_S, self._learn)
        while self._agenda:
            now_s, _, act = heapq.heappop(self._agenda)
            act(now_s)
        return sorted(self.outcomes, key=lambda outcome: outcome.arrival_s)

    def _at(self, when_s: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._agenda, (when_s, next(self._order), act))

    def _send_at(self, flight: _Flight) -> None:
        self._at(flight.arrival_s, lambda now_s: self._send(flight, now_s))

    def _learn(self, now_s: float) -> None:
        for worker in self.workers:
            worker.speed = worker.learner.speed()
        if self._agenda:
            self._at(now_s + SPEED_INTERVAL_S, self._learn)

    def _send(self, flight: _Flight, now_s: float) -> None:
        request = SimRequest.from_tokens(
            str(flight.request.index),
            flight.request.prompt(self._seed),
            flight.request.output_tokens,
            block_size=BLOCK_SIZE,
        )
        flight.worker = self._choose(request, now_s)
        self._flights[request.request_id] = flight
        worker = self.workers[flight.worker]
        worker.engine.submit(request)
        if not worker.is_stepping:
            self._step(worker, now_s)

    def _choose(self, request: SimRequest, now_s: float) -> int:
        columns = [worker.column(request, now_s) for worker in self.workers]
        candidates = Candidates(*np.array(columns, dtype=np.float64).T)
        size = RequestSize(request.prompt_tokens, BLOCK_SIZE)
        choice = choose(
            self._policy,
            candidates,
            size,
            eligible=np.ones(len(self.workers), dtype=bool),
            rng=self._rng,
            turn=self._turn,
        )
        self._turn += 1
        cached = int(candidates.overlap_device[choice.index]) * BLOCK_SIZE
        prefill_s = float(predicted_prefill_s(candidates, size)[choice.index])
        reservation = Reservation(
            request.request_id,
            prefill_tokens=max(1, request.prompt_tokens - cached),
            prefill_us=round(1e6 * prefill_s),
            blocks=size.isl_blocks,
        )
        self.workers[choice.index].reserve(reservation, now_s)
        return choice.index

    def _step(self, worker: Worker, now_s: float) -> None:
        step = worker.engine.step()
        worker.is_stepping = step is not None
        if step is not None:
            self._at(now_s + step.duration_s, lambda end_s: self._end_step(worker, step, end_s))

    def _end_step(self, worker: Worker, step: Step, now_s: float) -> None:
        worker.learner.observe(step, step.duration_s)
        worker.engine.take_events()
        for request_id in step.first_tokens:
            worker.prefill_complete(request_id, now_s)
            self._flights[request_id].first_token_s = now_s
        for finished in step.finished:
            worker.release(finished.request_id)
            self._finish(self._flights.pop(finished.request_id), finished, now_s)
        self._step(worker, now_s)

    def _finish(self, flight: _Flight, finished: Finished, now_s: float) -> None:
        self.outcomes.append(
            Outcome(
                request_id=finished.request_id,
                arrival_s=flight.arrival_s,
                sent_s=flight.arrival_s,
                prompt_tokens=finished.prompt_tokens,
                attempts=1,
                worker=f"w{flight.worker}:0",
                first_token_s=flight.first_token_s,
                end_s=now_s,
                cached_tokens=finished.cached_tokens,
                output_tokens=finished.output_tokens,
            )
        )
        turn = flight.turn + 1
        if turn < len(flight.session.turns):
            think_s = flight.session.turns[turn].think_s
            self._send_at(_Flight(flight.session, turn, now_s + think_s))


def simulate(
    trace: Trace,
    policy: str,
    *,
    load: float = 1.0,
    num_workers: int = 8,
    profile: str = "70b-4xh100",
    warmup: float = 0.25,
    seed: int = 0,
) -> PolicyRun:
    """Play `trace` under one policy of POLICY_NAMES, in virtual time.

    load: arrival rate, as a multiple of the recorded one. warmup: share of the requests, the first
    ones, that figures leave out. Raises AllWorkersBusy once every worker's slots are reserved.
    """
    simulation = Simulation(policy, num_workers, profile, seed)
    return PolicyRun(
        policy=policy,
        trace=trace.name,
        speedup=1.0,
        load=load,
        warmup=warmup,
        outcomes=tuple(simulation.run(trace.at_load(load))),
        workers=tuple(f"w{i}:0" for i in range(num_workers)),
    )


@click.command()
@click.option(
    "--trace",
    "trace_file",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    default=DEMO_TRACE,
    help="JSON lines, as for kvroute replay. Default: the demo's.",
)
@click.option("--requests", type=POSITIVE, help="Play at most this many.")
@click.option(
    "--policy",
    "policies",
    multiple=True,
    default=POLICY_NAMES,
    type=click.Choice(POLICY_NAMES),
    help="Default: all.",
)
@click.option(
    "--load",
    "loads",
    multiple=True,
    default=(1.1,),
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Arrival rates, as multiples of the recorded one.",
)
@click.option("--workers", "num_workers", default=8, show_default=True, type=POSITIVE)
@click.option(
    "--profile", default="70b-4xh100", show_default=True, type=click.Choice(list(PROFILES))
)
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0))
def main(
    trace_file: Path,
    requests: int | None,
    policies: tuple[str, ...],
    loads: tuple[float, ...],
    num_workers: int,
    profile: str,
    seed: int,
) -> None:
    """Compare policies on a trace, in virtual time: a table per load."""
    console = Console()
    trace = read_trace(trace_file).cut(0.0, None, requests)
    for load in loads:
        runs = [
            simulate(trace, policy, load=load, num_workers=num_workers, profile=profile, seed=seed)
            for policy in policies
        ]
        console.print(report.table(runs))


if __name__ == "__main__":
    main()
