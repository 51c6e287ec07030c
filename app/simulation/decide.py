"""Decisions in virtual time: the real policies, from what routers see of simulated workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from app.core.errors import NoWorkers
from app.core.loads import Load
from app.core.roles import Role
from app.policy.choose import Choice, choose
from app.policy.cost import (
    IN_FLIGHT_TOKENS,
    Candidates,
    Floats,
    RequestSize,
    awaiting,
    predicted_prefill_s,
    sharing,
)
from app.policy.pairing import OWN_TRANSFER, Roles
from app.policy.policies import POLICIES
from app.policy.transfer import (
    Demand,
    TransferInputs,
    TransferKind,
    TransferRoute,
    awaited_s,
    demands,
    routes_with_source,
)
from app.policy.workers import assume_speeds
from app.simulation.books import Booking, Books
from app.simulation.flights import Flight
from app.simulation.setting import PolicyVariant, Setting
from app.simulation.steps import SimRequest
from app.simulation.worker import SimWorker


@dataclass(frozen=True, slots=True)
class Share:
    """One worker's share of a plan. seen_total: see lua/reserve.lua."""

    worker: int
    seen_total: int
    booking: Booking


@dataclass(frozen=True, slots=True)
class SimPlan:
    """One decision, not yet reserved."""

    flight: Flight
    kind: TransferKind
    target: Share
    source: Share | None
    best_blocks: int

    @property
    def shares(self) -> tuple[Share, ...]:
        return (self.target,) if self.source is None else (self.target, self.source)


class SimDecider:
    """Applies one policy. workers, live: as they change; live ones by their place."""

    def __init__(
        self,
        policy: PolicyVariant,
        setting: Setting,
        workers: Sequence[SimWorker],
        live: Sequence[int],
        rng: Generator,
    ) -> None:
        self._policy = policy
        self._setting = setting
        self._workers = workers
        self._live = live
        self._rng = rng
        # As Dynamo does, of which it is a yardstick; routers do not know enough to do so.
        self.counts_once = policy.key == "blocks"
        self.foresees = policy.key == "latency"
        """Whether what is on its way counts, as in app.router.lookup."""

    def plan(self, flight: Flight, loads: list[Load], rounds: int, now_s: float) -> SimPlan:
        """Raises NoWorkers, AllWorkersBusy."""
        if not self._live:
            raise NoWorkers("no worker is alive")
        request = flight.request
        candidates = self._candidates(request, flight.replica.books, loads, rounds, now_s)
        size = RequestSize(request.prompt_tokens, self._setting.block_size, request.priority)
        roles = self._roles()
        published = candidates.overlap_device
        computing: list[int] = []
        if self._foresees(request):
            published = np.array(
                [self._workers[at].holdings.overlap(request.blocks, now_s)[0] for at in self._live],
                dtype=np.float64,
            )
            computing = np.flatnonzero(candidates.overlap_device > published).tolist()
        if np.count_nonzero(candidates.receiving_s):
            candidates.receiving_s = awaited_s(candidates, published)
        key = self._policy.key
        is_alone = roles is None and key == "latency"
        cost = sharing if is_alone else self._policy.cost or POLICIES[key].cost
        if computing:
            cost = awaiting(cost, computing, published)
        choice = choose(
            self._policy.key,
            candidates,
            size,
            eligible=np.ones(len(self._live), dtype=bool) if roles is None else roles.targets,
            rng=self._rng,
            nth=flight.replica.decisions,
            cost=cost,
        )
        flight.replica.decisions += 1
        route = self._route(choice, candidates, size, roles, published)
        of_target, of_source = demands(
            route, candidates, size, predicted_prefill_s(candidates, size)
        )
        # Those of a split count once they have arrived, as in app.router.history.
        is_split = route.kind is TransferKind.SPLIT
        held = candidates.overlap_at(route.source if is_split else route.target)
        counts = self.foresees and size.isl_tokens - held * size.block_size >= IN_FLIGHT_TOKENS
        target = self._share(
            route.target, request, of_target, loads, counts_blocks=counts and not is_split
        )
        source = of_source and self._share(
            route.source, request, of_source, loads, counts_blocks=counts and is_split
        )
        return SimPlan(flight, route.kind, target, source, int(candidates.overlap.max()))

    def _candidates(
        self,
        request: SimRequest,
        books: Sequence[Books],
        loads: list[Load],
        rounds: int,
        now_s: float,
    ) -> Candidates:
        in_flight = [books[place].in_flight for place in self._live]
        foresees = self._foresees(request)
        columns = [
            self._workers[place].column(
                loads[place],
                rounds,
                request.blocks,
                now_s,
                others.overlap(request.blocks) if foresees else 0,
            )
            for place, others in zip(self._live, in_flight, strict=True)
        ]
        rows = np.array(columns, dtype=np.float64).T
        assume_speeds(rows)
        candidates = Candidates(*rows)
        if self.counts_once:
            beside = [others.num_blocks_beside(request.blocks) for others in in_flight]
            candidates.active_blocks = np.array(beside, dtype=np.float64)
        return candidates

    def _foresees(self, request: SimRequest) -> bool:
        return self.foresees and request.prompt_tokens >= IN_FLIGHT_TOKENS

    def _roles(self) -> Roles | None:
        if self._setting.link is None:
            return None
        roles = [self._workers[place].role for place in self._live]
        return Roles(
            prefill=np.array([role is Role.PREFILL for role in roles]),
            decode=np.array([role is Role.DECODE for role in roles]),
            groups=(np.ones(len(roles), dtype=bool),),
            fetches=self._setting.kv_transfer == OWN_TRANSFER,
        )

    def _route(
        self,
        choice: Choice,
        candidates: Candidates,
        size: RequestSize,
        roles: Roles | None,
        published: Floats,
    ) -> TransferRoute:
        """Returns the cheapest of all kinds of routes, or what the fixed rule says."""
        at = choice.index
        local = TransferRoute(TransferKind.LOCAL, at, at, float(choice.costs.cost[at]))
        above = self._setting.split_above
        lacking = size.isl_tokens - candidates.overlap[at] * size.block_size
        if roles is None or (above is not None and lacking < above):
            return local
        room: NDArray[np.bool_] = candidates.active_requests < candidates.max_requests
        everybody = np.ones(len(room), dtype=bool)
        given = TransferInputs(
            *(self._policy.key, candidates, size, choice.costs, everybody, room, everybody),
            *(roles, published, self._rng),
        )
        routes = routes_with_source(given)
        if above is not None:
            return next((route for route in routes if route.kind is TransferKind.SPLIT), local)
        if self._policy.key != "latency" and routes:
            return routes[0]
        return min([local, *routes], key=lambda route: route.cost)

    def _share(
        self, at: int, request: SimRequest, what: Demand, loads: list[Load], *, counts_blocks: bool
    ) -> Share:
        place = self._live[at]
        reservation = what.reservation(request.request_id)
        booking = Booking(reservation, request, counts_blocks or self.counts_once)
        return Share(place, loads[place].total, booking)
