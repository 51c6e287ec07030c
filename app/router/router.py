"""One request: hashes -> overlap and loads -> cost -> reservation."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from functools import partial
from itertools import count

from app.core.config import RouterSettings
from app.core.errors import (
    AllWorkersBusy,
    KvrouteError,
    NamespaceMissing,
    NoWorkers,
    RedisUnavailable,
    RouterOverloaded,
    RoutingError,
)
from app.core.keys import Keyspace
from app.core.rate_limit import Pace
from app.policy.decision import Decision, Pending, RouteRequest
from app.policy.plan import Plan, Planner
from app.router.fleet import Fleet, View
from app.router.history import Routed
from app.router.lookup import LookUp
from app.router.maintenance import Maintenance
from app.router.metrics import Telemetry
from app.router.waiting import Waiting
from app.state import leases, reservations
from app.state.decisions import Recorder
from app.state.reservations import Refused, Snapshot, Wish
from app.state.scripts import ScriptRunner

log = logging.getLogger(__name__)

MAX_BATCH = 64
MAX_QUEUED = 1024
MAX_TRIES = 32
"""The last try takes the worker as it is. A try is lost only to another replica that reserves, so
about this many can race before one reserves on loads known to be out of date. Of a burst of 32, the
owner gets 16 through one replica. Through 16 replicas that look at the same moment, it gets 16 with
32 tries; with 16 tries, 18 in one burst of four; with 4 tries, 6."""
COMPLAINTS_PER_S = 1
"""Log messages that Redis is unreachable. Metrics count every decision made without it."""


class Router:
    """Decides the requests that are pending together, one after another, while `run` runs.

    They share their round trips to Redis, and each sees what those before it reserve. So if Redis
    refuses a reservation as `changed`, it was always another replica that overtook it.
    """

    def __init__(
        self,
        runner: ScriptRunner,
        keyspace: Keyspace,
        settings: RouterSettings,
        fleet: Fleet,
        telemetry: Telemetry,
    ) -> None:
        self.fleet = fleet
        self.telemetry = telemetry
        # rate() does not see the first failures in a series that begins with them.
        telemetry.decisions_of(settings.policy, RoutingError.outcome)
        for error in RoutingError.__subclasses__():
            telemetry.decisions_of(settings.policy, error.outcome)
        self._runner = runner
        self._keyspace = keyspace
        self._ttl_ms = round(settings.reservation_ttl_s * 1000)
        self._routed = Routed(runner, keyspace, settings)
        self._look_up = LookUp(runner, keyspace, settings, fleet, telemetry, self._routed)
        self._planner = Planner(settings)
        self._queue: asyncio.Queue[Pending] = asyncio.Queue(MAX_QUEUED)
        self._waiting = (
            Waiting(runner, keyspace, settings, fleet, telemetry) if settings.wait_queue else None
        )
        self._complaints = Pace(COMPLAINTS_PER_S)
        self._complained = False
        self._nonce = secrets.token_hex(4)
        self._attempts = count(1)
        self._recorder = Recorder(runner, keyspace, settings)
        self._maintenance = Maintenance(
            runner, keyspace, fleet, telemetry, self._routed.predictions
        )

    async def run(self) -> None:
        """Run until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            if self._waiting is not None:
                tasks.create_task(self._waiting.run())
            tasks.create_task(self._decide_forever())
            tasks.create_task(self._maintenance.run())
            tasks.create_task(self._routed.run())
            tasks.create_task(self._recorder.run())
            tasks.create_task(self.fleet.follow())
            tasks.create_task(self._runner.redis.follow())

    async def route(self, request: RouteRequest) -> Decision:
        """Choose a worker and reserve it.

        Raises NoWorkers, PromptTooLarge, AllWorkersBusy, CallerGone, and RouterOverloaded if
        MAX_QUEUED requests are already waiting for a decision.
        """
        started = time.perf_counter()
        outcome = "failed"
        answer: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
        pending = Pending(request, f"{self._nonce}-{next(self._attempts)}", answer)
        try:
            if not self._submit(pending):
                raise RouterOverloaded(f"{MAX_QUEUED} requests are already waiting for a decision")
            decision = await answer
            outcome = "routed"
        except RoutingError as error:
            outcome = error.outcome
            raise
        except asyncio.CancelledError:
            if pending.decided:
                # Decided, but the caller has gone before it could take the answer.
                self.abandon(answer.result())
            raise
        finally:
            self.telemetry.decisions_of(request.policy, outcome).inc()
            ended = time.perf_counter() if pending.waiter is None else pending.waiter.since_s
            self.telemetry.decision_seconds.observe(ended - started)
        return decision

    async def stop(self) -> None:
        """Let no request wait any longer: the replica is about to stop."""
        if self._waiting is not None:
            self._waiting.stop()

    async def refresh(self) -> View:
        """The workers as they are now. Raises RedisUnavailable, NamespaceMissing."""
        return await self._look_up.workers()

    async def block_size(self, policy: str) -> int:
        """Tokens per block. A request that finds them unknown counts as a decision for `policy`.

        Raises NoWorkers, RedisUnavailable, NamespaceMissing.
        """
        try:
            if self.fleet.block_size is None:
                await self.refresh()
            size = self.fleet.block_size
            if size is None:
                raise NoWorkers("no worker is alive")
        except KvrouteError:
            self.telemetry.decisions_of(policy, NoWorkers.outcome).inc()
            raise
        return size

    async def prefill_complete(self, request_id: str) -> bool:
        """False if there is no such reservation. Raises RedisUnavailable."""
        known = await self._runner.one(reservations.prefill_complete(self._keyspace, request_id))
        self.telemetry.reservations_of("prefill_complete" if known else "unknown").inc()
        self._look_again()
        return known

    def abandon(self, decision: Decision) -> None:
        """Release, soon, what was reserved for a caller that is gone."""
        self._maintenance.release_soon(decision.request_id, decision.attempt)

    async def release(self, request_id: str, *, worker_failed: bool = False) -> bool:
        """False if there is no such reservation (any more).

        worker_failed: no request goes to the worker until it has renewed its lease.
        Raises RedisUnavailable; the release then follows once Redis is back, if this router lives.
        """
        now_ms = self.fleet.redis_now_ms
        release = reservations.release(self._keyspace, request_id)
        try:
            # First, as only the reservation tells which worker that is. In the same round trip it
            # would come second if Redis had yet to be sent this script, but not the other.
            if worker_failed:
                await self._suspend_worker_of(request_id)
            known = await self._runner.one(release)
        except RedisUnavailable:
            if now_ms is not None:
                # But not what the same id may have been promised by then.
                self._maintenance.release_soon(request_id, expires_by_ms=now_ms + self._ttl_ms)
            raise
        self.telemetry.reservations_of("released" if known else "unknown").inc()
        self._look_again()
        return known

    async def _suspend_worker_of(self, request_id: str) -> None:
        suspended = await self._runner.one(leases.suspend(self._keyspace, request_id))
        if suspended is not None:
            self.telemetry.suspensions.inc()
            log.warning(
                "%s failed request %s: nothing is routed there until it renews its lease",
                self.fleet.name_of(suspended),
                request_id,
            )

    def _look_again(self) -> None:
        if self._waiting is not None:
            self._waiting.look_again()

    def _submit(self, pending: Pending) -> bool:
        """Queue a request for its decision; False: the queue is full."""
        try:
            self._queue.put_nowait(pending)
        except asyncio.QueueFull:
            return False
        return True

    async def _decide_forever(self) -> None:
        while True:
            batch = [await self._queue.get()]
            while len(batch) < MAX_BATCH and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            # A caller may have gone: nothing must be reserved for it then.
            batch = [pending for pending in batch if not pending.answer.done()]
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
        except (RedisUnavailable, NamespaceMissing) as error:
            self.fleet.note(error)
            # Requests that came meanwhile must not each wait for a deadline.
            while not self._queue.empty():
                batch.append(self._queue.get_nowait())
            self._decide_degraded(batch, error)
            return
        undecided = await self._those_who_need_not_wait(batch, view)
        for attempt in range(1, MAX_TRIES + 1):
            if attempt > 1:
                self.telemetry.retries.inc(len(undecided))
            plans, refused = self._plan_all(undecided, view)
            await self._release_their_own(refused, view)
            if not plans:
                return
            try:
                with self.telemetry.seconds_of("reserve").time():
                    replies = await self._reserve(plans, final=attempt == MAX_TRIES)
                if self._complained:
                    self._complained = False
                    log.info("deciding with Redis again")
                undecided, fresh = self._settle(plans, replies)
                if fresh is None:
                    return
                view = await self.fleet.view(fresh)
            except RedisUnavailable as error:
                self.fleet.note(error)
                lost = [plan.pending for plan in plans if not plan.pending.decided]
                # Redis may still run what it was sent, also for callers who have gone since.
                for pending in lost:
                    self._maintenance.release_soon(pending.request.request_id, pending.attempt)
                self._decide_degraded(lost, error)
                return
        for pending in undecided:
            busy = f"no worker could be reserved in {MAX_TRIES} tries"
            self._turn_away(pending, view, AllWorkersBusy(busy, view.shortest_queue_s))

    def _plan_all(
        self, undecided: list[Pending], view: View
    ) -> tuple[list[Plan], list[tuple[Pending, AllWorkersBusy]]]:
        """Decide one after another; answer those that get no worker or want no reservation.

        Those for which all workers are busy, and which may hold a reservation themselves, are
        returned instead.
        """
        plans, refused = [], []
        for pending in undecided:
            pending.tries += 1
            try:
                plan = self._planner.plan(pending, view)
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
                view.add(plan.position, plan.reservation)
                plans.append(plan)
            else:
                _answer(pending, plan.decision)
        return plans, refused

    async def _release_their_own(
        self, refused: list[tuple[Pending, AllWorkersBusy]], view: View
    ) -> None:
        """Release what refused requests hold, and decide again those that held something.

        A request id that is routed again gives up its reservation, which may be the very reason why
        it was refused.
        """
        held = await self._release_all([pending for pending, _ in refused])
        for (pending, error), its_own in zip(refused, held, strict=True):
            if not (its_own and self._submit(pending)):
                self._turn_away(pending, view, error)

    async def _those_who_need_not_wait(self, batch: list[Pending], view: View) -> list[Pending]:
        """The requests to decide now: those that came while others wait, at any replica, wait too.

        If they are being routed again, they first give up what they hold: the others may be waiting
        for just that.
        """
        if self._waiting is None or not (view.somebody_waits or self._waiting.somebody):
            return batch
        going, joining = list[Pending](), list[Pending]()
        for pending in batch:
            joins = pending.waiter is None and pending.request.reserve
            (joining if joins else going).append(pending)
        await self._release_all(joining)
        for pending in joining:
            self._let_wait(pending, view)
        return going

    async def _release_all(self, some: list[Pending]) -> list[bool]:
        """Release what requests hold from being routed before; whether each held anything."""
        if not some:
            return []
        try:
            return await self._runner.run(
                [reservations.release(self._keyspace, p.request.request_id) for p in some]
            )
        except RedisUnavailable:
            return [False] * len(some)

    def _turn_away(self, pending: Pending, view: View, error: RoutingError) -> None:
        """No worker can take it now: let it wait, if that is of use, else fail it."""
        if (
            self._waiting is None
            or not pending.request.reserve
            or not isinstance(error, AllWorkersBusy)
        ):
            _fail(pending, error)
        elif pending.waiter is None:
            self._let_wait(pending, view)
        else:
            pending.waiter.deciding = False

    def _let_wait(self, pending: Pending, view: View) -> None:
        assert self._waiting is not None
        request = pending.request
        longest = max((o.total for o in pending.overlaps.values()), default=0)
        block_size = view.infos[0].block_size if view.infos else 1
        pending.waiter = self._waiting.enter(
            request.tenant,
            request.priority,
            # What is cached somewhere costs the fleet little; at least one block must be computed.
            tokens=max(request.isl_tokens - longest * block_size, block_size),
            picky=bool(request.exclude) or not view.all_hold(-(-request.isl_tokens // block_size)),
            now_ms=view.now_ms,
            answer=pending.answer,
            decide=partial(self._submit, pending),
            hung_up=request.hung_up,
        )

    async def _reserve(self, plans: list[Plan], *, final: bool) -> list[Refused | None]:
        wishes = [
            Wish(
                plan.incarnation,
                plan.reservation,
                plan.decision.worker.max_requests,
                None if final else plan.seen_total,
            )
            for plan in plans
        ]
        return await self._runner.one(
            reservations.reserve(self._keyspace, wishes, ttl_ms=self._ttl_ms)
        )

    def _settle(
        self, plans: list[Plan], replies: list[Refused | None]
    ) -> tuple[list[Pending], Snapshot | None]:
        """Answer what was reserved; returns the rest, and fresh loads if any was refused."""
        left: list[Pending] = []
        fresh: Snapshot | None = None
        for plan, refused in zip(plans, replies, strict=True):
            if refused is None:
                self._take(plan)
            else:
                self.telemetry.conflicts.labels(refused.reason).inc()
                left.append(plan.pending)
                fresh = refused.fresh
        return left, fresh

    def _take(self, plan: Plan) -> None:
        """Answer with the worker that is reserved."""
        decision = plan.decision
        self.telemetry.reservations_of("made").inc()
        self.telemetry.count_blocks(str(decision.worker.key), decision.isl_blocks, decision.overlap)
        self._routed.add(plan.pending.request, plan.incarnation, self.fleet.shards or 1)
        self._note_decision(plan)
        if plan.pending.answer.done():
            # The caller has hung up meanwhile.
            self.abandon(decision)
        _answer(plan.pending, decision)

    def _note_decision(self, plan: Plan) -> None:
        self.telemetry.locality_of(plan.decision.locality).inc()
        self._recorder.add(plan.record)

    def _decide_degraded(self, batch: list[Pending], reason: Exception) -> None:
        """Spread requests by the loads last seen, plus what has been decided since."""
        if self._complaints.lets_through():
            self._complained = True
            log.warning("deciding without Redis: %s", reason)
        view = self.fleet.last_view
        for pending in batch:
            if pending.answer.done():
                continue
            if view is None:
                _fail(pending, NoWorkers(f"no worker has been seen yet: {reason}"))
                continue
            pending.overlaps = {}
            try:
                plan = self._planner.plan(pending, view, degraded=True)
            except RoutingError as error:
                _fail(pending, error)
                continue
            self.telemetry.degraded.inc()
            if pending.request.reserve:
                view.add(plan.position, plan.reservation)
                self._note_decision(plan)
            _answer(pending, plan.decision)


def _answer(pending: Pending, decision: Decision) -> None:
    if not pending.answer.done():
        pending.answer.set_result(decision)


def _fail(pending: Pending, error: RoutingError) -> None:
    if not pending.answer.done():
        pending.answer.set_exception(error)
