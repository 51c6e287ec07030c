"""The planner's loop: observe, propose, record, act. Only the leader proposes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Mapping
from dataclasses import asdict, replace

import orjson

from app.core.errors import KvrouteError, LeadershipLost
from app.core.keys import Keyspace
from app.core.roles import Role
from app.core.settings.planner import PlannerSettings
from app.planner.changing import MOST_MODELS, Changing
from app.planner.connectors.base import Advise, Connector, ConnectorError
from app.planner.lease import Lease
from app.planner.metrics import PlannerMetrics
from app.planner.observe import Observer
from app.planner.predict import predictor, replay_of
from app.planner.rules.policies import least_valued, propose
from app.planner.rules.replay import ReplayTooLong, growth
from app.planner.rules.state import FleetState, Proposal, Reason, Rules, Slo
from app.state import leases, models, planner
from app.state.scripts import ScriptRunner

log = logging.getLogger(__name__)

TICK_S = 1.0
SETTLE_S = 5.0
"""Pause after Redis could not be asked, or another planner led: workers register again within
seconds of a Redis that has lost all."""
REMEMBERED_S = 900.0
"""Age to which proposals are kept, longer than any policy looks back."""
REPLAY_S = 8.0
"""Seconds that replays for one proposal may take, at most half of the interval. If they take
longer, half as many decisions are replayed, but LEAST_REQUESTS at least."""
LEAST_REQUESTS = 32
"""Decisions whose replay may take a whole interval, which on a busy machine is better than none."""
DRAIN_DEADLINE_S = 600.0
"""A worker that is to be removed is stopped then, whatever requests it has left."""
MARGIN_S = 1.0
"""Seconds of the lease that must be left for an order."""


class UnusableRecords(KvrouteError):
    """The recorded decisions cannot be replayed."""


class Planner:
    """A planner, which runs until it is cancelled. problem: why nothing is proposed; "": nothing is
    wrong."""

    def __init__(
        self,
        settings: PlannerSettings,
        observer: Observer,
        runner: ScriptRunner,
        connector: Connector,
        metrics: PlannerMetrics,
    ) -> None:
        self._settings, self._observer, self._runner = settings, observer, runner
        self._connector, self._metrics = connector, metrics
        self._keyspace = Keyspace(settings.namespace)
        self._lease = Lease(runner, self._keyspace, settings.lease_s)
        self._rules = Rules(
            min_workers=settings.min_workers,
            max_workers=max(settings.min_workers, settings.max_workers),
            idle_s=settings.idle_s,
            interval_s=settings.interval_s,
            grace_intervals=settings.grace_intervals,
            slo=Slo(
                ttft_s=settings.slo_ttft_s,
                token_s=settings.slo_token_s,
                target=settings.slo_target,
            ),
        )
        self._changing = Changing()
        self._proposals: list[Proposal] = []
        self._window_requests = self._rules.window_requests
        self._due_s = 0.0
        self.problem = ""

    @property
    def leads(self) -> bool:
        return self._lease.token > 0

    async def run(self) -> None:
        while True:
            await self.tick()
            await asyncio.sleep(min(TICK_S, self._settings.interval_s))

    async def tick(self) -> None:
        try:
            state = await self._lease.keep()
            if state is not None:
                if state:  # else Redis has lost all, and what this one knows may still hold
                    self._changing = Changing.from_json(state, self._rules.max_workers)
                self._hold()
            await self._observer.sample()
            if self.leads:
                await self._follow_changes()
                slept = bool(self._proposals) and not self._proposals[-1].desired
                must_wake = slept and self._observer.somebody_waits
                if time.monotonic() >= self._due_s or must_wake:
                    self._due_s = time.monotonic() + self._settings.interval_s
                    await self._propose()
        except KvrouteError as error:
            if str(error) != self.problem:
                log.warning("nothing is proposed: %s", error)
            self.problem = str(error)
            self._hold()
        else:
            self.problem = ""
        if self.leads:
            self._metrics.leads.set(1)
        else:
            self._metrics.silence()

    async def leave(self) -> None:
        await self._lease.leave()

    def _hold(self) -> None:
        self._observer.forget_samples()
        self._due_s = time.monotonic() + min(SETTLE_S, 10 * self._settings.interval_s)

    async def _record(
        self, proposal: Proposal | None = None, values: Mapping[str, float] | None = None
    ) -> None:
        """Raises LeadershipLost, after which nothing may be done, and RedisUnavailable."""
        shown: dict[str, str | int] = {"wakes": int(not self._rules.min_workers)}
        if proposal is not None:
            pools = proposal.desired_pools
            shown |= {
                "desired": proposal.desired,
                "size": proposal.size,
                "reason": str(proposal.reason),
                "victim": proposal.victim or "",
                # For autoscalers that read the hash.
                "desired_prefill": pools.prefill if pools else "",
                "desired_decode": pools.decode if pools else "",
                "values": orjson.dumps(values or {}).decode(),
            }
        is_ours = await self._runner.one(
            planner.propose(
                self._keyspace,
                self._lease.token,
                self._changing.as_json(),
                asdict(proposal) if proposal is not None else None,
                shown,
            )
        )
        if not is_ours:
            self._lease.lose("another planner, or a Redis that has lost all, refused its proposal")
            raise LeadershipLost("another planner leads, or Redis has lost all")

    async def _propose(self) -> None:
        observer, changing = self._observer, self._changing
        state = await self._lease.hold(
            observer.state(
                self._rules, [*changing.coming()], tuple(self._proposals), changing.startup_s
            )
        )
        may_sleep = bool(changing.models) and not observer.is_new
        waits = observer.somebody_waits
        roles = self._settings.roles
        state = replace(state, somebody_waits=waits, may_sleep=may_sleep, wants_roles=roles)
        proposal = await self._lease.hold(asyncio.to_thread(self._proposed, state))
        observer.forget_samples()
        since_s = proposal.at_s - REMEMBERED_S
        self._proposals = [*(p for p in self._proposals if p.at_s > since_s), proposal]
        acts, starts = not isinstance(self._connector, Advise), proposal.starts
        if acts and not proposal.victim:
            changing.ask(starts, observer.now_s)
        elif acts and proposal.victim and not changing.leaving:
            changing.leaving, changing.leaving_since_s = proposal.victim, observer.now_s
            changing.is_stopped, changing.successor = False, "".join(starts)
        if not (self._rules.min_workers or observer.workers_seen):
            await self._runner.one(models.announce(self._keyspace.namespace, changing.models))
        values = {w.name: w.unique_value_s for w in state.workers if w.unique_value_s}
        await self._record(proposal, values)
        self._metrics.proposed(proposal, values, observer.unreplayable)
        log.info(
            "%d workers, %d desired: %s%s",
            proposal.size,
            proposal.desired,
            proposal.reason,
            f"; {proposal.victim} leaves" if proposal.victim else "",
        )
        if acts and not proposal.victim:
            await self._start(starts, proposal.desired, str(proposal.reason))

    async def _start(self, starts: Mapping[Role, int], desired: int, reason: str) -> None:
        """Order workers that count as asked for already."""
        for role, count in starts.items():
            if not await self._ordered(self._connector.add(role, count, desired, reason)):
                self._changing.give_up(role, count)
                await self._record()

    def _proposed(self, state: FleetState) -> Proposal:
        """Returns a proposal from as many recorded decisions as there is time to play. Raises
        ReplayTooLong, UnusableRecords."""
        interval_s = self._settings.interval_s
        most_s = min(REPLAY_S, interval_s / 2)
        while True:
            is_least = self._window_requests <= LEAST_REQUESTS
            begun_s = time.monotonic()
            try:
                proposal = self._proposed_by(state, begun_s + (interval_s if is_least else most_s))
            except ReplayTooLong as error:
                if is_least:
                    raise
                self._window_requests = max(LEAST_REQUESTS, error.num_played // 2)
                continue
            except (ValueError, ArithmeticError) as error:
                raise UnusableRecords(f"decisions cannot be replayed: {error}") from error
            if time.monotonic() - begun_s < most_s / 4:
                self._window_requests = min(2 * self._window_requests, self._rules.window_requests)
            return proposal

    def _proposed_by(self, state: FleetState, end_s: float) -> Proposal:
        settings = self._settings
        rules = replace(self._rules, window_requests=self._window_requests)
        replay = replay_of(
            self._observer,
            state,
            rules,
            is_over=lambda: time.monotonic() > end_s,
            grows=growth(state, rules),
        )
        predict = predictor(replay, state)
        return propose(settings.scaling_policy, state, rules, predict, least_valued)

    async def _follow_changes(self) -> None:
        """Compare the workers that are registered with those that were ordered."""
        changing, seen = self._changing, self._observer.workers_seen
        before = changing.as_json()
        for name in seen.keys() - changing.known:
            changing.joined(seen[name].info.role, self._observer.now_s)
        changing.known = set(seen)
        if seen:
            names = {name for worker in seen.values() for name in worker.info.models}
            changing.models = sorted(names)[:MOST_MODELS]
        now_s = self._observer.now_s
        for _ in range(changing.give_up_before(now_s - self._settings.startup_deadline_s, now_s)):
            self._metrics.failures.inc()
            log.warning("gave up a worker that has not registered in time")
        if changing.leaving and changing.leaving not in seen:
            log.info("worker %s has left", changing.leaving)
            changing.leaving = ""
        if changing.as_json() != before:
            await self._record()
        if changing.leaving and not changing.is_stopped:
            await self._drain()
        if changing.successor and (changing.is_stopped or not changing.leaving):
            await self._succeed(Role(changing.successor))

    async def _succeed(self, role: Role) -> None:
        """Start the worker for which another one has made room."""
        changing = self._changing
        changing.successor = ""
        changing.ask({role: 1}, self._observer.now_s)
        await self._record()
        await self._start({role: 1}, self._size() + 1, str(Reason.OTHER_ROLE))

    def _size(self) -> int:
        return sum(not seen.drains for seen in self._observer.workers_seen.values())

    async def _drain(self) -> None:
        changing = self._changing
        calls = [
            leases.drain(self._keyspace, key)
            for key in self._observer.workers_seen[changing.leaving].keys
        ]
        left = sum(filter(None, await self._runner.run(calls)))
        overdue_s = self._observer.now_s - changing.leaving_since_s
        if left and not overdue_s >= DRAIN_DEADLINE_S:  # it may be no number
            return
        if left:
            log.warning("worker %s is stopped with %d requests left", changing.leaving, left)
        changing.is_stopped = True
        await self._record()
        role = self._observer.workers_seen[changing.leaving].info.role
        if not await self._ordered(self._connector.remove(changing.leaving, role, self._size())):
            changing.is_stopped = False
            await self._record()

    async def _ordered(self, order: Awaitable[None]) -> bool:
        """Give an order within what is left of the lease. Returns whether it was obeyed."""
        left_s = self._lease.left_s - MARGIN_S
        try:
            async with asyncio.timeout(max(0.0, left_s)):
                await order
        except ConnectorError as error:
            log.warning("the fleet was not changed: %s", error)
        except TimeoutError:
            log.warning("the fleet was not changed: no answer in %.1f s", max(0.0, left_s))
        else:
            return True
        self._metrics.failures.inc()
        return False
