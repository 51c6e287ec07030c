"""A whole cluster in virtual time: a trace against workers and routers, as fast as it computes.

The policies and the engines are the real ones, and the books of reservations follow the rules of
the Lua scripts. There is no Redis, no HTTP and no clock, but their effect on a decision is
simulated: how late it sees what workers and other routers did.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import partial
from itertools import count, cycle, islice
from typing import TypeVar

import numpy as np

from app.core.errors import AllWorkersBusy
from app.core.events import CacheEvent, Cleared, Stored
from app.core.loads import Load, Reservation
from app.core.steps import Finished, SimRequest, Step
from app.core.types import SequenceHash, Tier
from app.core.worker_report import ForwardPassMetrics, Speed
from app.policy.choose import choose
from app.policy.cost import (
    Candidates,
    CostFunction,
    RequestSize,
    blocks,
    predicted_prefill_s,
)
from app.policy.view import load_rows, measured_rows
from loadtest.client import FailureKind, Outcome
from loadtest.traces import BIN_MS, Session, Trace, TraceRequest
from workers.engines.sim.engine import SimEngine
from workers.engines.sim.profiles import PROFILES, Profile
from workers.engines.speed import SpeedLearner

T = TypeVar("T")

SPEED_INTERVAL_S = 5.0
"""How often a worker publishes its speed. A live worker does so with its metrics, but the values
are the same: they hardly change."""


class Sharing(StrEnum):
    """What a replica knows of the reservations that the others made."""

    EXACT = "exact"
    """All of them, at once: a reservation is refused if another one came before it."""
    LATE = "late"
    """All of them, some time later: replicas inform each other."""
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Setting:
    """Everything that is simulated, except the trace and the policy."""

    num_workers: int = 8
    profiles: tuple[str, ...] = ("70b-4xh100",)
    """The workers' profiles, assigned in turn. SLOs are taken from the first."""
    host_pool_tokens: int = 0
    """For each worker; 0 means no host tier."""
    block_size: int = 256
    replicas: int = 1
    """They receive the requests in turn."""
    sharing: Sharing = Sharing.EXACT
    sync_s: float = 0.005
    """How late, if sharing is LATE."""
    trip_s: float = 0.0005
    """From lookup to reservation."""
    event_delay_s: float = 0.0
    """From the end of a step until routers see what it did to the cache."""
    metrics_interval_s: float = 0.1
    misjudged_prefill: float = 1.0
    misjudged_decode: float = 1.0
    """Time that routers believe prefills and decodes take, over what a worker has learned."""
    count_in_flight: bool = False
    """Whether blocks count as cached from the reservation on."""
    seed: int = 0
    """For ties. Any but 0 also moves each session by up to half a bin of the recorded trace."""


class Prompts:
    """A trace's requests as the engines take them; kept, because hashing them takes a while."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._made: dict[int, SimRequest] = {}

    def of(self, asked: TraceRequest) -> SimRequest:
        made = self._made.get(asked.index)
        if made is None:
            made = self._made[asked.index] = SimRequest.from_tokens(
                str(asked.index), asked.prompt(), asked.output_tokens, block_size=self.block_size
            )
        return made


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy of app.policy by its name; `blocks:W` is `blocks` with a prefill weight of W."""

    name: str

    @property
    def key(self) -> str:
        return self.name.partition(":")[0]

    @property
    def weight(self) -> float | None:
        """Raises ValueError if the weight is not a number."""
        _, _, weight = self.name.partition(":")
        return float(weight) if weight else None

    @property
    def cost(self) -> CostFunction | None:
        """None for the policy's own cost function."""
        weight = self.weight
        return None if weight is None else partial(blocks, prefill_weight=weight)


class Books:
    """What is reserved on one worker, as one or all replicas know it: the books of lua/."""

    def __init__(self) -> None:
        self.load = Load()
        self._reserved: dict[str, Reservation] = {}
        # Requests without a first token, the oldest first.
        self._prefilling: dict[str, None] = {}

    def reserve(self, reservation: Reservation, now_s: float) -> None:
        self.load.add(reservation, round(now_s * 1000))
        self._reserved[reservation.request_id] = reservation
        self._prefilling[reservation.request_id] = None

    def prefill_complete(self, request_id: str, now_s: float) -> None:
        """Like lua/prefill_complete.lua: the next in line becomes the head."""
        reservation = self._reserved[request_id]
        self.load.prefill_tokens -= reservation.prefill_tokens
        self.load.prefill_us -= reservation.prefill_us
        self.load.decoding += 1
        was_head = next(iter(self._prefilling)) == request_id
        del self._prefilling[request_id]
        if was_head:
            head = next(iter(self._prefilling), None)
            self.load.head_us = self._reserved[head].prefill_us if head else 0
            self.load.head_since_ms = round(now_s * 1000)

    def release(self, request_id: str, _: float) -> None:
        """Like lua/release.lua, for a request that has its first token."""
        self.load.blocks -= self._reserved.pop(request_id).blocks
        self.load.requests -= 1
        self.load.decoding -= 1


