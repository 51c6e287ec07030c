"""One router replica: decisions, first tokens and releases, and what it does besides."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain

from app.core.errors import (
    AllWorkersBusy,
    KvrouteError,
    NoWorkers,
    RedisUnavailable,
    RouterOverloaded,
    RoutingError,
)
from app.core.failures import Failure
from app.core.key_rules import Spending
from app.core.keys import Keyspace
from app.core.outcomes import Ending
from app.core.settings.router import RouterSettings
from app.core.types import Incarnation, random_hex
from app.core.usage import UsageSums, Who
from app.core.worker_report import WorkerInfo
from app.http.supervisor import supervised
from app.policy.answers import Answer
from app.policy.decision import Decision, RouteRequest
from app.policy.policies import POLICIES
from app.policy.view import View
from app.router.decider import MAX_QUEUED, Decider
from app.router.fleet import Fleet
from app.router.history import History
from app.router.learned import LearnedWorkers
from app.router.limiter import Limiter
from app.router.lookup import LookUp, Recent
from app.router.maintenance import Maintenance
from app.router.metrics import Telemetry
from app.router.pending import Pending
from app.router.prompt import KnownChains, Prompt
from app.router.replica import Replica, UsageTally
from app.router.reports import Reports
from app.router.vouching import Signs, Vouching
from app.router.waiting import Waiting
from app.state import leases, reservations
from app.state.reservations import Release
from app.state.scripts import Call, ScriptRunner

log = logging.getLogger(__name__)

REPORTS_EVERY = 3
"""Reports of a worker of which one is read, unless the policy goes by the load in them. The others
see what changes within minutes: speeds, capacities, how long blocks stay."""
GONE = "gone"
"""Outcome of a decision whose caller hung up."""


class Router:
    """Routes requests while `run` runs."""

    def __init__(
        self,
        runner: ScriptRunner,
        keyspace: Keyspace,
        settings: RouterSettings,
        fleet: Fleet,
        telemetry: Telemetry,
        signs: Signs | None = None,
        tally: UsageTally | None = None,
        limiter: Limiter | None = None,
    ) -> None:
        """signs: None: a worker whose agent is away is as good as gone. tally, limiter: of the
        whole replica; None: there is no other namespace."""
        if tally is None:
            tally = UsageTally(keyspace, settings.usage_days, lambda: fleet.redis_now_ms)
        self.limiter = limiter or Limiter(keyspace)
        replica = Replica(runner, keyspace, settings, fleet, telemetry, tally, self.limiter)
        self.fleet = fleet
        self.telemetry = telemetry
        self._policy = settings.policy
        self._undecided: set[Pending] = set()
        self._has_ended = False
        # rate() does not see the first failures in a series that begins with them.
        telemetry.decisions_of(settings.policy, RoutingError.outcome)
        for outcome in (GONE, *(error.outcome for error in RoutingError.__subclasses__())):
            telemetry.decisions_of(settings.policy, outcome)
        self._reports_every = 1 if POLICIES[settings.policy].reads_reports else REPORTS_EVERY
        self.namespace, self.keyspace = keyspace.namespace, keyspace
        self.redis = runner.redis
        self._runner = runner
        self._history = History(replica)
        self._recent = Recent()
        self._known_chains = KnownChains()
        self._maintenance = Maintenance(replica, self._history)
        self._vouching = Vouching(replica, signs) if signs is not None else None
        self._waiting = Waiting(replica) if settings.wait_queue else None
        self._reports = Reports(replica, self._history, self._maintenance, self._look_again)
        self._taught = LearnedWorkers(fleet)
        self._look_up = LookUp(replica, self._history, self._recent, self._reports, self._taught)
        self._decider = Decider(
            replica, self._look_up, self._history, self._maintenance, self._waiting
        )

    async def run(self) -> None:
        """Run until cancelled. Decisions that are asked for after that raise NoWorkers."""
        self._has_ended = False
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._decider.run())
                tasks.create_task(self._maintenance.run())
                tasks.create_task(self._history.run())
                failures = self.telemetry.task_failures
                tasks.create_task(supervised("reports", self._reports.run, failures))
                if self._vouching is not None:
                    tasks.create_task(supervised("vouching", self._vouching.run, failures))
                measurements = partial(self.fleet.measurements.follow, self._reports_every)
                tasks.create_task(supervised("measurements", measurements, failures))
        finally:
            self._end()
            await self._reports.finish()
            await self._history.finish()

    async def route(self, request: RouteRequest, prompt: Prompt | None = None) -> Decision:
        """Choose a worker and reserve it. Cancel it if its caller is gone.

        prompt: of which the request's chain is made; None: it has been.
        Raises NoWorkers, PromptTooLarge, AllWorkersBusy, Superseded, RouterOverloaded if MAX_QUEUED
        requests are already waiting for a decision, InvalidRequest for a prompt that does not fit
        the size of blocks, and while that is unknown as `refresh`.
        """
        if prompt is not None:
            request.chain = await prompt.chain(await self._block_size(request), self._known_chains)
        started = time.perf_counter()
        outcome = "failed"
        answer: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
        began_ms = self.fleet.redis_now_ms if request.began_ms is None else request.began_ms
        # A balancer sends the same bytes again, and in them the time when they were first sent.
        nonce = f".{random_hex(4)}" if request.balancer_id else ""
        tag = _tag(request.balancer_id, request.owner)
        pending = Pending(request, tag, began_ms, nonce=nonce, answer=answer)
        try:
            decision = await self._decided(pending)
            outcome = "routed"
            if request.carried:
                self._reports.carry(decision)
            elif request.reserve:
                self.telemetry.reuse.ended(decision, "", None)
        except RoutingError as error:
            outcome = error.outcome
            raise
        except asyncio.CancelledError:
            outcome = GONE
            if pending.decided:
                # Decided, but the caller has gone before it could take the answer.
                self.abandon(answer.result())
            raise
        finally:
            if request.spending is not None and not request.carried:
                self._spent(request, request.spending, is_routed=outcome == "routed")
            self.telemetry.decisions_of(request.policy, outcome).inc()
            ended = time.perf_counter() if pending.ticket is None else pending.since_s
            self.telemetry.decision_seconds.observe(ended - started)
            # They hold the error, which refers to this frame, and that to the whole request.
            del answer, pending
        return decision

    def _spent(self, request: RouteRequest, spending: Spending, *, is_routed: bool) -> None:
        """Settle a request that somebody else carries, as estimated: nobody tells what it uses."""
        prompt = request.isl_tokens if is_routed else 0
        output = spending.tokens - prompt if is_routed else 0
        cached = prompt - spending.uncached if is_routed else 0
        self.limiter.ended(spending, prompt, cached, output)

    async def let_in(self, spending: Spending) -> None:
        """Let a request in that any worker may answer, without a decision. Raises RateLimited."""
        request = RouteRequest("", [], output_tokens=0, spending=spending)
        asking = self.limiter.asking([request])
        (reply,) = await self._runner.run_each([asking.call])
        asking.told(reply)
        self.limiter.let_in(request)
        if spending.refused is not None:
            raise spending.refused

    async def _decided(self, pending: Pending) -> Decision:
        if self._has_ended:
            raise self._not_served()
        if not self._decider.submit(pending):
            raise RouterOverloaded(f"{MAX_QUEUED} requests are already waiting for a decision")
        self._undecided.add(pending)
        try:
            return await pending.answer
        finally:
            self._undecided.discard(pending)
            del pending  # an error would keep it, as in `route`

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits for a decision, and nothing is carried."""
        return not self._undecided and not self._reports.carries

    def _end(self) -> None:
        self._has_ended = True
        for pending in self._undecided:
            pending.fail(self._not_served())

    def _not_served(self) -> NoWorkers:
        return NoWorkers(f"namespace {self.namespace} is not served here any more")

    async def stop(self) -> None:
        """Let no request wait any longer: the replica is about to stop."""
        if self._waiting is not None:
            self._waiting.stop()

    @property
    def danger_of_eviction(self) -> str:
        """Why the eviction policy of Redis is dangerous; "": it is not."""
        return self._maintenance.danger_of_eviction

    async def refresh(self) -> View:
        """Returns the workers as they are now. Raises RedisUnavailable, NamespaceMissing,
        WrongVersion."""
        return await self._look_up.workers()

    async def wake(self, asks: RouteRequest) -> None:
        """Wait, in the line as that request would, until there is a worker, where a planner starts
        one.

        Raises NoWorkers, AllWorkersBusy if too many wait, and RouterOverloaded.
        """
        answer: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
        tag = _tag("", "")
        request = RouteRequest(
            *(f"wake-{tag}", [], 1, self._policy),
            reserve=False,
            tenant=asks.tenant,
            priority=asks.priority,
            holder=asks.holder,
        )
        pending = Pending(request, tag, answer=answer, for_any=True)
        try:
            await self._decided(pending)
        except AllWorkersBusy:
            if self.fleet.sleeps:
                raise

    async def _block_size(self, request: RouteRequest) -> int:
        """Returns tokens per block. A request that finds them unknown counts as a decision."""
        try:
            if self.fleet.block_size is None:
                await self.refresh()
            if self.fleet.block_size is None and request.reserve:
                await self.wake(request)
            size = self.fleet.block_size
            if size is None:
                raise NoWorkers("no worker is alive")
        except KvrouteError:
            self.telemetry.decisions_of(request.policy, NoWorkers.outcome).inc()
            raise
        return size

    async def is_foreign(self, request_id: str, owner: str) -> bool:
        """Whether that is the id of another owner's reservation. Raises RedisUnavailable."""
        return await reservations.is_foreign(self._runner, self.keyspace, request_id, owner)

    async def prefill_complete(self, request_id: str) -> bool:
        """Returns False if there is no such reservation. Raises RedisUnavailable, WrongVersion."""
        self._refuse_wrong_version()
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._reports.first_token(request_id, answer)
        return await answer

    async def source_complete(self, request_id: str) -> bool:
        """Returns False if there is no such source. Raises RedisUnavailable, WrongVersion."""
        self._refuse_wrong_version()
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._reports.source_complete(request_id, self.fleet.infos, answer)
        return await answer

    def source_done(self, decision: Decision) -> None:
        """Report that the source has done its part, without waiting for Redis."""
        if decision.source is not None:
            self._reports.source_complete(decision.reservation_id, [decision.source.worker])

    def first_token(self, reservation_id: str, *, late_ms: int | None = None) -> None:
        """Report a first token, without waiting for Redis. late_ms: how much later than predicted;
        None: unknown."""
        self._reports.first_token(reservation_id, late_ms=late_ms)

    def end(
        self,
        reservation_id: str,
        ending: Ending | None = None,
        *,
        answered: bool = True,
        late_ms: int | None = None,
    ) -> None:
        """Report the end of a request, without waiting for Redis.

        answered: whether the worker has, to the end. late_ms: for how much longer than predicted no
        first token came; None: unknown.
        """
        self._reports.end(reservation_id, ending=ending, answered=answered, late_ms=late_ms)

    def count(self, who: Who, used: UsageSums) -> None:
        """Count what a request has used; Redis is told with its end."""
        self._reports.count(who, used)

    def answered(self, decision: Decision, request: RouteRequest) -> None:
        """Note that the worker has answered all of the request as decided: it holds the prompt."""
        if decision.source is None:
            self._recent.add(decision.incarnation, request.chain, time.monotonic())

    def teach(self, decision: Decision, answer: Answer) -> None:
        """Learn from what a worker's engine says of an answer that it gave to its end."""
        self._taught.add(decision, answer)

    def abandon(self, decision: Decision) -> None:
        """Release, soon, what was reserved for a caller that is gone."""
        if decision.reservation is not None:
            self._reports.forget(decision.reservation_id)
            self._maintenance.release_soon(decision.reservation_id, decision.reservation.attempt)

    async def release(
        self,
        request_id: str,
        *,
        failure: Failure | None = None,
        caller: str = "",
        ending: Ending | None = None,
    ) -> bool:
        """Returns False if there is no such reservation (any more).

        ending: what came of the request, to be recorded; None: nobody says.
        failure: how its worker failed it; None: it did not. caller: who says so.
        Raises RedisUnavailable; the release then follows once Redis is back, if this router lives,
        and so it does if it is cancelled. Raises WrongVersion.
        """
        self._refuse_wrong_version()
        if failure is None:
            answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            self._reports.end(request_id, answer, ending)
            return await answer
        self._reports.forget(request_id)
        now_ms = self.fleet.redis_now_ms
        try:
            # First, as only the reservation tells which worker that is. In the same round trip it
            # would come second if Redis had yet to be sent this script, but not the other.
            await self.count_failures(
                [leases.suspend(self.keyspace, failure, request_id, caller=caller)]
            )
            (attempt,) = await self._runner.one(
                reservations.release(self.keyspace, [Release(request_id)])
            )
        except (RedisUnavailable, asyncio.CancelledError):
            if now_ms is not None:
                # But not what the same id may have been promised by then.
                self._maintenance.release_soon(request_id, began_by_ms=now_ms)
            raise
        known = attempt is not None
        if attempt is not None:
            self._history.withdraw(attempt)
        self.telemetry.reservations_of("released" if known else "unknown").inc()
        self._look_again()
        return known

    def _refuse_wrong_version(self) -> None:
        if self.fleet.wrong_version is not None:
            raise self.fleet.wrong_version

    async def count_failures(self, calls: Sequence[Call[list[Incarnation]]]) -> None:
        """Count failures of workers, for all replicas. calls: of `leases.suspend`. Raises
        RedisUnavailable."""
        for one in chain.from_iterable(await self._runner.run(calls)):
            self.telemetry.suspensions.inc()
            log.warning(
                "%s failed requests: nothing is routed there until it renews its lease, or longer, "
                "if it fails more in a row",
                self.fleet.name_of(one),
            )

    async def settle_fetches(self, attempts: Sequence[str]) -> None:
        """Note that what was fetched for these requests is right. Raises RedisUnavailable."""
        await self._runner.run(reservations.settle(self.keyspace, attempts))

    async def answers_again(self, worker: WorkerInfo, names: Iterable[str]) -> None:
        """Forget the marks of these names, for which a worker was left alone: it has answered.
        Raises as `refresh`."""
        await self._runner.one(leases.answers_again(self.keyspace, worker.key, names))
        await self.refresh()

    def _look_again(self) -> None:
        if self._waiting is not None:
            self._waiting.look_again()


def _tag(balancer_id: str, owner: str) -> str:
    """Returns 16 hex digits that nobody else can guess; the same for the same balancer_id. Those of
    an owner's requests end in its mark."""
    mark = reservations.owner_mark(owner) if owner else ""
    if not balancer_id:
        return random_hex(8 - len(mark) // 2) + mark
    size = 8 - len(mark) // 2
    return hashlib.blake2b(balancer_id.encode(), digest_size=size).hexdigest() + mark
