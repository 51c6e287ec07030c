"""One try at a decision: the worker, where its KV comes from, and what to reserve on both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

import numpy as np

from app.core.errors import NoWorkers
from app.core.fetches import Fetch
from app.core.loads import Reservation
from app.core.settings.router import RouterSettings
from app.core.trust import Trust, lowest
from app.core.types import NO_OVERLAP, Incarnation
from app.policy.affinity import Affinity, discounted
from app.policy.choose import Choice, choose, has_room
from app.policy.cost import (
    Candidates,
    CostFunction,
    Floats,
    RequestSize,
    awaiting,
    predicted_prefill_s,
    sharing,
)
from app.policy.decision import Candidate, Decision, Query, Source
from app.policy.eligible import Eligible, eligible_of
from app.policy.health import avoiding, late, unheard
from app.policy.kv_lease import counts_leases
from app.policy.locality import Locality, locality_of
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
from app.policy.view import View


@dataclass(slots=True, eq=False)
class Plan:
    """One try to place a request: what it was decided from, and the decision.

    published: leading blocks that each worker has on its device, (workers,). route: by which the
    prompt gets to the chosen worker. reservation: on that worker; it names the one on its source.
    """

    query: Query
    view: View
    degraded: bool
    policy: str
    size: RequestSize
    candidates: Candidates
    published: Floats
    affinity: Affinity | None
    who: Eligible
    choice: Choice
    route: TransferRoute = field(init=False)
    reservation: Reservation = field(init=False)
    decision: Decision = field(init=False)

    @property
    def position(self) -> int:
        """Place of the chosen worker in the view."""
        return self.route.target

    def count(self) -> None:
        """Count in the view what is, or is about to be, reserved."""
        self.view.add(self.route.target, self.reservation)
        if self.reservation.source is not None:
            self.view.add(self.route.source, self.reservation.source)

    @property
    def _holds_first(self) -> int:
        """Place of the worker that will be the first to hold the whole prompt."""
        is_split = self.route.kind is TransferKind.SPLIT
        return self.route.source if is_split else self.route.target

    @property
    def holder(self) -> Incarnation:
        """The worker that will be the first to hold the whole prompt."""
        return self.view.incarnations[self._holds_first]

    @property
    def lacking_tokens(self) -> int:
        """Tokens of the prompt that `holder` lacks."""
        held = self.candidates.overlap_at(self._holds_first) * self.size.block_size
        return self.size.isl_tokens - int(held)

    @property
    def saved_s(self) -> float:
        """Predicted seconds by which held blocks shorten the prefill."""
        at, isl, wanted = self._holds_first, self.size.isl_tokens, self.reservation
        if not self.decision.overlap.total:
            return 0.0
        if self.route.kind is TransferKind.SPLIT and wanted.source is not None:
            wanted = wanted.source
        # As numpy's numbers they would take three times as long.
        per_token = self.candidates.prefill_s_per_token.item(at)
        per_pair = self.candidates.prefill_s_per_token2.item(at)
        return max(0.0, isl * (per_token + isl / 2 * per_pair) - wanted.prefill_us / 1e6)


_cost_of = attrgetter("cost")


class WorkerSelector:
    """Applies the policies. Counts its decisions, and keeps the random number generator."""

    def __init__(self, settings: RouterSettings) -> None:
        self._temperature = settings.temperature
        self._session_affinity = settings.session_affinity
        self.max_queue_s = math.inf
        """Seconds; a request waits while every worker's prefill queue is longer."""
        self._strict_roles = settings.strict_roles
        self._rng = np.random.default_rng(settings.seed)
        self._decisions = 0

    def plan(self, query: Query, view: View, *, degraded: bool = False) -> Plan:
        """Returns where a request goes. degraded: decided by load alone, however full workers look.

        Raises NoWorkers, PromptTooLarge, AllWorkersBusy.
        """
        request = query.request
        if view.block_size is None:
            raise NoWorkers("no worker is alive")
        policy = "least_loaded" if degraded else request.policy
        size = RequestSize(
            request.isl_tokens, view.block_size, request.priority, request.part_tokens
        )
        candidates, published = _candidates(query, view, degraded=degraded)
        affinity = self._affinity(query, view)
        who = eligible_of(request, view, candidates, size)
        choice = choose(
            *(policy, candidates, size),
            eligible=who.targets,
            rng=self._rng,
            nth=self._decisions,
            temperature=self._temperature,
            cost=_cost(query, view, policy, affinity, published),
            max_queue_s=math.inf if degraded or not request.reserve else self.max_queue_s,
        )
        self._decisions += request.reserve
        decided_from = (query, view, degraded, policy, size, candidates, published, affinity)
        plan = Plan(*decided_from, who, choice)
        routes = self._routes(plan)
        plan.route = route = min(routes, key=_cost_of) if len(routes) > 1 else routes[0]
        plan.reservation = _reservation(plan)
        if plan.reservation.source is not None:
            # What matters is what the worker holds that computes the prompt, or hands it on.
            plan.choice = Choice(route.source, choice.costs, choice.tied)
        plan.decision = _decision(plan)
        if request.explain:
            _explain(plan, routes)
        return plan

    def _routes(self, plan: Plan) -> list[TransferRoute]:
        """Returns the cheapest route, and where an explanation shows them, one of each kind. Raises
        NoWorkers if there is none."""
        request, policy = plan.query.request, plan.policy
        size, candidates = plan.size, plan.candidates
        at, costs, roles = plan.choice.index, plan.choice.costs, plan.view.roles
        local = TransferRoute(TransferKind.LOCAL, at, at, float(costs.cost[at]))
        if roles is None or ((plan.degraded or request.local_only) and not roles.together):
            return [local]
        if size.isl_tokens <= 1 and not roles.together:
            return [local]  # engines compute the last token themselves, so nothing travels
        must_split = roles.together or bool(self._strict_roles and roles.decode[at])
        prices_all = must_split or policy != "latency" or request.explain
        given = TransferInputs(
            *(policy, candidates, size, costs, plan.who.eligible, has_room(candidates, size)),
            *(plan.who.targets, roles, plan.published, self._rng),
        )
        routes = routes_with_source(given, math.inf if prices_all else local.cost)
        # Other policies do not count in seconds: where a request can be split, it is.
        if not must_split and (policy == "latency" or not routes):
            routes.insert(0, local)
        if not routes:
            raise NoWorkers("no worker that computes prompts has room, and roles are strict")
        return routes

    def _affinity(self, query: Query, view: View) -> Affinity | None:
        position = None if query.session_at is None else view.position(query.session_at)
        if position is None:
            return None
        fraction = query.followed or self._session_affinity
        most_s = None if math.isinf(self.max_queue_s) else self.max_queue_s
        return Affinity(position, fraction, most_s)