class Holdings:
    """Which blocks a worker has published, in which tiers, and which it is about to hold."""

    DEVICE = 1
    HOST = 2

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._tiers: dict[SequenceHash, int] = {}
        self._late: deque[tuple[float, list[CacheEvent]]] = deque()
        self._promised: Counter[SequenceHash] = Counter()

    def publish(self, events: list[CacheEvent], now_s: float) -> None:
        if events:
            self._late.append((now_s + self._delay_s, events))

    def promise(self, chain: Sequence[SequenceHash]) -> None:
        self._promised.update(chain)

    def settle(self, chain: Sequence[SequenceHash]) -> None:
        """Undo `promise`."""
        promised = self._promised
        for block in chain:
            left = promised[block] - 1
            if left:
                promised[block] = left
            else:
                del promised[block]

    def overlap(self, chain: Sequence[SequenceHash], now_s: float) -> tuple[int, int]:
        """Number of leading blocks on the device, and of those behind them on the host.

        Promised blocks count as on the device, as in `app.router.lookup.with_predicted`.
        """
        while self._late and self._late[0][0] <= now_s:
            for event in self._late.popleft()[1]:
                self._apply(event)
        tiers, promised = self._tiers, self._promised
        device = _leading(chain, 0, lambda block: tiers.get(block, 0) & self.DEVICE != 0)
        held = _leading(chain, device, tiers.__contains__)
        ahead = _leading(chain, 0, promised.__contains__) if promised else 0
        if ahead > held:
            return device + ahead - held, held - device
        return device, held - device

    def _apply(self, event: CacheEvent) -> None:
        assert not isinstance(event, Cleared), "simulated engines never clear"
        tiers = self._tiers
        bit = self.DEVICE if event.tier is Tier.DEVICE else self.HOST
        if isinstance(event, Stored):
            for block in event.blocks:
                tiers[block] = tiers.get(block, 0) | bit
            return
        for block in event.blocks:
            left = tiers.get(block, 0) & ~bit
            if left:
                tiers[block] = left
            else:
                tiers.pop(block, None)


def _leading(
    chain: Sequence[SequenceHash], start: int, holds: Callable[[SequenceHash], bool]
) -> int:
    """Position of the first block from `start` on that is not held; held blocks must come first."""
    low, high = start, len(chain)
    while low < high:
        middle = (low + high) // 2
        if holds(chain[middle]):
            low = middle + 1
        else:
            high = middle
    return low


