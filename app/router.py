"""One request: hashes -> overlap and loads -> cost -> reservation."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.core import index, matching, predictions, reservations, sessions
from app.core.config import RouterSettings
from app.core.errors import (
    AllWorkersBusy,
    NamespaceMissing,
    NoWorkers,
    RedisUnavailable,
    RouterOverloaded,
    RoutingError,
)
from app.core.keys import Keyspace
from app.core.matching import Overlaps
from app.core.reservations import Load, Refused, Reservation, Snapshot, Wish
from app.core.scripts import Call, ScriptRunner
from app.core.types import Incarnation, SequenceHash, TierOverlap, WorkerInfo
from app.fleet import NO_OVERLAP, Fleet, View
from app.locality import locality_of
from app.maintenance import Maintenance
from app.pace import Pace
from app.policy.affinity import Affinity, discounted
from app.policy.cost import POLICIES, Candidates, RequestSize, predicted_prefill_s
from app.policy.select import Choice, choose
from app.recording import Record, Recorder, Seen, sampled
from app.telemetry import Telemetry
from app.waiting import Waiter, Waiting

log = logging.getLogger(__name__)

MAX_BATCH = 64
MAX_QUEUED = 1024
MAX_TRIES = 32
"""The last one takes the worker as it is. A try is lost only to another replica that reserves, so
about so many can race before one reserves on loads known to be out of date. Of a burst of 32 the
owner gets 16 through one replica; through 16 that look at the same moment it gets those with 32
tries, with 16 tries 18 in one burst of four, with 4 tries 6."""
COMPLAINTS_PER_S = 1
"""That Redis is away. Metrics count each decision without it."""


@dataclass(slots=True)
class RouteRequest:
    """chain: sequence hashes of the prompt's full blocks. exclude: worker ids or worker keys.

    session: "" for none. tenant, priority, hung_up: for one that has to wait; see Waiting.
    Like all that every decision makes it is not frozen, which would take three times as long.
    """

    request_id: str
    chain: list[SequenceHash]
    isl_tokens: int
    policy: str
    reserve: bool = True
    explain: bool = False
    exclude: frozenset[str] = frozenset()
    session: str = ""
    tenant: str = ""
    priority: str = "normal"
    hung_up: Callable[[], Awaitable[object]] | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """One worker as a decision saw it. terms: see the policy's cost function."""

    info: WorkerInfo
    overlap: TierOverlap
    load: Load
    queue_s: float
    eligible: bool
    cost: float
    terms: dict[str, float]


@dataclass(slots=True)
class Decision:
    """Where a request goes.

    degraded: decided without Redis, by load alone, from the last loads seen.
    reserved: capacity is promised to the request until it is released or expires.
    """

    request_id: str
    worker: WorkerInfo
    overlap: TierOverlap
    isl_tokens: int
    isl_blocks: int
    policy: str
    tied: bool
    tries: int
    degraded: bool
    reserved: bool
    attempt: str
    """Tells the reservation from others of the same request."""
    locality: str
    """One of LOCALITIES: was the worker chosen that holds most, and if not, why."""
    best: str
    """The worker that holds most of the prompt, and how many blocks; "" where nobody holds any."""
    best_overlap: int
    waited_ms: int
    """For a worker that could take it."""
    candidates: list[Candidate]
    """Filled where the request asked to explain."""


@dataclass(slots=True)
class _Pending:
    """A request on its way to a decision."""

    request: RouteRequest
    attempt: str
    answer: asyncio.Future[Decision]
    overlaps: Overlaps = field(default_factory=dict)
    session_at: Incarnation | None = None
    """Where its session last went."""
    tries: int = 0
    waiter: Waiter | None = None
    """Its place in line, if it had to wait."""

    @property
    def waited_ms(self) -> int:
        return round(1000 * (time.perf_counter() - self.waiter.since_s)) if self.waiter else 0


@dataclass(slots=True)
class _Plan:
    """What one try wants: the worker at `position` of the view, and the reservation on it."""

    pending: _Pending
    position: int
    incarnation: Incarnation
    seen_total: int
    reservation: Reservation
    decision: Decision
    view: View
    seen: Candidates
    eligible: NDArray[np.bool_]
    affinity: Affinity | None