def _cost(
    query: Query, view: View, policy: str, affinity: Affinity | None, published: Floats
) -> CostFunction:
    """Returns the policy's cost with the terms for the session, slow engines, failures, absent
    agents, and what others compute of the prompt."""
    cost = POLICIES[policy].cost
    if policy == "latency" and not (view.roles and view.roles.fetches):
        cost = sharing
    if affinity is not None:
        cost = discounted(cost, affinity)
    if view.late_s is not None:
        cost = late(cost, view.late_s, in_seconds=policy == "latency")
    if view.away and (away := view.away_ones) is not None:
        cost = unheard(cost, away)
    if view.failed_shares is not None:
        cost = avoiding(cost, view.failed_shares)
    if query.computing and policy == "latency":
        places = (view.position(inc) for inc in query.computing)
        cost = awaiting(cost, [at for at in places if at is not None], published)
    return cost


def _candidates(query: Query, view: View, *, degraded: bool) -> tuple[Candidates, Floats]:
    """Returns the workers as costs see them, and the blocks that each has published on its
    device."""
    candidates = view.candidates(query.overlaps)
    if degraded:
        # No one reports requests that end meanwhile: all workers would soon look full.
        candidates = replace(candidates, max_requests=np.full(len(view.infos), np.inf))
    published = candidates.overlap_device
    if query.published is not None:
        published = np.minimum(published, view.candidates(query.published).overlap_device)
    if np.count_nonzero(candidates.receiving_s):
        candidates.receiving_s = awaited_s(candidates, published)
    return candidates, published


