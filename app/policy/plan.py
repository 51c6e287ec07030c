"""One try at a decision: the worker, where its KV comes from, and what to reserve on both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.core.chains import hex_text
from app.core.errors import NoWorkers
from app.core.fetches import Fetch
from app.core.loads import Reservation
from app.core.outcomes import Ending
from app.core.pace import Pace
from app.core.settings.router import RouterSettings
from app.core.trust import Trust, lowest
from app.core.types import NO_OVERLAP, Incarnation, TierOverlap
from app.policy.affinity import Affinity, discounted
from app.policy.choose import Choice, choose, has_room
from app.policy.cost import (
    POLICIES,
    Candidates,
    CostFunction,
    Costs,
    Floats,
    RequestSize,
    awaiting,
    predicted_prefill_s,
    sharing,
)
from app.policy.decision import Candidate, Decision, Query, RouteRequest, Source
from app.policy.health import avoided, avoiding, late, unheard, without_avoided
from app.policy.kv_lease import counts_leases
from app.policy.locality import Best, Locality, locality_of
from app.policy.record import NOT_OF_CANDIDATES, ChoiceInputs, DecisionRecord, sampled
from app.policy.transfer import (
    Demand,
    Roles,
    TransferKind,
    TransferRoute,
    awaited_s,
    demands,
    routes_with_source,
)
from app.policy.view import View, fitting

MAX_PREFILL_S = 86_400.0
"""Longer prefills are no measurement, and a sum of many would not fit into Redis's integers."""
DETAILED_WORKERS = 64
"""Candidates are recorded less often with more workers: of 1,000 they are 160 KB of Redis's memory
each time, and 20 routers could record them 400 times a second."""


@dataclass(slots=True)
class Plan:
    """One try's choice: the worker at `position` of the view, its source at `source_position`, and
    the reservation, which names the one on its source."""

    request: RouteRequest
    position: int
    source_position: int | None
    reservation: Reservation
    decision: Decision
    view: View
    candidates: Candidates
    costs: Costs
    eligible: NDArray[np.bool_]
    affinity: Affinity | None

    def count(self) -> None:
        """Count in the view what is, or is about to be, reserved."""
        self.view.add(self.position, self.reservation)
        if self.reservation.source is not None and self.source_position is not None:
            self.view.add(self.source_position, self.reservation.source)

    @property
    def holder(self) -> Incarnation:
        """The worker that will be the first to hold the whole prompt."""
        source = self.reservation.source
        computes = source is not None and not source.only_holds
        return (source if source is not None and computes else self.reservation).incarnation

    @property
    def lacking_tokens(self) -> int:
        """Tokens of the prompt that `holder` lacks."""
        is_target = self.holder == self.reservation.incarnation
        at = self.position if is_target or self.source_position is None else self.source_position
        held = self.candidates.overlap_at(at) * self.decision.worker.block_size
        return self.decision.isl_tokens - int(held)

    @property
    def saved_s(self) -> float:
        """Predicted seconds by which held blocks shorten the prefill."""
        overlap, isl, candidates = self.decision.overlap, self.decision.isl_tokens, self.candidates
        if not overlap.total:
            return 0.0
        at = self.position if self.source_position is None else self.source_position
        block = self.decision.worker.block_size
        # As numpy's numbers they would take three times as long.
        host_s = candidates.host_s_per_token.item(at)
        disk_s = candidates.disk_s_per_token.item(at)
        per_token = candidates.prefill_s_per_token.item(at)
        per_pair = candidates.prefill_s_per_token2.item(at)
        loads_s = block * (overlap.host * host_s + overlap.disk * disk_s)
        saved = isl - max(isl - overlap.total * block, 1)
        return max(0.0, float(saved * per_token + saved**2 / 2 * per_pair - loads_s))

    def record(self, details: Pace, now_s: float, ending: Ending | None = None) -> DecisionRecord:
        """Returns the record to keep of the decision. As many as `details` allows by `now_s` have
        all that they were made from; more than DETAILED_WORKERS count as several decisions."""
        decision, request = self.decision, self.request
        seen: ChoiceInputs | None = None
        size = max(1.0, len(self.view.infos) / DETAILED_WORKERS)
        if request.explain or details.allows(now_s, size):
            workers = [str(info.key) for info in self.view.infos]
            eligible = self.eligible.tolist()
            block_size = decision.worker.block_size
            terms = self.costs.terms
            others = {name: terms[name] for name in NOT_OF_CANDIDATES if name in terms}
            seen = ChoiceInputs(
                *(workers, block_size, self.candidates, eligible, self.affinity, others)
            )
        return DecisionRecord(
            request_id=decision.request_id,
            at_ms=self.view.now_ms,
            worker=str(decision.worker.key),
            source=_source_text(decision.source),
            policy=decision.policy,
            trust=decision.trust,
            tenant=request.tenant,
            priority=request.priority,
            model=request.model,
            locality=decision.locality,
            isl_tokens=decision.isl_tokens,
            part_tokens=request.part_tokens,
            full_blocks=len(request.chain),
            overlap=decision.overlap,
            best=decision.best,
            tries=decision.tries,
            waited_ms=decision.waited_ms,
            hex_blocks=hex_text(sampled(request.chain)).decode(),
            ending=ending,
            seen=seen,
        )