class Router:
    """Decides the requests that wait together, one after another, while `run` runs.

    They share their round trips to Redis, and each sees what the ones before it reserve: so the
    reservation that Redis refuses as `changed` was always overtaken by another replica.
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
        self._runner = runner
        self._keyspace = keyspace
        self._boundaries = matching.Boundaries()
        self._settings = settings
        self._loads = reservations.loads(keyspace)
        self._max_queue_s = settings.max_queue_s
        self._session_ttl_ms = round(settings.session_ttl_s * 1000)
        self._ttl_ms = round(settings.reservation_ttl_s * 1000)
        self._rng = np.random.default_rng(settings.seed)
        self._turn = 0
        self._predictions = (
            predictions.PredictionSettings(settings.prediction_ttl_s, settings.prediction_entries)
            if settings.count_in_flight or not settings.kv_events
            else None
        )
        # Past the limit the oldest are lost, which costs a little overlap.
        self._routed: deque[Call[int]] = deque(maxlen=MAX_QUEUED)
        self._has_routed = asyncio.Event()
        self._queue: asyncio.Queue[_Pending] = asyncio.Queue(MAX_QUEUED)
        self._waiting = (
            Waiting(runner, keyspace, settings, fleet, telemetry) if settings.wait_queue else None
        )
        self._complaints = Pace(COMPLAINTS_PER_S)
        self._nonce = secrets.token_hex(4)
        self._attempts = 0
        self._recorder = Recorder(runner, keyspace, settings)
        self._maintenance = Maintenance(
            runner, keyspace, settings, fleet, telemetry, self._predictions
        )

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            if self._waiting is not None:
                tasks.create_task(self._waiting.run())
            tasks.create_task(self._decide_forever())
            tasks.create_task(self._maintenance.run())
            tasks.create_task(self._record_routed())
            tasks.create_task(self._recorder.run())
            tasks.create_task(self.fleet.follow())
            tasks.create_task(self._runner.redis.follow())

    async def route(self, request: RouteRequest) -> Decision:
        """Choose a worker and reserve it.

        Raises NoWorkers, PromptTooLarge, AllWorkersBusy, CallerGone, and RouterOverloaded if
        MAX_QUEUED requests are to be decided.
        """
        started = time.perf_counter()
        outcome = "failed"
        answer: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
        pending = _Pending(request, self._new_attempt(), answer)
        try:
            if not self._submit(pending):
                raise RouterOverloaded(f"{MAX_QUEUED} requests wait for a decision")
            decision = await answer
            outcome = "routed"
        except RoutingError as error:
            outcome = error.outcome
            raise
        finally:
            self.telemetry.decisions_of(request.policy, outcome).inc()
            ended = time.perf_counter() if pending.waiter is None else pending.waiter.since_s
            self.telemetry.decision_seconds.observe(ended - started)
        self._count(decision)
        return decision

    async def stop(self) -> None:
        """Lets nobody wait any longer: the replica is about to end."""
        if self._waiting is not None:
            self._waiting.stop()

    async def refresh(self) -> View:
        """The workers as they are now. Raises RedisUnavailable, NamespaceMissing."""
        with self._timed("look_up"):
            snapshot = await self._runner.one(self._loads)
        return await self.fleet.view(snapshot)

    async def prefill_complete(self, request_id: str) -> bool:
        """False if there is no such reservation. Raises RedisUnavailable."""
        known = await self._runner.one(reservations.prefill_complete(self._keyspace, request_id))
        self.telemetry.reservations_of("prefill_complete" if known else "unknown").inc()
        self._look_again()
        return known

    def abandon(self, decision: Decision) -> None:
        """Release what was reserved for a caller that is gone, soon."""
        self._maintenance.release_soon(decision.request_id, decision.attempt)

    async def release(self, request_id: str) -> bool:
        """False if there is no such reservation (any more).

        Raises RedisUnavailable; it is then made up for once Redis is back, if this router lives.
        """
        now_ms = self.fleet.redis_now_ms
        try:
            known = await self._runner.one(reservations.release(self._keyspace, request_id))
        except RedisUnavailable:
            if now_ms is not None:
                # Not of what the same id may have been promised by then.
                self._maintenance.release_soon(request_id, expires_by_ms=now_ms + self._ttl_ms)
            raise
        self.telemetry.reservations_of("released" if known else "unknown").inc()
        self._look_again()
        return known

    def _look_again(self) -> None:
        if self._waiting is not None:
            self._waiting.look_again()

    def _new_attempt(self) -> str:
        self._attempts += 1
        return f"{self._nonce}-{self._attempts}"

    def _submit(self, pending: _Pending) -> bool:
        """Have it decided; False: too many are to be."""
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
            # Who asked may have gone: then nothing must be reserved for them.
            batch = [pending for pending in batch if not pending.answer.done()]
            try:
                await self._decide(batch)
            except Exception as error:
                log.exception("a batch of %d decisions failed", len(batch))
                for pending in batch:
                    if not pending.answer.done():
                        pending.answer.set_exception(error)

    async def _decide(self, batch: list[_Pending]) -> None:
        try:
            view = await self._look_up(batch)
        except (RedisUnavailable, NamespaceMissing) as error:
            self.fleet.note(error)
            # Who came meanwhile shall not wait for a deadline each.
            while not self._queue.empty():
                batch.append(self._queue.get_nowait())
            self._decide_degraded(batch, error)
            return
        waiting = self._those_who_need_not_wait(batch, view)
        for attempt in range(1, MAX_TRIES + 1):
            if attempt > 1:
                self.telemetry.retries.inc(len(waiting))
            plans, refused = self._plan_all(waiting, view)
            await self._release_their_own(refused, view)
            try:
                with self._timed("reserve"):
                    replies = await self._reserve(plans, final=attempt == MAX_TRIES)
                waiting, fresh = self._settle(plans, replies)
                if fresh is None:
                    return
                view = await self.fleet.view(fresh)
            except RedisUnavailable as error:
                self.fleet.note(error)
                undecided = [p for p in waiting if not p.answer.done()]
                # Redis may still run what it has been sent.
                for p in undecided:
                    self._maintenance.release_soon(p.request.request_id, p.attempt)
                self._decide_degraded(undecided, error)
                return
        for pending in waiting:
            self._maintenance.release_soon(pending.request.request_id, pending.attempt)
            pending.attempt = self._new_attempt()
            busy = f"every choice of {MAX_TRIES} was full by then"
            self._turn_away(pending, view, AllWorkersBusy(busy, view.shortest_queue_s))

    async def _look_up(self, batch: list[_Pending]) -> View:
        """Overlaps of all prompts and the loads of all workers. Sets `overlaps` of each, and
        `session_at`."""
        while True:
            shards = self.fleet.shards or (await self._runner.one(self._loads)).shards or 1
            chains = [pending.request.chain for pending in batch]
            recall = self._recall(batch)
            with self._timed("look_up"):
                overlaps, (snapshot, *others) = await matching.match(
                    self._runner,
                    self._keyspace,
                    chains if self._settings.kv_events else [],
                    shards,
                    along=[self._loads, *recall, *self._foresee(chains, shards)],
                    boundaries=self._boundaries,
                )
            recalled, foreseen = others[: len(recall)], others[len(recall) :]
            if isinstance(snapshot, RedisUnavailable):
                raise snapshot
            view = await self.fleet.view(snapshot)
            # Otherwise the namespace was made anew, and the blocks lie elsewhere.
            if snapshot.shards == shards:
                break
        self.telemetry.blind.inc(overlaps.count(None))
        for pending, found, ahead in zip_longest(batch, overlaps, foreseen):
            known = ahead if isinstance(ahead, dict) else {}
            pending.overlaps = with_predicted(found or {}, known)
        for found_at in recalled:
            if isinstance(found_at, list):
                for pending, incarnation in zip(batch, found_at, strict=True):
                    pending.session_at = incarnation
        return view

    def _recall(self, batch: list[_Pending]) -> list[Call[list[Incarnation | None]]]:
        """At most one call, for all of them, if any counts on it."""
        asked = [pending.request.session for pending in batch]
        if not self._settings.session_affinity or not any(asked):
            return []
        return [sessions.recall(self._keyspace, asked, self._session_ttl_ms)]

    def _foresee(
        self, chains: list[list[SequenceHash]], shards: int
    ) -> list[Call[dict[Incarnation, int]]]:
        if self._predictions is None:
            return []
        return [
            predictions.foresee(_shard(self._keyspace, chain, shards), chain, self._predictions)
            for chain in chains
        ]

    def _predict(self, plan: _Plan) -> None:
        """Record, soon, where the request's blocks will be."""
        chain = plan.pending.request.chain
        if self._predictions is not None and chain:
            shard = _shard(self._keyspace, chain, self.fleet.shards or 1)
            self._routed.append(
                predictions.predict(shard, plan.incarnation, chain, self._predictions)
            )
            self._has_routed.set()

    def _remember(self, plan: _Plan) -> None:
        """Record, soon, where the request's session went."""
        session = plan.pending.request.session
        if self._settings.session_affinity and session:
            self._routed.append(
                sessions.remember(self._keyspace, session, plan.incarnation, self._session_ttl_ms)
            )
            self._has_routed.set()

    async def _record_routed(self) -> None:
        """Write predictions and sessions, those that wait together in one round trip."""
        while True:
            await self._has_routed.wait()
            self._has_routed.clear()
            calls = list(self._routed)
            self._routed.clear()
            try:
                await self._runner.run(calls)
            except RedisUnavailable as error:
                log.debug("%d predictions and sessions are lost: %s", len(calls), error)

    def _note_decision(self, plan: _Plan) -> None:
        decision = plan.decision
        self.telemetry.locality_of(decision.locality).inc()
        self.telemetry.count_blocks(
            str(decision.worker.key), decision.isl_blocks, decision.overlap.total
        )
        self._recorder.add(partial(_recorded, plan))

    def _plan_all(
        self, waiting: list[_Pending], view: View
    ) -> tuple[list[_Plan], list[tuple[_Pending, AllWorkersBusy]]]:
        """Decide one after another; answer those who get no worker or want no reservation.

        But not those for whom all are busy and who may hold a reservation themselves.
        """
        plans, refused = [], []
        for pending in waiting:
            pending.tries += 1
            try:
                plan = self._plan(pending, view, degraded=False)
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
        self, refused: list[tuple[_Pending, AllWorkersBusy]], view: View
    ) -> None:
        """Who routes an id again gives up what it holds, and may be refused because of just that:
        then it is decided anew."""
        if not refused:
            return
        try:
            held = await self._runner.run(
                [reservations.release(self._keyspace, p.request.request_id) for p, _ in refused]
            )
        except RedisUnavailable:
            held = [False] * len(refused)
        for (pending, error), its_own in zip(refused, held, strict=True):
            if not (its_own and self._submit(pending)):
                self._turn_away(pending, view, error)

    def _those_who_need_not_wait(self, batch: list[_Pending], view: View) -> list[_Pending]:
        """All but those who came while others wait, at whichever replica: they wait as well."""
        if self._waiting is None or not (view.somebody_waits or self._waiting.somebody):
            return batch
        going = []
        for pending in batch:
            if pending.waiter is None and pending.request.reserve:
                self._let_wait(pending, view)
            else:
                going.append(pending)
        return going

    def _turn_away(self, pending: _Pending, view: View, error: RoutingError) -> None:
        """Nobody can take it now: let it wait, if that is of use, else fail."""
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

    def _let_wait(self, pending: _Pending, view: View) -> None:
        assert self._waiting is not None
        request = pending.request
        longest = max((o.total for o in pending.overlaps.values()), default=0)
        block_size = view.infos[0].block_size if view.infos else 1
        pending.waiter = self._waiting.enter(
            request.tenant,
            request.priority,
            # What is cached somewhere costs the fleet little; a block at least is to be computed.
            tokens=max(request.isl_tokens - longest * block_size, block_size),
            picky=bool(request.exclude),
            now_ms=view.now_ms,
            answer=pending.answer,
            decide=partial(self._submit, pending),
            hung_up=request.hung_up,
        )

    def _plan(self, pending: _Pending, view: View, *, degraded: bool) -> _Plan:
        request = pending.request
        if not view.infos:
            raise NoWorkers("no worker is alive")
        policy = "least_loaded" if degraded else request.policy
        size = RequestSize(request.isl_tokens, view.infos[0].block_size)
        candidates = view.candidates(pending.overlaps)
        if degraded:
            # Nobody tells of requests that end meanwhile: all would look full before long.
            candidates = replace(candidates, max_requests=np.full(len(view.infos), np.inf))
        affinity = self._affinity(pending, view)
        eligible = _eligible(view, request)
        choice = choose(
            policy,
            candidates,
            size,
            eligible=eligible,
            rng=self._rng,
            turn=self._turn,
            temperature=self._settings.temperature,
            cost=discounted(POLICIES[policy], affinity) if affinity is not None else None,
            max_queue_s=math.inf if degraded or not request.reserve else self._max_queue_s,
        )
        self._turn += request.reserve
        position = choice.index
        incarnation = view.incarnations[position]
        overlap = pending.overlaps.get(incarnation, NO_OVERLAP)
        locality, best, best_overlap = locality_of(
            view, candidates, pending.overlaps, eligible, choice, overlap.total, affinity
        )
        decision = Decision(
            request_id=request.request_id,
            worker=view.infos[position],
            overlap=overlap,
            isl_tokens=request.isl_tokens,
            isl_blocks=size.isl_blocks,
            policy=policy,
            tied=choice.tied,
            tries=pending.tries,
            degraded=degraded,
            reserved=request.reserve and not degraded,
            attempt=pending.attempt,
            locality="degraded" if degraded else locality,
            best=best,
            best_overlap=best_overlap,
            waited_ms=pending.waited_ms,
            candidates=(
                _seen(view, pending.overlaps, eligible.tolist(), choice) if request.explain else []
            ),
        )
        return _Plan(
            pending,
            position,
            incarnation,
            view.loads[position].total,
            _reservation(decision, size, choice, candidates),
            decision,
            view,
            candidates,
            eligible,
            affinity,
        )

    def _affinity(self, pending: _Pending, view: View) -> Affinity | None:
        """For its session, if that went to a worker that still lives."""
        if pending.session_at is None:
            return None
        position = view.position(pending.session_at)
        if position is None:
            return None
        return Affinity(position, self._settings.session_affinity, self._max_queue_s)

    async def _reserve(self, plans: list[_Plan], *, final: bool) -> list[Refused | None]:
        if not plans:
            return []
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
        self, plans: list[_Plan], replies: list[Refused | None]
    ) -> tuple[list[_Pending], Snapshot | None]:
        """Answer what was reserved; who is left, and the fresh loads if anybody was refused."""
        left: list[_Pending] = []
        fresh: Snapshot | None = None
        for plan, refused in zip(plans, replies, strict=True):
            if refused is None:
                self._take(plan)
            else:
                self.telemetry.conflicts.labels(refused.reason).inc()
                left.append(plan.pending)
                fresh = refused.fresh
        return left, fresh

    def _take(self, plan: _Plan) -> None:
        """Answer with what is reserved."""
        self.telemetry.reservations_of("made").inc()
        self._predict(plan)
        self._remember(plan)
        self._note_decision(plan)
        if plan.pending.answer.done():
            # Who waited has hung up meanwhile.
            self.abandon(plan.decision)
        _answer(plan.pending, plan.decision)

    def _decide_degraded(self, batch: list[_Pending], reason: Exception) -> None:
        """Spread by the loads last seen, counting on what is decided meanwhile."""
        if self._complaints.lets_through():
            log.warning("deciding without Redis: %s", reason)
        view = self.fleet.last_view
        for pending in batch:
            if view is None:
                _fail(pending, NoWorkers(f"no worker was ever seen: {reason}"))
                continue
            pending.overlaps = {}
            try:
                plan = self._plan(pending, view, degraded=True)
            except RoutingError as error:
                _fail(pending, error)
                continue
            view.add(plan.position, plan.reservation)
            self.telemetry.degraded.inc()
            self._note_decision(plan)
            _answer(pending, plan.decision)

    def _count(self, decision: Decision) -> None:
        if decision.reserved:
            overlap = decision.overlap
            self.telemetry.isl_blocks.inc(decision.isl_blocks)
            if overlap.device:
                self.telemetry.overlap_of("device").inc(overlap.device)
            if overlap.host:
                self.telemetry.overlap_of("host").inc(overlap.host)
            if overlap.disk:
                self.telemetry.overlap_of("disk").inc(overlap.disk)
            self.telemetry.hit_fraction.observe(overlap.total / decision.isl_blocks)

    def _timed(self, step: str) -> AbstractContextManager[Any]:
        return self.telemetry.seconds_of(step).time()


