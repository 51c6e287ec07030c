"""A trace against a fleet in virtual time, of which a planner sets the size."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field, replace

import numpy as np

from app.core.chains import positions
from app.core.types import SequenceHash
from app.core.worker_report import DEFAULT_SPEED, Speed
from app.planner.predict import predictor
from app.planner.rules.policies import least_valued, propose, unique_values
from app.planner.rules.replay import Replay, growth, recorded_request
from app.planner.rules.state import (
    FleetState,
    Latencies,
    PastRequest,
    Phase,
    Proposal,
    Reason,
    Rules,
    WorkerLoad,
    WorkerState,
    prefill_s,
)
from app.policy.record import sampled
from app.simulation.books import Holdings
from app.simulation.flights import Decided, SimAnswer
from app.simulation.setting import Setting
from app.simulation.worker import SimWorker, Status
from loadtest.client import Outcome
from loadtest.traces import Trace
from loadtest.virtual import Simulation, TracePrompts

SAMPLE_S = 1.0
DECISIONS_KEPT = 8192
PROPOSALS_KEPT = 64
HALF_LIVES = 4
"""Prompts asked longer ago than so many say next to nothing of what a cache is worth."""
REMEMBERED_S = 1800.0
"""Seconds for which it counts at most what a worker that left would have spared."""
PHASES = {
    Status.STARTING: Phase.PENDING,
    Status.LIVE: Phase.LIVE,
    Status.DRAINING: Phase.DRAINING,
}


def newest(state: FleetState) -> str:
    """Returns the live worker that joined last, which Kubernetes removes."""
    return max(state.those(Phase.LIVE), key=lambda worker: worker.since_s).name


VICTIMS: Mapping[str, Callable[[FleetState], str]] = {
    "unique_value": least_valued,
    "newest": newest,
}
"""How the worker that leaves is chosen, by the names of `loadtest.autoscale --victim`."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """How the size is set. sizes: what it is to be at each time; None: what `policy` proposes."""

    policy: str
    rules: Rules = field(default_factory=Rules)
    victim: str = "unique_value"
    startup_s: float = 60.0
    sizes: Callable[[float], int] | None = None


@dataclass(slots=True)
class PlayedTrace:
    outcomes: list[Outcome] = field(default_factory=list)
    proposals: list[Proposal] = field(default_factory=list)
    worker_s: float = 0.0
    """Seconds for which workers had their hardware, added up."""
    recomputed_s: float = 0.0


@dataclass(slots=True)
class _Recorded:
    asked: PastRequest
    sampled: list[SequenceHash]


class Scaled:
    """One policy of the planner against one trace. Call `run` once only."""

    def __init__(
        self, scaling: Scaling, setting: Setting, routing: str, prompts: TracePrompts, end_s: float
    ) -> None:
        """routing: policy of the routers. end_s: after it, size and cost no longer matter."""
        self._scaling, self._setting, self._routing = scaling, setting, routing
        self._end_s = end_s
        self._played = PlayedTrace()
        self._simulation = Simulation(routing, setting, prompts)
        self._simulation.on_answer = self._ended
        self._fleet = self._simulation.fleet
        self._fleet.on_decided = self._decided
        self._samples: dict[int, list[tuple[float, ...]]] = {}
        self._recent: dict[str, _Recorded] = {}
        self._departed: list[tuple[float, Holdings]] = []

    def run(self, trace: Trace) -> PlayedTrace:
        self._every(SAMPLE_S, self._sample)
        self._every(self._scaling.rules.interval_s, self._propose)
        played = self._played
        played.outcomes = self._simulation.run(trace)
        played.worker_s = sum(worker.held_s(self._end_s) for worker in self._fleet.workers)
        return played

    def _every(self, interval_s: float, act: Callable[[float], None]) -> None:
        def again(now_s: float) -> None:
            act(now_s)
            if now_s + interval_s < self._end_s:
                self._fleet.at(now_s + interval_s, again)

        self._fleet.at(interval_s, again)

    def _decided(self, decided: Decided) -> None:
        request, place = decided.request, decided.worker
        self._count_recomputed(decided)
        chain = sampled(request.blocks)
        asked = PastRequest(
            decided.at_s,
            str(place),
            recorded_request(
                request.request_id,
                chain,
                prompt_tokens=request.prompt_tokens,
                # What it will be is not known yet.
                output_tokens=round(self._fleet.workers[place].speed.mean_output_tokens),
                block_size=self._setting.block_size,
            ),
            decided.best_blocks,
        )
        self._recent[request.request_id] = _Recorded(asked, chain)
        if len(self._recent) > DECISIONS_KEPT:
            del self._recent[next(iter(self._recent))]

    def _ended(self, answer: SimAnswer) -> None:
        recorded = self._recent.get(answer.request.request_id)
        if recorded is not None and answer.output_tokens:
            asked = recorded.asked
            request = replace(asked.request, max_tokens=answer.output_tokens)
            came = None
            if answer.first_token_s is not None and answer.end_s is not None:
                more = max(1, answer.output_tokens - 1)
                came = Latencies(
                    answer.first_token_s - answer.arrival_s,
                    (answer.end_s - answer.first_token_s) / more,
                )
            recorded.asked = replace(asked, request=request, came=came)

    def _count_recomputed(self, decided: Decided) -> None:
        self._departed = [(until_s, h) for until_s, h in self._departed if until_s > decided.at_s]
        blocks = max(
            (sum(h.overlap(decided.request.blocks, decided.at_s)) for _, h in self._departed),
            default=0,
        )
        if blocks > decided.best_blocks:
            size, speed = self._setting.block_size, self._fleet.workers[decided.worker].speed
            lost_s = prefill_s(decided.best_blocks * size, blocks * size, speed)
            self._played.recomputed_s += lost_s

    def _sample(self, now_s: float) -> None:
        books = self._fleet.replicas[0].books
        for place, worker in enumerate(self._fleet.workers):
            if worker.status is not Status.LIVE:
                continue
            worker.publish_metrics(now_s)
            load = books[place].load
            sample = WorkerLoad(
                prefill_queue=max(0, load.requests - load.decoding - 1),
                queue_s=load.queue_s(round(now_s * 1000)),
                kv_usage=worker.metrics.gpu_cache_usage_perc,
                waiting=worker.metrics.num_requests_waiting,
                requests=load.requests,
            )
            self._samples.setdefault(place, []).append(astuple(sample))

    def _propose(self, now_s: float) -> None:
        scaling, state = self._scaling, self._state(now_s)
        if scaling.sizes is None:
            replay = Replay(
                state,
                scaling.rules,
                self._routing,
                self._setting,
                self._speed,
                growth=growth(state, scaling.rules),
            )

            proposal = propose(
                scaling.policy,
                state,
                scaling.rules,
                predictor(replay, state),
                victim=VICTIMS[scaling.victim],
            )
        else:
            desired = max(scaling.sizes(now_s), state.size - 1)
            proposal = Proposal(
                now_s,
                scaling.policy,
                state.size,
                desired,
                Reason.SCHEDULED,
                VICTIMS[scaling.victim](state) if desired < state.size else None,
            )
        self._played.proposals.append(proposal)
        self._carry_out(proposal, now_s)
        self._samples.clear()

    def _carry_out(self, proposal: Proposal, now_s: float) -> None:
        for role, count in proposal.starts.items():
            for _ in range(count):
                self._fleet.join(self._setting.profiles[0], self._scaling.startup_s, role)
        if proposal.victim is not None:
            worker = self._fleet.workers[int(proposal.victim)]
            # Its blocks would have stayed for about as long as the evicted ones went unused.
            idle_s = worker.metrics.kv_idle_before_evict_s or math.inf
            self._departed.append((now_s + min(idle_s, REMEMBERED_S), worker.holdings))
            self._fleet.drain(int(proposal.victim))

    @property
    def _speed(self) -> Speed:
        live = (w for w in self._fleet.workers if w.status is Status.LIVE)
        return next((worker.speed for worker in live), DEFAULT_SPEED)

    def _state(self, now_s: float) -> FleetState:
        workers = {
            place: worker
            for place, worker in enumerate(self._fleet.workers)
            if worker.status is not Status.GONE
        }
        values = self._unique_values(workers, now_s)
        return FleetState(
            now_s,
            [self._worker_state(place, worker, values) for place, worker in workers.items()],
            [recorded.asked for recorded in self._recent.values()],
            self._played.proposals[-PROPOSALS_KEPT:],
            self._setting.block_size,
            self._scaling.startup_s,
        )

    def _worker_state(self, place: int, worker: SimWorker, values: dict[str, float]) -> WorkerState:
        samples = self._samples.get(place)
        return WorkerState(
            name=str(place),
            phase=PHASES[worker.status],
            since_s=worker.live_s if worker.status is Status.LIVE else worker.asked_s,
            load=WorkerLoad(*np.mean(samples, axis=0).tolist()) if samples else None,
            unique_value_s=values.get(str(place), 0.0),
            speed=worker.speed,
            profile=self._setting.profiles[0],
            role=worker.role,
        )

    def _unique_values(self, workers: dict[int, SimWorker], now_s: float) -> dict[str, float]:
        half_life_s = self._scaling.rules.half_life_s
        since_s = now_s - HALF_LIVES * half_life_s
        recent = [
            recorded
            for recorded in self._recent.values()
            if recorded.asked.best_blocks and recorded.asked.at_s > since_s
        ]
        live = {
            str(place): worker.holdings
            for place, worker in workers.items()
            if worker.status is Status.LIVE
        }
        return unique_values(
            [recorded.asked for recorded in recent],
            [_held(recorded, live, now_s) for recorded in recent],
            now_s=now_s,
            half_life_s=half_life_s,
            block_size=self._setting.block_size,
            speed=self._speed,
        )


def _held(recorded: _Recorded, live: dict[str, Holdings], now_s: float) -> dict[str, int]:
    """Leading blocks on each worker, as far as the recorded ones tell."""
    reached = (0, *positions(len(recorded.asked.request.blocks)))
    return {
        name: reached[sum(holdings.overlap(recorded.sampled, now_s))]
        for name, holdings in live.items()
    }