_cost_of = attrgetter("cost")


class WorkerSelector:
    """Applies the policies. Counts its decisions, and keeps the random number generator."""

    def __init__(self, settings: RouterSettings) -> None:
        self._temperature = settings.temperature
        self._session_affinity = settings.session_affinity
        self._max_queue_s = settings.max_queue_s
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
        allowed, able, eligible, targets = _who_may(request, view, candidates, size)
        choice = choose(
            *(policy, candidates, size),
            eligible=targets,
            rng=self._rng,
            nth=self._decisions,
            temperature=self._temperature,
            cost=_cost(query, view, policy, affinity, published),
            max_queue_s=math.inf if degraded or not request.reserve else self._max_queue_s,
        )
        self._decisions += request.reserve
        routes = self._routes(
            *(query, view, policy, candidates, size, choice),
            *(eligible, targets, published, degraded),
        )
        route = min(routes, key=_cost_of) if len(routes) > 1 else routes[0]
        wanted = _reservation(query, view, size, route, candidates, choice)
        if wanted.source is not None:
            # What matters is what the worker holds that computes the prompt, or hands it on.
            choice = Choice(route.source, choice.costs, choice.tied)
        locality, best = locality_of(
            view, candidates, size, query.overlaps, allowed, able, choice, affinity
        )
        decision = _decision(
            *(query, view, size, route, wanted, policy),
            tied=choice.tied,
            degraded=degraded,
            locality=Locality.DEGRADED if degraded else locality,
            best=best,
            queue_s=float(candidates.prefill_s[route.source]),
        )
        if request.explain:
            _explain(decision, query, view, eligible, choice, candidates, routes)
        source = None if wanted.source is None else route.source
        return Plan(
            *(request, route.target, source, wanted, decision, view, candidates, choice.costs),
            *(targets, affinity),
        )

    def _routes(
        self,
        query: Query,
        view: View,
        policy: str,
        candidates: Candidates,
        size: RequestSize,
        choice: Choice,
        eligible: NDArray[np.bool_],
        targets: NDArray[np.bool_],
        published: Floats,
        degraded: bool,
    ) -> list[TransferRoute]:
        """Returns the cheapest route, and where an explanation shows them, one of each kind. Raises
        NoWorkers if there is none."""
        at, roles = choice.index, view.roles
        local = TransferRoute(TransferKind.LOCAL, at, at, float(choice.costs.cost[at]))
        may_be_alone = degraded or query.request.local_only
        if roles is None or (may_be_alone and not roles.together):
            return [local]
        if size.isl_tokens <= 1 and not roles.together:
            return [local]  # engines compute the last token themselves, so nothing travels
        must_split = roles.together or bool(self._strict_roles and roles.decode[at])
        prices_all = must_split or policy != "latency" or query.request.explain
        room = has_room(candidates, size)
        below = math.inf if prices_all else local.cost
        routes = routes_with_source(
            *(policy, candidates, size, choice.costs, eligible, room, targets, roles),
            *(published, self._rng, below),
        )
        # Other policies do not count in seconds: where a request can be split, it is.
        if not must_split and (policy == "latency" or not routes):
            routes.insert(0, local)
        if not routes:
            raise NoWorkers("no worker that computes prompts has room, and roles are strict")
        return routes

    def _affinity(self, query: Query, view: View) -> Affinity | None:
        if query.session_at is None:
            return None
        position = view.position(query.session_at)
        if position is None:
            return None
        fraction = query.followed or self._session_affinity
        most_s = None if math.isinf(self._max_queue_s) else self._max_queue_s
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