def _shard(keyspace: Keyspace, chain: list[SequenceHash], shards: int) -> Keyspace:
    return keyspace.of_shard(index.shard_of(chain[0], shards) if chain else 0)


def with_predicted(overlaps: Overlaps, foreseen: dict[Incarnation, int]) -> Overlaps:
    """`overlaps`, longer on the device where more blocks are foreseen than are published."""
    merged = dict(overlaps)
    for inc, blocks in foreseen.items():
        known = overlaps.get(inc, NO_OVERLAP)
        if blocks > known.total:
            merged[inc] = replace(known, device=known.device + blocks - known.total)
    return merged


def _eligible(view: View, request: RouteRequest) -> NDArray[np.bool_]:
    """Which workers the request allows, (workers,)."""
    if not request.exclude:
        return view.everybody
    keys = [info.key for info in view.infos]
    return np.array([request.exclude.isdisjoint((key.worker_id, str(key))) for key in keys])


def _reservation(
    decision: Decision, size: RequestSize, choice: Choice, candidates: Candidates
) -> Reservation:
    """What the decision takes of its worker."""
    prefill_s = choice.costs.terms.get("prefill_s")
    if prefill_s is None:
        prefill_s = predicted_prefill_s(candidates, size)
    cached = min(decision.overlap.total * size.block_size, size.isl_tokens)
    return Reservation(
        decision.request_id,
        prefill_tokens=max(1, size.isl_tokens - cached),
        prefill_us=round(1e6 * float(prefill_s[choice.index])),
        blocks=size.isl_blocks,
        attempt=decision.attempt,
    )


