"""Workers and routers in virtual time.

The policies are the real ones, and the books of reservations follow the rules of the Lua scripts.
There is no Redis, no HTTP and no clock, but their effect on a decision is simulated: how late it
sees what workers and other routers did.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from operator import attrgetter
from typing import TypeVar

import numpy as np

from app.core.errors import AllWorkersBusy, NoWorkers
from app.core.loads import LOAD_FIELDS, ROUND, Load
from app.core.roles import Role
from app.core.types import SequenceHash
from app.policy.transfer import TransferKind
from app.simulation.books import Books, rounds_of
from app.simulation.decide import SimDecider, SimPlan
from app.simulation.flights import (
    POLL_S,
    Act,
    Agenda,
    Decided,
    Flight,
    OnAnswer,
    SimAnswer,
    SimLoss,
    SimReplica,
    Supply,
    WaitingLine,
)
from app.simulation.profiles import Profile
from app.simulation.running import Received
from app.simulation.setting import SYNC_S, PolicyVariant, Setting, Sharing
from app.simulation.steps import EngineStep, Finished, SimRequest
from app.simulation.worker import Quiet, SimWorker, Status

T = TypeVar("T")
_values = attrgetter(*LOAD_FIELDS)


class SimFleet:
    """Fleet whose requests are asked at any times with `at` and `ask`, and played by `run`.

    agenda: of several fleets; None: the fleet is alone.
    """

    def __init__(self, policy: str, setting: Setting, agenda: Agenda | None = None) -> None:
        self.setting = setting
        self.on_decided: Callable[[Decided], None] | None = None
        self.workers: list[SimWorker] = []
        """Workers that ever were; a worker's place is its name."""
        self.conflicts = 0
        """Reservations refused because another replica's came first."""
        self.agenda = agenda or Agenda()
        self.at, self.run = self.agenda.at, self.agenda.run
        self.rng = np.random.default_rng(setting.seed)
        self._live: list[int] = []
        self._decider = SimDecider(
            PolicyVariant(policy), setting, self.workers, self._live, self.rng
        )
        shared: list[Books] = []
        self.replicas = [
            SimReplica(shared if setting.sharing is Sharing.EXACT else [])
            for _ in range(setting.replicas)
        ]
        waits = setting.wait_above_s is not None
        self._line = WaitingLine() if waits else None
        self._arrived = 0
        self._flights: dict[str, Flight] = {}
        self._supplied: dict[str, Flight] = {}
        for profile in islice(cycle(setting.profiles), setting.num_workers):
            self.join(profile)

    @property
    def now_s(self) -> float:
        return self.agenda.now_s

    def ask(self, request: SimRequest, then: OnAnswer) -> None:
        """Have a request arrive now; `then` gets what becomes of it."""
        replica = self.replicas[self._arrived % len(self.replicas)]
        self._arrived += 1
        self._queue(Flight(request, then, self.now_s, replica))

    def join(self, profile: Profile, startup_s: float = 0.0, role: Role | None = None) -> int:
        """Have a worker with an empty cache join after `startup_s`; returns its place. role: see
        SimWorker."""
        place = len(self.workers)
        worker = SimWorker(self.setting, place, profile, lambda: self.now_s, self.now_s, role)
        self.workers.append(worker)
        counts_blocks = self._decider.counts_once or self._decider.foresees
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
        """Give the worker no new requests; it leaves when it has answered those that it has."""
        worker = self.workers[place]
        if worker.status is Status.LIVE:
            self._live.remove(place)
        if worker.status is not Status.GONE:
            worker.status = Status.DRAINING
            self._leave_if_drained(worker)

    def warm(self, place: int, request: SimRequest) -> None:
        """Make the worker's cache as if it had just answered the request."""
        worker = self.workers[place]
        worker.engine.warm(request)
        worker.holdings.publish(worker.engine.take_events(), self.now_s)

    def _queue(self, flight: Flight) -> None:
        replica = flight.replica
        replica.waiting.append(flight)
        if not replica.is_deciding:
            self._decide(replica, self.now_s)

    def _openings(self, loads: Sequence[Load], now_s: float) -> int:
        """Returns how many workers have a free slot, and a queue after which nobody has to wait."""
        above_s, now_ms = self.setting.wait_above_s, round(1000 * now_s)
        assert above_s is not None, "nobody waits"
        return sum(
            loads[place].requests < self.workers[place].engine.profile.max_num_seqs
            and loads[place].queue_s(now_ms) <= above_s
            for place in self._live
        )

    def _waits(self, flight: Flight, loads: Sequence[Load], now_s: float) -> bool:
        """Whether the request stays in line until its turn."""
        line = self._line
        if line is None or flight.has_turn:
            flight.has_turn = False
            return False
        if not line.is_waited_in:
            if self._openings(loads, now_s):
                return False
            self.at(now_s + POLL_S, partial(self._take_turns, line))
        line.add(flight)
        return True

    def _take_turns(self, line: WaitingLine, now_s: float) -> None:
        loads = [books.load for books in self.replicas[0].books]
        for flight in line.turns(self._openings(loads, now_s)):
            self._queue(flight)
        if line.is_waited_in:
            self.at(now_s + POLL_S, partial(self._take_turns, line))

    def _decide(self, replica: SimReplica, now_s: float) -> None:
        """Decide all waiting requests, one after another, from one lookup; reserve a trip later."""
        loads = [Load(*_values(books.load)) for books in replica.books]
        rounds = rounds_of(replica.books)
        plans = []
        waiting, replica.waiting = replica.waiting, []
        for flight in waiting:
            if self._waits(flight, loads, now_s):
                continue
            flight.attempts += 1
            try:
                plan = self._decider.plan(flight, loads, rounds, now_s)
            except (NoWorkers, AllWorkersBusy) as error:
                loss = SimLoss.NO_WORKERS if isinstance(error, NoWorkers) else SimLoss.FULL
                flight.then(flight.lost(loss, str(error)), now_s)
                continue
            for share in plan.shares:
                rounds += ROUND // len(replica.books)
                loads[share.worker].add(share.booking.reservation, round(now_s * 1000), rounds)
                if self._decider.counts_once:
                    replica.books[share.worker].in_flight.add(flight.request)
            plans.append(plan)
        if self._decider.counts_once:
            for share in (share for plan in plans for share in plan.shares):
                replica.books[share.worker].in_flight.remove(share.booking.request)
        replica.is_deciding = bool(plans)
        if plans:
            self.at(now_s + self.setting.trip_s, partial(self._reserve, replica, plans))

    def _reserve(self, replica: SimReplica, plans: list[SimPlan], now_s: float) -> None:
        """Reserve as lua/reserve.lua does: a reservation is refused, with all behind it for the
        same worker, if another replica was there first, or if the worker is no longer there. Both
        the worker and its source are reserved, or neither."""
        refused: list[Flight] = []
        overtaken: set[int] = set()
        for plan in plans:
            changed = {
                share.worker
                for share in plan.shares
                if share.worker in overtaken
                or replica.books[share.worker].load.total != share.seen_total
                or self.workers[share.worker].status is not Status.LIVE
            }
            if changed:
                overtaken |= changed
                plan.flight.has_turn = True
                refused.append(plan.flight)
                continue
            for share in plan.shares:
                self._tell(replica, share.worker, now_s, Books.reserve, share.booking)
            self._start(plan, now_s)
            if self.on_decided is not None:
                request = plan.flight.request
                self.on_decided(Decided(request, now_s, plan.target.worker, plan.best_blocks))
        self.conflicts += len(refused)
        replica.waiting = refused + replica.waiting
        replica.is_deciding = False
        if replica.waiting:
            self._decide(replica, now_s)

    def _tell(
        self,
        replica: SimReplica,
        worker: int,
        now_s: float,
        enter: Callable[[Books, T, float], None],
        what: T,
    ) -> None:
        """Enter something in the replica's books, and in the others' when they learn of it."""
        enter(replica.books[worker], what, now_s)
        if self.setting.sharing is Sharing.LATE:
            for other in self.replicas:
                if other is not replica:
                    self.at(now_s + SYNC_S, partial(enter, other.books[worker], what))

    def _start(self, plan: SimPlan, now_s: float) -> None:
        flight, source, target = plan.flight, plan.source, self.workers[plan.target.worker]
        flight.worker, flight.supply = plan.target.worker, None
        self._flights[flight.request.request_id] = flight
        target.num_requests += 1
        if source is None:
            self._submit_once_come(target, flight.request, now_s)
            return
        supplier = self.workers[source.worker]
        name = f"{flight.request.request_id}~source{flight.attempts}"
        flight.supply = supply = Supply(plan.kind, source.worker, name)
        self._supplied[name] = flight
        supplier.num_requests += 1
        if plan.kind is TransferKind.SPLIT:
            alone = replace(flight.request, request_id=name, max_tokens=1)
            self._submit_once_come(supplier, alone, now_s)
        else:
            prefix = flight.request.blocks[: source.booking.reservation.blocks]
            self._send(flight, supply, prefix, now_s)

    def _submit_once_come(self, worker: SimWorker, request: SimRequest, now_s: float) -> None:
        self._once_come(worker, request, partial(self._submit, worker, request, None), now_s)

    def _once_come(self, worker: SimWorker, request: SimRequest, act: Act, now_s: float) -> None:
        """Act once what is on its way to a worker of a request's prefix is there."""
        comes_s = worker.has_come_s(request.blocks, now_s)
        if comes_s > now_s:
            self.at(comes_s, partial(self._once_come, worker, request, act))
        else:
            act(now_s)

    def _submit(
        self, worker: SimWorker, request: SimRequest, received: Received | None, now_s: float
    ) -> None:
        worker.publish_metrics(now_s)
        worker.engine.submit(request, received)
        if not worker.is_stepping:
            self._step(worker, now_s)
        elif worker.quiet is not None:
            self._end_quiet(worker, worker.quiet, now_s)

    def _computed(self, flight: Flight, finished: Finished, now_s: float) -> None:
        """Send what the target lacks of a prompt that its source has computed."""
        request, supply = flight.request, flight.supply
        assert supply is not None, "computed for nobody"
        self._tell(flight.replica, supply.source, now_s, Books.computed, request.request_id)
        supply.cached_tokens = finished.cached_tokens
        self._send(flight, supply, request.blocks, now_s)

    def _send(
        self, flight: Flight, supply: Supply, chain: Sequence[SequenceHash], now_s: float
    ) -> None:
        """Hold the chain at the source until the target has what it lacks of it. Engines compute a
        prompt's last token themselves."""
        request, source = flight.request, self.workers[supply.source]
        stop = source.engine.hold(supply.name, chain) * self.setting.block_size
        if supply.kind is TransferKind.SPLIT:
            stop += len(request.tail_tokens)
        send = partial(self._transfer, flight, supply, min(stop, request.prompt_tokens - 1))
        self._once_come(self.workers[flight.worker], request, send, now_s)

    def _transfer(self, flight: Flight, supply: Supply, stop: int, now_s: float) -> None:
        """Send the tokens up to `stop` that the target lacks."""
        request, size = flight.request, self.setting.block_size
        source, target = self.workers[supply.source], self.workers[flight.worker]
        assert source.sending is not None, "no link"
        received = Received(target.engine.pool.match(request.blocks) * size, stop)
        arrives_s = source.sending.send(max(0, stop - received.start), now_s)
        moved = request.blocks[received.start // size : stop // size]
        target.coming.update(dict.fromkeys(moved, arrives_s))
        self.at(arrives_s, partial(self._receive, flight, supply, received))

    def _receive(self, flight: Flight, supply: Supply, received: Received, now_s: float) -> None:
        worker, blocks = self.workers[flight.worker], flight.request.blocks
        there = blocks[: received.stop // self.setting.block_size]
        for block in there:
            worker.coming.pop(block, None)
        self._end_supply(supply)
        worker.engine.take_in(there)
        worker.holdings.publish(worker.engine.take_events(), now_s)
        self._submit(worker, flight.request, received, now_s)

    def _end_supply(self, supply: Supply) -> None:
        """Free the source, although its blocks count until the first token."""
        source = self.workers[supply.source]
        del self._supplied[supply.name]
        source.engine.cancel(supply.name)
        source.engine.let_go(supply.name)
        source.num_requests -= 1
        self._leave_if_drained(source)

    def _end_quiet(self, worker: SimWorker, quiet: Quiet, now_s: float) -> None:
        """Make the step under way the last one before the engine looks at what has changed."""
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
            self.at(now_s + step.duration_s, partial(self._end_step, worker, step))
        else:
            self._leave_if_drained(worker)

    def _skip(self, worker: SimWorker, num_steps: int, since_s: float) -> None:
        """Pass the decode-only steps from `since_s` on in one go, unless a request arrives."""
        worker.quiet = quiet = Quiet(since_s, num_steps)
        worker.is_stepping = True

        def end(now_s: float) -> None:
            if worker.quiet is quiet:
                worker.publish_metrics(now_s)
                step = worker.engine.skip(num_steps)
                worker.learner.observe(step, step.duration_s)
                self._step(worker, now_s)

        self.at(since_s + worker.engine.decode_s(num_steps), end)

    def _end_step(self, worker: SimWorker, step: EngineStep, now_s: float) -> None:
        worker.publish_metrics(now_s)
        answers = [done for done in step.finished if done.request_id in self._flights]
        worker.learner.observe(step, step.duration_s, self._supplied)
        worker.holdings.publish(worker.engine.take_events(), now_s)
        for request_id in step.first_tokens:
            if request_id in self._flights:
                self._first_token(self._flights[request_id], now_s)
        for finished in step.finished:
            if finished.request_id in self._supplied:
                self._computed(self._supplied[finished.request_id], finished, now_s)
        for finished in answers:
            self._finish(self._flights[finished.request_id], finished, now_s)
        self._step(worker, now_s)

    def _first_token(self, flight: Flight, now_s: float) -> None:
        flight.first_token_s = now_s
        request_id = flight.request.request_id
        self._tell(flight.replica, flight.worker, now_s, Books.prefill_complete, request_id)
        if flight.supply is not None:
            self._tell(flight.replica, flight.supply.source, now_s, Books.release, request_id)

    def _finish(self, flight: Flight, finished: Finished, now_s: float) -> None:
        request_id = flight.request.request_id
        del self._flights[request_id]
        self.workers[flight.worker].num_requests -= 1
        self._tell(flight.replica, flight.worker, now_s, Books.release, request_id)
        supply, cached_tokens = flight.supply, finished.cached_tokens
        if supply is not None and supply.kind is TransferKind.SPLIT:
            cached_tokens = supply.cached_tokens
        answer = SimAnswer(
            flight.request,
            flight.arrival_s,
            flight.attempts,
            worker=flight.worker,
            first_token_s=flight.first_token_s,
            end_s=now_s,
            cached_tokens=cached_tokens,
            output_tokens=finished.output_tokens,
            kind=TransferKind.LOCAL if supply is None else supply.kind,
        )
        flight.then(answer, now_s)

    def _leave_if_drained(self, worker: SimWorker) -> None:
        if worker.status is Status.DRAINING and not worker.num_requests:
            worker.status, worker.gone_s = Status.GONE, self.now_s
