"""A request that asks where to go, and the answer that it gets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from app.core.types import Incarnation, SequenceHash, TierOverlap
from app.core.worker_report import WorkerInfo
from app.router.waiting import Waiter
from app.state.overlap import Overlaps
from app.state.reservations import Load


@dataclass(slots=True)
class RouteRequest:
    """chain: sequence hashes of the prompt's full blocks. exclude: worker ids or worker keys.

    session: "" for none. tenant, priority, hung_up: used if it has to wait; see Waiting.
    Like everything that each decision creates, it is not frozen: that would take three times as
    long.
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
    """Distinguishes the reservation from others of the same request."""
    locality: str
    """One of LOCALITIES: whether the worker that holds most was chosen, and if not, why."""
    best: str
    """The worker that holds most of the prompt, and how many blocks; "" if none holds any."""
    best_overlap: int
    waited_ms: int
    """How long the request waited for a worker that could take it."""
    candidates: list[Candidate]
    """Filled if the request asked for an explanation."""


@dataclass(slots=True)
class Pending:
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
    def decided(self) -> bool:
        """Whether the answer is a decision: it has neither failed nor lost its caller."""
        answer = self.answer
        return answer.done() and not answer.cancelled() and answer.exception() is None

    @property
    def waited_ms(self) -> int:
        return round(1000 * (time.perf_counter() - self.waiter.since_s)) if self.waiter else 0
