"""Decisions without Redis: by the loads last seen, plus what has been decided since."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from app.core.errors import NoWorkers, RoutingError
from app.core.overlaps import Overlaps
from app.core.pace import Pace
from app.policy.plan import Plan, WorkerSelector
from app.policy.view import View
from app.router.pending import Pending
from app.router.replica import Replica

log = logging.getLogger(__name__)

COMPLAINTS_PER_S = 1
"""Log messages that Redis is unreachable; metrics count every decision made without it."""


class DegradedMode:
    """Decides from the first decision without Redis to the first with it.

    turn_away: has a request wait that no worker can take now, or fails it. on_reserved: told of
    each decision that counts as load.
    """

    def __init__(
        self,
        replica: Replica,
        selector: WorkerSelector,
        turn_away: Callable[[Pending, View, RoutingError], None],
        on_reserved: Callable[[Plan], None],
    ) -> None:
        self._replica = replica
        self._selector = selector
        self._turn_away = turn_away
        self._on_reserved = on_reserved
        self._complaints = Pace(COMPLAINTS_PER_S)
        self._complained = False

    def decide(self, batch: Iterable[Pending], reason: Exception) -> None:
        """Spread requests over the workers last seen. reason: why Redis is not asked."""
        if self._complaints.allows(time.monotonic()):
            self._complained = True
            log.warning("deciding without Redis: %s", reason)
        view = self._replica.fleet.last_view
        for pending in batch:
            if pending.answer.done():
                continue
            spending = pending.request.spending
            if spending is not None:
                self._replica.limiter.let_in(pending.request)
                if spending.refused is not None:
                    pending.fail(spending.refused)
                    continue
            if view is None:
                pending.fail(NoWorkers(f"no worker has been seen yet: {reason}"))
                continue
            self._decide(pending, view)

    def _decide(self, pending: Pending, view: View) -> None:
        pending.overlaps = pending.held = Overlaps()
        pending.note_wait(time.perf_counter())
        try:
            plan = self._selector.plan(pending, view, degraded=True)
        except NoWorkers as error:
            # The first one may be about to register.
            self._turn_away(pending, view, error)
            return
        except RoutingError as error:
            pending.fail(error)
            return
        self._replica.telemetry.degraded.inc()
        if pending.request.reserve:
            plan.count()
            self._on_reserved(plan)
        pending.resolve(plan.decision)

    def ends(self) -> None:
        """Note that Redis has reserved something."""
        if self._complained:
            self._complained = False
            log.info("deciding with Redis again")
