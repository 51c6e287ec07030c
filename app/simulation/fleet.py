"""Workers and routers in virtual time.

The policies are the real ones, and the books of reservations follow the rules of the Lua scripts.
There is no Redis, no HTTP and no clock, but their effect on a decision is simulated: how late it
sees what workers and other routers did.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from enum import StrEnum
from itertools import count, cycle, islice
from typing import TypeVar

import numpy as np

from app.core.errors import AllWorkersBusy, NoWorkers
from app.core.loads import ROUND, Load, Reservation
from app.policy.choose import choose
from app.policy.cost import Candidates, RequestSize, predicted_prefill_s
from app.simulation.books import Books, Promise, rounds_of
from app.simulation.profiles import Profile
from app.simulation.setting import PolicyVariant, Setting, Sharing
from app.simulation.steps import Finished, SimRequest, Step
from app.simulation.worker import Quiet, SimWorker, Status

T = TypeVar("T")
Act = Callable[[float], None]
"""What happens at a time, which it is given."""


class Loss(StrEnum):
    """Why a request got no answer."""

    FULL = "full"
    """Every worker was full."""
    NO_WORKERS = "no_workers"
    CRASH = "crash"
    """Its worker crashed after the first token; before that, another one takes the request."""


@dataclass(frozen=True, slots=True)
class SimAnswer:
    """What became of a request. worker: its place in the fleet; None: it was lost."""

    request: SimRequest
    arrival_s: float
    attempts: int
    loss: Loss | None = None
    reason: str = ""
    """Of the loss, in words."""
    worker: int | None = None
    first_token_s: float | None = None
    end_s: float | None = None
    cached_tokens: int = 0
    output_tokens: int = 0


Then = Callable[[SimAnswer, float], None]


@dataclass(frozen=True, slots=True)
class Decided:
    """A request that went to the worker at `worker`. best_blocks: leading blocks of its prompt on
    the worker that held most of them."""

    request: SimRequest
    at_s: float
    worker: int
    best_blocks: int


@dataclass(slots=True, eq=False)
class _Flight:
    """A request under way, and when things happened to it."""

    request: SimRequest
    then: Then
    arrival_s: float
    replica: _Replica
    worker: int = 0
    attempts: int = 0
    first_token_s: float | None = None

    def lost(self, loss: Loss, reason: str) -> SimAnswer:
        return SimAnswer(self.request, self.arrival_s, self.attempts, loss, reason)


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
    promise: Promise
    best_blocks: int


class SimFleet:
    """Ask requests at any times with `at` and `ask`, then `run`."""

    def __init__(self, policy: str, setting: Setting) -> None:
        self.setting = setting
        self.on_decided: Callable[[Decided], None] | None = None
        """Called with each decision that holds."""
        self.workers: list[SimWorker] = []
        """All that there ever were; a worker's place is its name."""
        self.conflicts = 0
        """Reservations refused because another replica's came first."""
        self.now_s = 0.0
        self.rng = np.random.default_rng(setting.seed)
        self._policy = PolicyVariant(policy)
        # As Dynamo does, of which it is a yardstick; routers do not know enough to do so.
        self._counts_once = self._policy.key == "blocks"
        self._live: list[int] = []
        shared: list[Books] = []
        self.replicas = [
            _Replica(shared if setting.sharing is Sharing.EXACT else [])
            for _ in range(setting.replicas)
        ]
        self._arrived = 0
        self._agenda: list[tuple[float, int, Act]] = []
        self._order = count()
        self._flights: dict[str, _Flight] = {}
        for profile in islice(cycle(setting.profiles), setting.num_workers):
            self.join(profile)

    def at(self, when_s: float, act: Act) -> None:
        heapq.heappush(self._agenda, (when_s, next(self._order), act))

    def run(self, until_s: float = math.inf) -> None:
        """Let happen all that is due until then, which is the time afterwards."""
        while self._agenda and self._agenda[0][0] <= until_s:
            self.now_s, _, act = heapq.heappop(self._agenda)
            act(self.now_s)
        if until_s < math.inf:
            self.now_s = max(self.now_s, until_s)

    def ask(self, request: SimRequest, then: Then) -> None:
        """A request arrives now; `then` gets what becomes of it."""
        replica = self.replicas[self._arrived % len(self.replicas)]
        self._arrived += 1
        self._queue(_Flight(request, then, self.now_s, replica))

    def join(self, profile: Profile, startup_s: float = 0.0) -> int:
        """A worker with an empty cache joins after `startup_s`. Returns its place."""
        place = len(self.workers)
        worker = SimWorker(self.setting, profile, lambda: self.now_s, self.now_s)
        self.workers.append(worker)
        counts_blocks = self._counts_once or self.setting.count_in_flight
        for books in {id(replica.books): replica.books for replica in self.replicas}.values():
            books.append(Books(books, counts_blocks=counts_blocks))

        def register(now_s: float) -> None:
            if worker.status is Status.STARTING:
                worker.status, worker.live_s = Status.LIVE, now_s
                self._live.append(place)

        if startup_s:
            self.at(self.now_s + startup_s, register)
        else:
            register(self.now_s)
        return place

    def drain(self, place: int) -> None:
        """The worker gets no new requests, and leaves when it has answered those that it has."""
        worker = self.workers[place]
        if worker.status is Status.LIVE:
            self._live.remove(place)
        if worker.status is not Status.GONE:
            worker.status = Status.DRAINING
            self._leave_if_drained(worker)

    def crash(self, place: int) -> None:
        """The worker is gone at once. Requests without a first token go to others; those that
        have one are lost."""
        worker = self.workers[place]
        if worker.status is Status.LIVE:
            self._live.remove(place)
        worker.status, worker.gone_s = Status.GONE, self.now_s
        stranded = [flight for flight in self._flights.values() if flight.worker == place]
        for flight in stranded:
            self._forget(flight, self.now_s)
        for flight in stranded:
            if flight.first_token_s is None:
                self._queue(flight)
            else:
                flight.then(flight.lost(Loss.CRASH, f"worker {place} crashed"), self.now_s)

    def slow(self, place: int, slowness: float) -> None:
        """From its next step on, the worker takes `slowness` times as long as it should."""
        worker = self.workers[place]
        if worker.quiet is not None:
            self._end_quiet(worker, worker.quiet, self.now_s)
        worker.slowness = slowness

    def warm(self, place: int, request: SimRequest) -> None:
        """The worker's cache is as if it had just answered the request."""
        worker = self.workers[place]
        worker.engine.warm(request)
        worker.holdings.publish(worker.engine.take_events(), self.now_s)

    def _queue(self, flight: _Flight) -> None:
        replica = flight.replica
        replica.waiting.append(flight)
        if not replica.is_deciding:
            self._decide(replica, self.now_s)

    def _decide(self, replica: _Replica, now_s: float) -> None:
        """Decide all waiting requests, one after another, from one lookup; reserve a trip later."""
        loads = [copy(books.load) for books in replica.books]
        rounds = rounds_of(replica.books)
        plans = []
        waiting, replica.waiting = replica.waiting, []
        for flight in waiting:
            flight.attempts += 1
            try:
                plan = self._plan(flight, loads, rounds, now_s)
            except NoWorkers as error:
                flight.then(flight.lost(Loss.NO_WORKERS, str(error)), now_s)
                continue
            except AllWorkersBusy as error:
                flight.then(flight.lost(Loss.FULL, str(error)), now_s)
                continue
            rounds += ROUND // len(replica.books)
            loads[plan.worker].add(plan.promise.reservation, round(now_s * 1000), rounds)
            if self._counts_once:
                replica.books[plan.worker].in_flight.add(flight.request)
            plans.append(plan)
        if self._counts_once:
            for plan in plans:
                replica.books[plan.worker].in_flight.remove(plan.flight.request)
        replica.is_deciding = bool(plans)
        if plans:
            self.at(
                now_s + self.setting.trip_s, lambda then_s: self._reserve(replica, plans, then_s)
            )

    def _plan(self, flight: _Flight, loads: list[Load], rounds: int, now_s: float) -> _Plan:
        request, live = flight.request, self._live
        if not live:
            raise NoWorkers("no worker is alive")
        in_flight = [flight.replica.books[place].in_flight for place in live]
        columns = [
            self.workers[place].column(
                loads[place],
                rounds,
                request.blocks,
                now_s,
                others.overlap(request.blocks) if self.setting.count_in_flight else 0,
            )
            for place, others in zip(live, in_flight, strict=True)
        ]
        candidates = Candidates(*np.array(columns, dtype=np.float64).T)
        if self._counts_once:
            beside = [others.num_blocks_beside(request.blocks) for others in in_flight]
            candidates.active_blocks = np.array(beside, dtype=np.float64)
        size = RequestSize(request.prompt_tokens, self.setting.block_size)
        choice = choose(
            self._policy.key,
            candidates,
            size,
            eligible=np.ones(len(columns), dtype=bool),
            rng=self.rng,
            nth=flight.replica.decisions,
            cost=self._policy.cost,
        )
        flight.replica.decisions += 1
        at, place = choice.index, live[choice.index]
        cached = size.block_size * int(candidates.overlap_device[at] + candidates.overlap_host[at])
        reservation = Reservation(
            request.request_id,
            prefill_tokens=max(1, request.prompt_tokens - cached),
            prefill_us=round(1e6 * float(predicted_prefill_s(candidates, size)[at])),
            blocks=size.isl_blocks,
        )
        best_blocks = int(candidates.overlap.max())
        promise = Promise(reservation, request)
        return _Plan(flight, place, loads[place].total, promise, best_blocks)

    def _reserve(self, replica: _Replica, plans: list[_Plan], now_s: float) -> None:
        """Like lua/reserve.lua: a reservation is refused, with all behind it for the same worker,
        if another replica was there first, or if the worker is no longer there."""
        refused: list[_Flight] = []
        overtaken: set[int] = set()
        for plan in plans:
            books = replica.books[plan.worker]
            if (
                plan.worker in overtaken
                or books.load.total != plan.seen_total
                or self.workers[plan.worker].status is not Status.LIVE
            ):
                overtaken.add(plan.worker)
                refused.append(plan.flight)
                continue
            self._tell(replica, plan.worker, now_s, Books.reserve, plan.promise)
            self._start(plan.flight, plan.worker, now_s)
            if self.on_decided is not None:
                request = plan.flight.request
                self.on_decided(Decided(request, now_s, plan.worker, plan.best_blocks))
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

            self.at(now_s + self.setting.sync_s, sync)

    def _start(self, flight: _Flight, place: int, now_s: float) -> None:
        flight.worker = place
        self._flights[flight.request.request_id] = flight
        worker = self.workers[place]
        worker.num_requests += 1
        worker.publish_metrics(now_s)
        worker.engine.submit(flight.request)
        if not worker.is_stepping:
            self._step(worker, now_s)
        elif worker.quiet is not None:
            self._end_quiet(worker, worker.quiet, now_s)

    def _end_quiet(self, worker: SimWorker, quiet: Quiet, now_s: float) -> None:
        """The step under way is the last one before the engine looks at what has changed."""
        self._skip(worker, worker.step_under_way(quiet, now_s), quiet.since_s)

    def _step(self, worker: SimWorker, now_s: float) -> None:
        quiet = worker.engine.quiet_steps()
        if quiet > 1:
            self._skip(worker, quiet, now_s)
            return
        worker.quiet = None
        step = worker.engine.step()
        worker.is_stepping = step is not None
        if step is not None:
            took_s = worker.slowness * step.duration_s
            self.at(now_s + took_s, lambda end_s: self._end_step(worker, step, took_s, end_s))
        else:
            self._leave_if_drained(worker)

    def _skip(self, worker: SimWorker, num_steps: int, since_s: float) -> None:
        """Pass the decode-only steps from `since_s` on in one go, unless a request arrives."""
        worker.quiet = quiet = Quiet(since_s, num_steps, worker.slowness)
        worker.is_stepping = True

        def end(now_s: float) -> None:
            if worker.quiet is quiet and worker.status is not Status.GONE:
                worker.publish_metrics(now_s)
                step = worker.engine.skip(num_steps)
                worker.learner.observe(step, quiet.slowness * step.duration_s)
                self._step(worker, now_s)

        self.at(since_s + worker.slowness * worker.engine.decode_s(num_steps), end)

    def _end_step(self, worker: SimWorker, step: Step, took_s: float, now_s: float) -> None:
        if worker.status is Status.GONE:
            return
        worker.publish_metrics(now_s)
        worker.learner.observe(step, took_s)
        worker.holdings.publish(worker.engine.take_events(), now_s)
        for request_id in step.first_tokens:
            flight = self._flights[request_id]
            flight.first_token_s = now_s
            self._tell(flight.replica, flight.worker, now_s, Books.prefill_complete, request_id)
        for finished in step.finished:
            self._finish(self._flights[finished.request_id], finished, now_s)
        self._step(worker, now_s)

    def _finish(self, flight: _Flight, finished: Finished, now_s: float) -> None:
        self._forget(flight, now_s)
        answer = SimAnswer(
            flight.request,
            flight.arrival_s,
            flight.attempts,
            worker=flight.worker,
            first_token_s=flight.first_token_s,
            end_s=now_s,
            cached_tokens=finished.cached_tokens,
            output_tokens=finished.output_tokens,
        )
        flight.then(answer, now_s)

    def _forget(self, flight: _Flight, now_s: float) -> None:
        """The request is no longer with its worker."""
        request, worker = flight.request, self.workers[flight.worker]
        del self._flights[request.request_id]
        worker.num_requests -= 1
        self._tell(flight.replica, flight.worker, now_s, Books.release, request.request_id)

    def _leave_if_drained(self, worker: SimWorker) -> None:
        if worker.status is Status.DRAINING and not worker.num_requests:
            worker.status, worker.gone_s = Status.GONE, self.now_s