class _WhoMay(NamedTuple):
    """Masks of workers, (workers,) each: allowed by the request; of those, with engines that take
    it; of those, not avoided; and of those, fit to decode it."""

    allowed: NDArray[np.bool_]
    able: NDArray[np.bool_]
    eligible: NDArray[np.bool_]
    targets: NDArray[np.bool_]


def _who_may(
    request: RouteRequest, view: View, candidates: Candidates, size: RequestSize
) -> _WhoMay:
    allowed = _eligible(view, request)
    targets = allowed if view.roles is None else _targets(allowed, view.roles)
    able = allowed
    if request.context_tokens > view.contexts.least:
        targets = fitting(view, targets, request.context_tokens)
        # A source computes the prompt and one token.
        alone = request.context_tokens - request.output_tokens + 1
        able = targets if view.roles is None else fitting(view, allowed, alone)
    heeds = view.knows_failures or view.suspected
    avoid = avoided(view, request.marks) if heeds else None
    if avoid is None:
        return _WhoMay(allowed, able, able, targets)
    room = has_room(candidates, size)
    roles = () if view.roles is None else (targets, view.roles.prefill)
    eligible = without_avoided(able, room, avoid, roles)
    return _WhoMay(allowed, able, eligible, targets & eligible)


def _eligible(view: View, request: RouteRequest) -> NDArray[np.bool_]:
    if not request.exclude:
        return view.everybody
    keys = [info.key for info in view.infos]
    return np.array([request.exclude.isdisjoint((key.worker_id, str(key))) for key in keys])


def _decision(
    query: Query,
    view: View,
    size: RequestSize,
    route: TransferRoute,
    wanted: Reservation,
    policy: str,
    *,
    tied: bool,
    degraded: bool,
    locality: Locality,
    best: Best,
    queue_s: float,
) -> Decision:
    """Returns the answer for a route, without an explanation. queue_s: of prefills, where the
    prompt is computed."""
    reserves = query.request.reserve and not degraded
    source = view.incarnations[route.source]
    overlap = query.overlaps.get(source, NO_OVERLAP)
    if route.kind is TransferKind.FETCH:
        overlap = overlap.first(route.held)
    bound = min(overlap.total, query.bound.get(source, 0))
    chosen = (source, view.incarnations[route.target])
    is_away = not view.away.keys().isdisjoint(chosen)
    return Decision(
        request_id=query.request.request_id,
        worker=view.infos[route.target],
        incarnation=view.incarnations[route.target],
        overlap=overlap,
        bound_blocks=bound,
        isl_tokens=query.request.isl_tokens,
        isl_blocks=size.isl_blocks,
        policy=policy,
        tied=tied,
        tries=query.tries,
        degraded=degraded or query.is_short or is_away,
        trust=_trust(query, bound, [view.trusts.get(inc) for inc in chosen], degraded=degraded),
        reservation=wanted if reserves else None,
        reservation_id=query.reservation_id,
        locality=locality,
        best=best,
        waited_ms=query.waited_ms,
        expected_s=queue_s + (wanted.source or wanted).prefill_us / 1e6,
        source=_source(view, route, overlap, wanted, reserves=reserves),
        costs_by_kind={},
        lost={},
        candidates=[],
    )