class Worker:
    """One engine, and what the routers see of it."""

    def __init__(self, setting: Setting, profile: Profile, now: Callable[[], float]) -> None:
        self.engine = SimEngine(
            profile,
            block_size=setting.block_size,
            host_pool_tokens=setting.host_pool_tokens,
            now=now,
        )
        self.holdings = Holdings(setting.event_delay_s)
        self.metrics: ForwardPassMetrics = self.engine.metrics()
        self.is_stepping = False
        self.quiet: tuple[float, int] | None = None
        """Since when, and for how many steps, the engine only decodes."""
        self.learner = SpeedLearner(profile.max_batch_tokens)
        self._misjudged = setting.misjudged_prefill, setting.misjudged_decode
        self._interval_s = setting.metrics_interval_s
        self._due_s = 0.0
        self._speed_due_s = 0.0
        self.publish_metrics(0.0)

    def publish_metrics(self, now_s: float) -> None:
        """Called before every change, and so as often as anyone could notice."""
        if now_s < self._due_s:
            return
        self._due_s = (now_s // self._interval_s + 1) * self._interval_s
        self.metrics = self.engine.metrics()
        if now_s >= self._speed_due_s:
            self._speed_due_s = now_s + SPEED_INTERVAL_S
            speed = self.learner.speed()
            prefill, decode = self._misjudged
            wrong = {
                f.name: getattr(speed, f.name) * (decode if "decode" in f.name else prefill)
                for f in fields(Speed)
                if "_s_per_" in f.name
            }
            self.speed = replace(speed, **wrong)

    def column(self, load: Load, chain: Sequence[SequenceHash], now_s: float) -> tuple[float, ...]:
        """This worker's values, in the order of Candidates."""
        self.publish_metrics(now_s)
        metrics = self.metrics
        return (
            *self.holdings.overlap(chain, now_s),
            0.0,
            *load_rows(load, round(now_s * 1000), metrics.request_total_slots),
            *measured_rows(metrics, self.speed),
        )


@dataclass(slots=True, eq=False)
class _Flight:
    """A request under way: its session and turn, and when things happened."""

    session: Session
    turn: int
    arrival_s: float
    replica: _Replica
    request: SimRequest
    worker: int = 0
    attempts: int = 0
    first_token_s: float = 0.0


class _Replica:
    """A router: the requests that wait for it, how many it has decided, and the books that it
    decides from."""

    def __init__(self, books: list[Books]) -> None:
        self.books = books
        self.waiting: list[_Flight] = []
        self.is_deciding = False
        self.decisions = 0


@dataclass(frozen=True, slots=True)
class _Plan:
    flight: _Flight
    worker: int
    seen_total: int
    reservation: Reservation


class Simulation:
    """One policy against one trace. Call `run` once only."""

    def __init__(self, policy: str, setting: Setting, prompts: Prompts | None = None) -> None:
        self.setting = setting
        self._prompts = prompts or Prompts(setting.block_size)
        profiles = islice(cycle(setting.profiles), setting.num_workers)
        self.workers = [Worker(setting, PROFILES[name], lambda: self._now_s) for name in profiles]
        self.outcomes: list[Outcome] = []
        self.conflicts = 0
        self._policy = Policy(policy)
        self._rng = np.random.default_rng(setting.seed)
        self._now_s = 0.0
        shared = self._new_books()
        is_shared = setting.sharing is Sharing.EXACT
        self.replicas = [
            _Replica(shared if is_shared else self._new_books()) for _ in range(setting.replicas)
        ]
        self._arrived = 0
        self._agenda: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self._flights: dict[str, _Flight] = {}

    def run(self, trace: Trace) -> list[Outcome]:
        """Outcomes in order of arrival; times in engine seconds."""
        half_bin_s = BIN_MS / 2000
        for session in trace.sessions:
            shift_s = self._rng.uniform(-half_bin_s, half_bin_s) if self.setting.seed else 0.0
            start_s = max(0.0, session.start_s + shift_s)
            self._arrive_at(session, 0, start_s + session.turns[0].think_s)
        while self._agenda:
            self._now_s, _, act = heapq.heappop(self._agenda)
            act(self._now_s)
        return sorted(self.outcomes, key=lambda outcome: outcome.arrival_s)

    def _new_books(self) -> list[Books]:
        return [Books() for _ in range(self.setting.num_workers)]

    def _at(self, when_s: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._agenda, (when_s, next(self._order), act))

    def _arrive_at(self, session: Session, turn: int, when_s: float) -> None:
        self._at(when_s, lambda now_s: self._arrive(session, turn, now_s))

    def _arrive(self, session: Session, turn: int, now_s: float) -> None:
        asked: TraceRequest = session.turns[turn]
        replica = self.replicas[self._arrived % len(self.replicas)]
        self._arrived += 1
        request = self._prompts.of(asked)
        replica.waiting.append(_Flight(session, turn, now_s, replica, request))
        if not replica.is_deciding:
            self._decide(replica, now_s)

    def _decide(self, replica: _Replica, now_s: float) -> None:
        """Decide all waiting requests, one after another, from one lookup; reserve a trip later."""
        loads = [copy(books.load) for books in replica.books]
        plans = []
        for flight in replica.waiting:
            flight.attempts += 1
            try:
                plan = self._plan(flight, loads, now_s)
            except AllWorkersBusy as error:
                self._fail(flight, error, now_s)
                continue
            loads[plan.worker].add(plan.reservation, round(now_s * 1000))
            plans.append(plan)
        replica.waiting = []
        replica.is_deciding = bool(plans)
        if plans:
            self._at(
                now_s + self.setting.trip_s, lambda then_s: self._reserve(replica, plans, then_s)
            )

    def _plan(self, flight: _Flight, loads: list[Load], now_s: float) -> _Plan:
        request = flight.request
        columns = [
            worker.column(load, request.blocks, now_s)
            for worker, load in zip(self.workers, loads, strict=True)
        ]
        candidates = Candidates(*np.array(columns, dtype=np.float64).T)
        size = RequestSize(request.prompt_tokens, self.setting.block_size)
        choice = choose(
            self._policy.key,
            candidates,
            size,
            eligible=np.ones(len(columns), dtype=bool),
            rng=self._rng,
            nth=flight.replica.decisions,
            cost=self._policy.cost,
        )
        flight.replica.decisions += 1
        at = choice.index
        cached = size.block_size * int(candidates.overlap_device[at] + candidates.overlap_host[at])
        reservation = Reservation(
            request.request_id,
            prefill_tokens=max(1, request.prompt_tokens - cached),
            prefill_us=round(1e6 * float(predicted_prefill_s(candidates, size)[at])),
            blocks=size.isl_blocks,
        )
        return _Plan(flight, at, loads[at].total, reservation)

    def _reserve(self, replica: _Replica, plans: list[_Plan], now_s: float) -> None:
        """Like lua/reserve.lua: a reservation is refused, with all behind it for the same worker,
        if another replica was there first."""
        refused: list[_Flight] = []
        overtaken: set[int] = set()
        for plan in plans:
            books = replica.books[plan.worker]
            if plan.worker in overtaken or books.load.total != plan.seen_total:
                overtaken.add(plan.worker)
                refused.append(plan.flight)
                continue
            self._tell(replica, plan.worker, now_s, Books.reserve, plan.reservation)
            self._start(plan.flight, plan.worker, now_s)
        self.conflicts += len(refused)
        replica.waiting = refused + replica.waiting
        replica.is_deciding = False
        if replica.waiting:
            self._decide(replica, now_s)

    def _tell(
        self,
        replica: _Replica,
        worker: int,
        now_s: float,
        enter: Callable[[Books, T, float], None],
        what: T,
    ) -> None:
        """Enter something in the replica's books, and in the others' when they learn of it."""
        enter(replica.books[worker], what, now_s)
        if self.setting.sharing is Sharing.LATE:
            others = [other.books[worker] for other in self.replicas if other is not replica]

            def sync(then_s: float) -> None:
                for books in others:
                    enter(books, what, then_s)

            self._at(now_s + self.setting.sync_s, sync)

    def _start(self, flight: _Flight, place: int, now_s: float) -> None:
        flight.worker = place
        self._flights[flight.request.request_id] = flight
        worker = self.workers[place]
        worker.publish_metrics(now_s)
        if self.setting.count_in_flight:
            worker.holdings.promise(flight.request.blocks)
        worker.engine.submit(flight.request)
        if not worker.is_stepping:
            self._step(worker, now_s)
        elif worker.quiet is not None:
            # The step under way is the last one before the engine looks at this request.
            since_s, steps = worker.quiet
            last = 1 + bisect_left(range(1, steps), now_s - since_s, key=worker.engine.decode_s)
            self._skip(worker, last, since_s)

    def _step(self, worker: Worker, now_s: float) -> None:
        quiet = worker.engine.quiet_steps()
        if quiet > 1:
            self._skip(worker, quiet, now_s)
            return
        worker.quiet = None
        step = worker.engine.step()
        worker.is_stepping = step is not None
        if step is not None:
            self._at(now_s + step.duration_s, lambda end_s: self._end_step(worker, step, end_s))

    def _skip(self, worker: Worker, num_steps: int, since_s: float) -> None:
        """Pass the decode-only steps from `since_s` on in one go, unless a request arrives."""
        worker.quiet = quiet = (since_s, num_steps)
        worker.is_stepping = True

        def end(now_s: float) -> None:
            if worker.quiet is quiet:
                worker.publish_metrics(now_s)
                step = worker.engine.skip(num_steps)
                worker.learner.observe(step, step.duration_s)
                self._step(worker, now_s)

        self._at(since_s + worker.engine.decode_s(num_steps), end)

    def _end_step(self, worker: Worker, step: Step, now_s: float) -> None:
        worker.publish_metrics(now_s)
        worker.learner.observe(step, step.duration_s)
        worker.holdings.publish(worker.engine.take_events(), now_s)
        for request_id in step.first_tokens:
            flight = self._flights[request_id]
            flight.first_token_s = now_s
            self._tell(flight.replica, flight.worker, now_s, Books.prefill_complete, request_id)
        for finished in step.finished:
            flight = self._flights.pop(finished.request_id)
            self._tell(flight.replica, flight.worker, now_s, Books.release, finished.request_id)
            if self.setting.count_in_flight:
                worker.holdings.settle(flight.request.blocks)
            self._finish(flight, finished, now_s)
        self._step(worker, now_s)

    def _finish(self, flight: _Flight, finished: Finished, now_s: float) -> None:
        self.outcomes.append(
            replace(
                self._outcome(flight),
                worker=f"w{flight.worker}:0",
                first_token_s=flight.first_token_s,
                end_s=now_s,
                cached_tokens=finished.cached_tokens,
                output_tokens=finished.output_tokens,
            )
        )
        self._go_on(flight, now_s)

    def _fail(self, flight: _Flight, error: AllWorkersBusy, now_s: float) -> None:
        self.outcomes.append(
            replace(self._outcome(flight), failure=FailureKind.FULL, error=str(error))
        )
        self._go_on(flight, now_s)

    def _outcome(self, flight: _Flight) -> Outcome:
        return Outcome(
            request_id=flight.request.request_id,
            arrival_s=flight.arrival_s,
            sent_s=flight.arrival_s,
            prompt_tokens=flight.request.prompt_tokens,
            attempts=flight.attempts,
        )

    def _go_on(self, flight: _Flight, now_s: float) -> None:
        turn = flight.turn + 1
        if turn < len(flight.session.turns):
            self._arrive_at(flight.session, turn, now_s + flight.session.turns[turn].think_s)
