"""Decisions of the requests that are pending together: look up, plan, reserve, and again if another
replica was faster."""

from __future__ import annotations

import asyncio
import logging
import time

from app.core.errors import (
    AllWorkersBusy,
    NamespaceMissing,
    NoWorkers,
    RedisUnavailable,
    RoutingError,
    Superseded,
    WrongVersion,
)
from app.core.loads import Refusal, Snapshot
from app.http.supervisor import supervised
from app.policy.plan import Plan, WorkerSelector
from app.policy.view import View
from app.router.degraded import DegradedMode
from app.router.history import History
from app.router.lookup import LookUp
from app.router.maintenance import Maintenance
from app.router.pending import Pending
from app.router.replica import Replica
from app.router.waiting import Waiting
from app.state import reservations
from app.state.reservations import Release

log = logging.getLogger(__name__)

MAX_BATCH = 64
MAX_QUEUED = 1024
MAX_TRIES = 32
"""The last try takes the worker as it is. A try is lost only to another replica that reserves, so
about this many can race before one reserves on loads known to be out of date. Of a burst of 32, the
owner gets 16 through one replica. Through 16 replicas that look at the same moment, it gets 16 with
32 tries; with 16 tries, 18 in one burst of four; with 4 tries, 6."""

Planned = tuple[Pending, Plan]