def _trust(query: Query, bound: int, workers: Sequence[Trust | None], *, degraded: bool) -> Trust:
    if degraded:
        return Trust.DEGRADED
    if query.request.is_blind:
        return Trust.BLIND
    own = Trust.BOUND if bound else Trust.EXACT
    return lowest(query.trust, own, *(trust for trust in workers if trust is not None))


def _targets(eligible: NDArray[np.bool_], roles: Roles) -> NDArray[np.bool_]:
    targets = eligible & roles.targets
    if not np.count_nonzero(targets) and np.count_nonzero(eligible):
        raise NoWorkers("no worker that decodes is alive: all have the role prefill")
    return targets


def _reservation(
    query: Query,
    view: View,
    size: RequestSize,
    route: TransferRoute,
    candidates: Candidates,
    choice: Choice,
) -> Reservation:
    """Returns what a request wants of its target, and of its source."""
    seconds = choice.costs.terms.get("prefill_s")
    if seconds is None:
        seconds = predicted_prefill_s(candidates, size)
    of_target, of_source = demands(route, candidates, size, seconds)
    wanted = _promise(query, view, route.target, of_target)
    if of_source is not None:
        wanted.source = source = _promise(query, view, route.source, of_source)
        metrics = view.measured[route.source].metrics
        if counts_leases(metrics):
            one, other = view.infos[route.source], view.infos[route.target]
            ended, attempt = metrics.kv_leases_ended or 0, query.attempt
            lives = one.engine_life, other.engine_life
            source.lease_ms = round(1000 * one.kv_lease_s)
            source.fetch = Fetch(one.key, other.key, *lives, ended, attempt)
    return wanted


def _promise(query: Query, view: View, at: int, what: Demand) -> Reservation:
    return Reservation(
        query.request.request_id,
        prefill_tokens=what.prefill_tokens,
        prefill_us=round(1e6 * min(what.prefill_s, MAX_PREFILL_S)),
        blocks=what.blocks,
        sending_ms=round(1e3 * min(what.sending_s, MAX_PREFILL_S)),
        receiving_ms=round(1e3 * min(what.receiving_s, MAX_PREFILL_S)),
        attempt=query.attempt,
        retry=query.request.retry,
        carried=query.request.carried,
        incarnation=view.incarnations[at],
        max_requests=view.infos[at].max_requests,
        seen_total=view.total(at),
    )


def _source(
    view: View, route: TransferRoute, overlap: TierOverlap, wanted: Reservation, *, reserves: bool
) -> Source | None:
    if wanted.source is None:
        return None
    reservation = wanted.source if reserves else None
    return Source(route.kind, view.infos[route.source], overlap, reservation)


def _source_text(source: Source | None) -> str:
    return f"{source.kind} {source.worker.key}" if source is not None else ""


def _explain(
    decision: Decision,
    query: Query,
    view: View,
    eligible: NDArray[np.bool_],
    choice: Choice,
    candidates: Candidates,
    routes: Sequence[TransferRoute],
) -> None:
    decision.candidates = [
        Candidate(
            info=info,
            overlap=query.overlaps.get(inc, NO_OVERLAP),
            load=replace(load),
            others_requests=float(candidates.others_requests[i]),
            queue_s=float(candidates.prefill_s[i]),
            eligible=ok,
            cost=float(choice.costs.cost[i]),
            terms={name: float(values[i]) for name, values in choice.costs.terms.items()},
        )
        for i, (inc, info, load, ok) in enumerate(
            zip(view.incarnations, view.infos, view.loads, eligible.tolist(), strict=True)
        )
    ]
    if view.roles is not None:
        decision.costs_by_kind = {one.kind: float(one.cost) for one in routes}
