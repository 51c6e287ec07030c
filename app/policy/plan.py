"""One try at a decision: the worker, and what to reserve on it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from app.core.config import RouterSettings
from app.core.errors import NoWorkers
from app.core.loads import Reservation
from app.core.rate_limit import RateLimit
from app.core.types import NO_OVERLAP, Incarnation, TierOverlap
from app.policy.affinity import Affinity, discounted
from app.policy.choose import Choice, choose
from app.policy.cost import POLICIES, Candidates, RequestSize, predicted_prefill_s
from app.policy.decision import Candidate, Decision, Query, RouteRequest
from app.policy.locality import Locality, locality_of
from app.policy.record import ChoiceInputs, DecisionRecord, sampled
from app.policy.view import View

MAX_PREFILL_S = 86_400.0
"""Anything longer is no measurement, and a sum of many would not fit into Redis's integers."""
DETAILED_WORKERS = 64
"""With more workers, candidates are recorded less often: of 1,000 they are 160 KB of Redis's memory
each time, and 20 routers could record them 400 times a second."""


@dataclass(slots=True)
class Plan:
    """What one try wants: the worker at `position` of the view, and the reservation on it."""

    request: RouteRequest
    position: int
    incarnation: Incarnation
    seen_total: int
    reservation: Reservation
    decision: Decision
    view: View
    candidates: Candidates
    eligible: NDArray[np.bool_]
    affinity: Affinity | None

    def record(self, details: RateLimit, now_s: float) -> DecisionRecord:
        """The record kept of the decision; as many as `details` allows by `now_s` have all that it
        was made from.

        More than DETAILED_WORKERS count as several decisions.
        """
        decision, request = self.decision, self.request
        seen: ChoiceInputs | None = None
        size = max(1.0, len(self.view.infos) / DETAILED_WORKERS)
        if request.explain or details.allows(now_s, size):
            workers = [str(info.key) for info in self.view.infos]
            eligible = self.eligible.tolist()
            block_size = decision.worker.block_size
            seen = ChoiceInputs(workers, block_size, self.candidates, eligible, self.affinity)
        return DecisionRecord(
            request_id=decision.request_id,
            at_ms=self.view.now_ms,
            worker=str(decision.worker.key),
            policy=decision.policy,
            locality=decision.locality,
            isl_tokens=decision.isl_tokens,
            full_blocks=len(request.chain),
            overlap=decision.overlap,
            best=decision.best,
            tries=decision.tries,
            waited_ms=decision.waited_ms,
            blocks=sampled(request.chain),
            seen=seen,
        )


class WorkerSelector:
    """Applies the policies. Counts its decisions, and keeps the random number generator."""

    def __init__(self, settings: RouterSettings) -> None:
        self._temperature = settings.temperature
        self._session_affinity = settings.session_affinity
        self._max_queue_s = settings.max_queue_s
        self._rng = np.random.default_rng(settings.seed)
        self._decisions = 0

    def plan(self, query: Query, view: View, *, degraded: bool = False) -> Plan:
        """Where a request goes. degraded: decided by load alone, however full the workers look.

        Raises NoWorkers, PromptTooLarge, AllWorkersBusy.
        """
        request, overlaps = query.request, query.overlaps
        if view.block_size is None:
            raise NoWorkers("no worker is alive")
        policy = "least_loaded" if degraded else request.policy
        size = RequestSize(request.isl_tokens, view.block_size)
        candidates = view.candidates(overlaps)
        if degraded:
            # No one reports requests that end meanwhile: all workers would soon look full.
            candidates = replace(candidates, max_requests=np.full(len(view.infos), np.inf))
        affinity = self._affinity(query, view)
        eligible = _eligible(view, request)
        choice = choose(
            policy,
            candidates,
            size,
            eligible=eligible,
            rng=self._rng,
            nth=self._decisions,
            temperature=self._temperature,
            cost=discounted(POLICIES[policy].cost, affinity) if affinity is not None else None,
            max_queue_s=math.inf if degraded or not request.reserve else self._max_queue_s,
        )
        self._decisions += request.reserve
        position = choice.index
        locality, best = locality_of(view, candidates, size, overlaps, eligible, choice, affinity)
        overlap = overlaps.get(view.incarnations[position], NO_OVERLAP)
        reservation = _reservation(query, overlap, size, choice, candidates)
        decision = Decision(
            request_id=request.request_id,
            worker=view.infos[position],
            overlap=overlap,
            isl_tokens=request.isl_tokens,
            isl_blocks=size.isl_blocks,
            policy=policy,
            tied=choice.tied,
            tries=query.tries,
            degraded=degraded or query.is_short,
            reservation=reservation if request.reserve and not degraded else None,
            reservation_id=query.reservation_id,
            locality=Locality.DEGRADED if degraded else locality,
            best=best,
            waited_ms=query.waited_ms,
            candidates=_explained(query, view, eligible, choice) if request.explain else [],
        )
        return Plan(
            request,
            position,
            view.incarnations[position],
            view.loads[position].total,
            reservation,
            decision,
            view,
            candidates,
            eligible,
            affinity,
        )

    def _affinity(self, query: Query, view: View) -> Affinity | None:
        """The affinity of its session, if that last went to a worker that is still live."""
        if query.session_at is None:
            return None
        position = view.position(query.session_at)
        if position is None:
            return None
        return Affinity(position, self._session_affinity, self._max_queue_s)


def _eligible(view: View, request: RouteRequest) -> NDArray[np.bool_]:
    """Which workers the request allows, (workers,)."""
    if not request.exclude:
        return view.everybody
    keys = [info.key for info in view.infos]
    return np.array([request.exclude.isdisjoint((key.worker_id, str(key))) for key in keys])


def _reservation(
    query: Query, overlap: TierOverlap, size: RequestSize, choice: Choice, candidates: Candidates
) -> Reservation:
    """What a decision reserves on its worker, which holds `overlap`."""
    prefill_s = choice.costs.terms.get("prefill_s")
    if prefill_s is None:
        prefill_s = predicted_prefill_s(candidates, size)
    cached = overlap.total * size.block_size
    return Reservation(
        query.request.request_id,
        prefill_tokens=max(1, size.isl_tokens - cached),
        prefill_us=round(1e6 * min(float(prefill_s[choice.index]), MAX_PREFILL_S)),
        blocks=size.isl_blocks,
        attempt=query.attempt,
        retry=query.request.retry,
        carried=query.request.carried,
    )


def _explained(
    query: Query, view: View, eligible: NDArray[np.bool_], choice: Choice
) -> list[Candidate]:
    """The candidates of a decision, copied out of the arrays it was made from."""
    return [
        Candidate(
            info=info,
            overlap=query.overlaps.get(inc, NO_OVERLAP),
            load=replace(load),
            queue_s=load.queue_s(view.now_ms),
            eligible=ok,
            cost=float(choice.costs.cost[i]),
            terms={name: float(values[i]) for name, values in choice.costs.terms.items()},
        )
        for i, (inc, info, load, ok) in enumerate(
            zip(view.incarnations, view.infos, view.loads, eligible.tolist(), strict=True)
        )
    ]