class Decider:
    """Decides pending requests one after another, while `run` runs.

    The requests of a batch share their round trips to Redis, and each sees what those before it
    reserve: if Redis refuses a reservation as `changed`, another replica has overtaken it. waiting:
    None: no request may wait.
    """

    def __init__(
        self,
        replica: Replica,
        look_up: LookUp,
        history: History,
        maintenance: Maintenance,
        waiting: Waiting | None,
    ) -> None:
        self._replica = replica
        self._look_up = look_up
        self._history = history
        self._maintenance = maintenance
        self._waiting = waiting
        self._selector = WorkerSelector(replica.settings)
        self._ttl_ms = round(replica.settings.reservation_ttl_s * 1000)
        self._prefill_ttl_ms = round(replica.settings.prefill_ttl_s * 1000)
        self._queue: asyncio.Queue[Pending] = asyncio.Queue(MAX_QUEUED)
        self._degraded = DegradedMode(replica, self._selector, self._turn_away, self._note_decision)

    async def run(self) -> None:
        """Run until cancelled."""
        failures = self._replica.telemetry.task_failures
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(supervised("turns", self._give_turns, failures))
            tasks.create_task(supervised("decisions", self._decide_forever, failures))

    def submit(self, pending: Pending) -> bool:
        """Queue a request for its decision; False: the queue is full."""
        try:
            self._queue.put_nowait(pending)
        except asyncio.QueueFull:
            return False
        return True

    async def _give_turns(self) -> None:
        if self._waiting is None:
            return
        async with self._waiting:
            while True:
                for pending in await self._waiting.next_turns():
                    if not self.submit(pending):
                        pending.deciding = False

    async def _decide_forever(self) -> None:
        while True:
            await self._decide_next()

    async def _decide_next(self) -> None:
        """Decide what is pending, in a frame of its own: an endless one would keep what came of
        it."""
        batch = [await self._queue.get()]
        while len(batch) < MAX_BATCH and not self._queue.empty():
            batch.append(self._queue.get_nowait())
        batch = _wanted(batch)
        try:
            await self._decide(batch)
        except Exception as error:
            log.exception("a batch of %d decisions failed", len(batch))
            for pending in batch:
                if not pending.answer.done():
                    pending.answer.set_exception(error)

    async def _decide(self, batch: list[Pending]) -> None:
        try:
            view = await self._look_up.batch(batch)
        except WrongVersion as error:
            self._replica.fleet.note(error)
            for pending in batch:
                pending.fail(error)
            return
        except (RedisUnavailable, NamespaceMissing) as error:
            self._replica.fleet.note(error)
            # Requests that came meanwhile must not each wait for a deadline.
            while not self._queue.empty():
                batch.append(self._queue.get_nowait())
            self._degraded.decide(batch, error)
            return
        for pending in batch:
            # A sender's clock may be ahead.
            pending.began_ms = min(pending.began_ms or view.now_ms, view.now_ms)
            if pending.request.spending is not None:
                self._replica.limiter.let_in(pending.request)
                if pending.request.spending.refused is not None:
                    pending.fail(pending.request.spending.refused)
        undecided = _wanted(batch)
        if self._waiting is not None:
            self._selector.max_queue_s = self._waiting.max_queue_s(view)
            if view.somebody_waits or self._waiting.somebody:
                undecided = await self._split_waiting(undecided, view)
        for attempt in range(1, MAX_TRIES + 1):
            if attempt > 1:
                self._replica.telemetry.retries.inc(len(undecided))
            plans, refused = self._plan_all(undecided, view)
            if refused:
                await self._release_their_own(refused, view)
            if not plans:
                return
            try:
                with self._replica.telemetry.seconds_of("reserve").time():
                    replies = await self._reserve(plans, final=attempt == MAX_TRIES)
                self._degraded.ends()
                undecided, fresh = self._answer_reserved(plans, replies)
                if not undecided:
                    return
                view = await (self._replica.fleet.view(fresh) if fresh else self._look_up.workers())
            except (RedisUnavailable, NamespaceMissing) as error:
                self._lost([pending for pending, _ in plans if not pending.decided], error)
                return
        for pending in undecided:
            busy = f"no worker could be reserved in {MAX_TRIES} tries"
            self._turn_away(pending, view, AllWorkersBusy(busy, view.shortest_queue_s))

    def _lost(self, some: list[Pending], error: RedisUnavailable | NamespaceMissing) -> None:
        """Decide without Redis, and release what Redis may still reserve."""
        self._replica.fleet.note(error)
        # Redis may still run what it was sent, also for callers who have gone since.
        for pending in some:
            self._maintenance.release_soon(pending.reservation_id, pending.attempt)
        self._degraded.decide(some, error)

    def _plan_all(
        self, undecided: list[Pending], view: View
    ) -> tuple[list[Planned], list[tuple[Pending, AllWorkersBusy]]]:
        """Plan one request after another; answer those that get no worker or want no reservation.

        Returns plans, and the requests that found all workers busy and may hold a reservation
        themselves.
        """
        plans, refused = [], []
        for pending in _wanted(undecided):
            pending.tries += 1
            pending.note_wait(time.perf_counter())
            try:
                plan = self._selector.plan(pending, view)
            except AllWorkersBusy as error:
                if pending.request.reserve and pending.tries == 1:
                    refused.append((pending, error))
                else:
                    self._turn_away(pending, view, error)
                continue
            except RoutingError as error:
                self._turn_away(pending, view, error)
                continue
            if pending.request.reserve:
                plan.count()
                plans.append((pending, plan))
            else:
                pending.resolve(plan.decision)
        return plans, refused

    async def _release_their_own(
        self, refused: list[tuple[Pending, AllWorkersBusy]], view: View
    ) -> None:
        """Release what refused requests hold, and decide again those that held something.

        A retry gives up the reservation of the try before, which may be why it was refused.
        """
        released = await self._release_all([pending for pending, _ in refused])
        for (pending, error), had_one in zip(refused, released, strict=True):
            if not (had_one and self.submit(pending)):
                self._turn_away(pending, view, error)

    async def _split_waiting(self, batch: list[Pending], view: View) -> list[Pending]:
        """Let new requests wait while others do, at any replica; returns those to decide now.

        A request that is routed again first gives up what it holds: others may be waiting for that.
        """
        going, joining = list[Pending](), list[Pending]()
        for pending in batch:
            joins = pending.ticket is None and pending.request.reserve
            (joining if joins else going).append(pending)
        await self._release_all(joining)
        for pending in joining:
            self._let_wait(pending, view)
        return going

    async def _release_all(self, some: list[Pending]) -> list[bool]:
        """Release what requests hold from earlier tries; returns whether each held anything."""
        keyspace = self._replica.keyspace
        releases = {
            pending: Release(held, began_by_ms=pending.began_ms)
            for pending in some
            if (held := pending.replaces)
        }
        call = reservations.release(keyspace, list(releases.values()))
        try:
            attempts = await self._replica.runner.one(call) if releases else []
        except RedisUnavailable:
            attempts = []
        released = dict(zip(releases, attempts, strict=False))
        for attempt in released.values():
            if attempt is not None:
                self._history.withdraw(attempt)
        return [released.get(pending) is not None for pending in some]

    def _turn_away(self, pending: Pending, view: View, error: RoutingError) -> None:
        """Let a request wait that no worker can take now, if that is of use; else fail it."""
        if isinstance(error, NoWorkers):
            is_of_use = self._replica.fleet.sleeps
        else:
            is_of_use = isinstance(error, AllWorkersBusy) and not pending.for_any
        if (
            self._waiting is None
            or not is_of_use
            or not (pending.request.reserve or pending.for_any)
        ):
            pending.fail(error)
        elif pending.ticket is None:
            self._let_wait(pending, view)
        else:
            pending.deciding = False

    def _let_wait(self, pending: Pending, view: View) -> None:
        assert self._waiting is not None
        request = pending.request
        longest = pending.overlaps.longest
        block_size = view.block_size or 1
        self._waiting.enter(
            pending,
            # What is cached somewhere costs the fleet little; at least one block must be computed.
            tokens=max(request.isl_tokens - longest * block_size, block_size),
            picky=bool(request.exclude)
            or not view.all_hold(
                -(-(request.part_tokens or request.isl_tokens) // block_size),
                request.context_tokens,
            ),
            now_ms=view.now_ms,
        )

    async def _reserve(self, plans: list[Planned], *, final: bool) -> list[Refusal | None]:
        wanted = [plan.reservation for _, plan in plans]
        if final:
            wanted = [one.as_they_are() for one in wanted]
        return await self._replica.runner.one(
            reservations.reserve(
                self._replica.keyspace,
                wanted,
                ttl_ms=self._ttl_ms,
                prefill_ttl_ms=self._prefill_ttl_ms,
                columns=self._look_up.columns,
            )
        )

    def _answer_reserved(
        self, plans: list[Planned], replies: list[Refusal | None]
    ) -> tuple[list[Pending], Snapshot | None]:
        """Answer what was reserved; returns the rest, and fresh loads, if they are known."""
        left: list[Pending] = []
        fresh: Snapshot | None = None
        for (pending, plan), refused in zip(plans, replies, strict=True):
            if refused is None:
                self._take(pending, plan)
            else:
                self._replica.telemetry.conflicts.labels(refused.reason).inc()
                fresh = refused.fresh
                if refused.reason == "superseded":
                    request_id = pending.request.request_id
                    pending.fail(Superseded(f"a later try of {request_id} holds its reservation"))
                else:
                    left.append(pending)
        return left, fresh

    def _take(self, pending: Pending, plan: Plan) -> None:
        decision, telemetry = plan.decision, self._replica.telemetry
        telemetry.reservations_of("made").inc()
        telemetry.count_blocks(
            str(decision.prompt_worker.key), decision.isl_blocks, decision.overlap
        )
        telemetry.saved_s.inc(plan.saved_s)
        self._history.add(plan, self._replica.fleet.shards or 1)
        self._look_up.routed(plan)
        self._note_decision(plan)
        if pending.answer.done():
            # The caller has hung up meanwhile.
            self._maintenance.release_soon(decision.reservation_id, plan.reservation.attempt)
        pending.resolve(decision)

    def _note_decision(self, plan: Plan) -> None:
        telemetry = self._replica.telemetry
        telemetry.reuse.decided(plan)
        telemetry.locality_of(plan.decision.locality).inc()
        self._history.record(plan)


def _wanted(batch: list[Pending]) -> list[Pending]:
    """Returns the requests that somebody still waits for: nothing must be reserved for others."""
    return [pending for pending in batch if not pending.answer.done()]
