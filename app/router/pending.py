"""A request on its way to a decision, and its place in the queue if it has to wait."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from app.policy.decision import Decision, Query, RouteRequest
from app.state.waiting import Ticket


@dataclass(slots=True, eq=False)
class Pending:
    """A request on its way to a decision. Its answer is cancelled once the caller is gone."""

    query: Query
    answer: asyncio.Future[Decision]
    queued: QueuePlace | None = None
    """Its place in the queue, if it had to wait."""
    for_any: bool = False
    """Whether it asks for nothing but that there be a worker, and waits for one."""

    @property
    def request(self) -> RouteRequest:
        return self.query.request

    @property
    def decided(self) -> bool:
        """Whether the answer is a decision: it has neither failed nor lost its caller."""
        answer = self.answer
        return answer.done() and not answer.cancelled() and answer.exception() is None

    def waited_ms(self, now_s: float) -> int:
        """How long it has waited by `now_s`, of time.perf_counter."""
        return round(1000 * (now_s - self.queued.since_s)) if self.queued else 0

    def resolve(self, decision: Decision) -> None:
        """Answer, unless that was done or the caller is gone."""
        if not self.answer.done():
            self.answer.set_result(decision)

    def fail(self, error: Exception) -> None:
        """Answer with an error, unless that was done or the caller is gone."""
        if not self.answer.done():
            # Frames that the error came through hold this request, and it holds the error.
            self.answer.set_exception(error.with_traceback(None))


@dataclass(slots=True, eq=False)
class QueuePlace:
    """A request's place in the queue.

    weight: of its flow. tenant, priority: as labelled in metrics. since_s: by time.perf_counter.
    """

    pending: Pending
    ticket: Ticket
    weight: float
    tenant: str
    priority: str
    since_s: float
    name_at_s: float = 0.0
    """When to name its ticket in the queue that all replicas share; 0: at once."""
    deciding: bool = False
    """Whether its turn has come and a worker is being looked for."""
    outcome: str = ""
    """What it counts as in the metrics; "" while it waits."""

    @property
    def holder(self) -> str:
        return self.pending.request.holder