def _answer(pending: _Pending, decision: Decision) -> None:
    if not pending.answer.done():
        pending.answer.set_result(decision)


def _fail(pending: _Pending, error: RoutingError) -> None:
    if not pending.answer.done():
        pending.answer.set_exception(error)


def _seen(view: View, overlaps: Overlaps, eligible: list[bool], choice: Choice) -> list[Candidate]:
    """The candidates of a decision, copied out of the arrays it was made from."""
    return [
        Candidate(
            info=info,
            overlap=overlaps.get(inc, NO_OVERLAP),
            load=replace(load),
            queue_s=load.queue_s(view.now_ms),
            eligible=ok,
            cost=float(choice.costs.cost[i]),
            terms={name: float(values[i]) for name, values in choice.costs.terms.items()},
        )
        for i, (inc, info, load, ok) in enumerate(
            zip(view.incarnations, view.infos, view.loads, eligible, strict=True)
        )
    ]


def _recorded(plan: _Plan, details: Pace) -> Record:
    decision, request = plan.decision, plan.pending.request
    seen: Seen | None = None
    if request.explain or details.lets_through():
        workers = [str(info.key) for info in plan.view.infos]
        seen = Seen(
            workers, decision.worker.block_size, plan.seen, plan.eligible.tolist(), plan.affinity
        )
    return Record(
        request_id=decision.request_id,
        at_ms=plan.view.now_ms,
        worker=str(decision.worker.key),
        policy=decision.policy,
        locality=decision.locality,
        isl_tokens=decision.isl_tokens,
        isl_blocks=len(request.chain),
        overlap=decision.overlap,
        best=decision.best,
        best_overlap=decision.best_overlap,
        tries=decision.tries,
        waited_ms=decision.waited_ms,
        blocks=sampled(request.chain),
        seen=seen,
    )