def _decision(plan: Plan) -> Decision:
    """Returns the answer for a plan, without an explanation."""
    query, view, route, wanted = plan.query, plan.view, plan.route, plan.reservation
    reserves = query.request.reserve and not plan.degraded
    source, target = view.incarnations[route.source], view.incarnations[route.target]
    overlap = query.overlaps.get(source, NO_OVERLAP)
    if route.kind is TransferKind.FETCH:
        overlap = overlap.first(route.held)
    bound = min(overlap.total, query.bound.get(source, 0))
    is_away = not view.away.keys().isdisjoint((source, target))
    locality, best = locality_of(plan)
    queue_s = float(plan.candidates.prefill_s[route.source])
    of_source = None
    if wanted.source is not None:
        promised = wanted.source if reserves else None
        of_source = Source(route.kind, view.infos[route.source], overlap, promised)
    return Decision(
        request_id=query.request.request_id,
        worker=view.infos[route.target],
        incarnation=target,
        overlap=overlap,
        bound_blocks=bound,
        isl_tokens=query.request.isl_tokens,
        isl_blocks=plan.size.isl_blocks,
        policy=plan.policy,
        tied=plan.choice.tied,
        tries=query.tries,
        degraded=plan.degraded or query.is_short or is_away,
        trust=_trust(plan, bound, view.trusts.get(source), view.trusts.get(target)),
        reservation=wanted if reserves else None,
        reservation_id=query.reservation_id,
        locality=Locality.DEGRADED if plan.degraded else locality,
        best=best,
        waited_ms=query.waited_ms,
        expected_s=queue_s + (wanted.source or wanted).prefill_us / 1e6,
        source=of_source,
        costs_by_kind={},
        lost={},
        candidates=[],
    )


def _trust(plan: Plan, bound: int, *workers: Trust | None) -> Trust:
    """bound: blocks that were not published. workers: None: all of it is published."""
    if plan.degraded:
        return Trust.DEGRADED
    if plan.query.request.is_blind:
        return Trust.BLIND
    own = Trust.BOUND if bound else Trust.EXACT
    return lowest(plan.query.trust, own, *(trust for trust in workers if trust is not None))


def _reservation(plan: Plan) -> Reservation:
    """Returns what a request wants of its target, and of its source."""
    view, route, candidates = plan.view, plan.route, plan.candidates
    seconds = plan.choice.costs.terms.get("prefill_s")
    if seconds is None:
        seconds = predicted_prefill_s(candidates, plan.size)
    of_target, of_source = demands(route, candidates, plan.size, seconds)
    wanted = _promise(plan.query, view, route.target, of_target)
    if of_source is not None:
        wanted.source = source = _promise(plan.query, view, route.source, of_source)
        metrics = view.measured[route.source].metrics
        if counts_leases(metrics):
            one, other = view.infos[route.source], view.infos[route.target]
            source.lease_ms = round(1000 * one.kv_lease_s)
            source.fetch = Fetch(
                *(one.key, other.key, one.engine_life, other.engine_life),
                metrics.kv_leases_ended or 0,
                plan.query.attempt,
            )
    return wanted


def _promise(query: Query, view: View, at: int, what: Demand) -> Reservation:
    return what.reservation(
        query.request.request_id,
        attempt=query.attempt,
        retry=query.request.retry,
        carried=query.request.carried,
        flow=f"{query.request.priority}:{query.request.tenant}",
        incarnation=view.incarnations[at],
        max_requests=view.infos[at].max_requests,
        seen_total=view.total(at),
    )


def _explain(plan: Plan, routes: Sequence[TransferRoute]) -> None:
    """Tell of a decision what it was made from, copied out of its arrays."""
    view, candidates, costs = plan.view, plan.candidates, plan.choice.costs
    plan.decision.candidates = [
        Candidate(
            info=info,
            overlap=plan.query.overlaps.get(inc, NO_OVERLAP),
            load=replace(load),
            others_requests=float(candidates.others_requests[i]),
            queue_s=float(candidates.prefill_s[i]),
            eligible=bool(plan.who.eligible[i]),
            cost=float(costs.cost[i]),
            terms={name: float(values[i]) for name, values in costs.terms.items()},
        )
        for i, (inc, info, load) in enumerate(
            zip(view.incarnations, view.infos, view.loads, strict=True)
        )
    ]
    if view.roles is not None:
        plan.decision.costs_by_kind = {one.kind: float(one.cost) for one in routes}
