"""What is promised to requests in flight: the loads a decision sees, and changes to them."""

from __future__ import annotations

from dataclasses import dataclass, field

from app.core.types import Incarnation


@dataclass(slots=True)
class Load:
    """Reservations on one incarnation. A router adds its own decisions to its copy.

    head_*: of the request prefilling now, which is the oldest one without a first token.
    """

    prefill_tokens: int = 0
    prefill_us: int = 0
    head_us: int = 0
    head_since_ms: int = 0
    blocks: int = 0
    requests: int = 0
    decoding: int = 0
    total: int = 0
    """Reservations ever made."""

    def queue_s(self, now_ms: int) -> float:
        """Predicted seconds of prefill still to do; the head's share drains with time."""
        drained_us = min((now_ms - self.head_since_ms) * 1000, self.head_us)
        return (self.prefill_us - max(0, drained_us)) / 1e6

    def add(self, reservation: Reservation, now_ms: int) -> None:
        """Count one more reservation, as lua/reserve.lua does."""
        if self.requests == self.decoding:
            self.head_us, self.head_since_ms = reservation.prefill_us, now_ms
        self.prefill_tokens += reservation.prefill_tokens
        self.prefill_us += reservation.prefill_us
        self.blocks += reservation.blocks
        self.requests += 1
        self.total += 1


@dataclass(frozen=True, slots=True)
class Reservation:
    """What one request is to be promised."""

    request_id: str
    prefill_tokens: int
    """To be computed: the prompt less what is cached."""
    prefill_us: int
    """Predicted time to compute them."""
    blocks: int
    """KV blocks in use while the request runs."""
    attempt: str = "-"
    """`<began, ms>-<tag>`, without spaces: when the try began, by the Redis clock, and what tells
    it from others of the same request."""
    retry: bool = False
    """Whether it takes the place of what earlier tries of the request hold."""
    carried: bool = False
    """Whether a door carries the request, and extends what is reserved for it."""


@dataclass(frozen=True, slots=True)
class Wish:
    """A reservation, and what the decision for its worker was made from."""

    incarnation: Incarnation
    reservation: Reservation
    max_requests: int
    """At this many the worker is full."""
    seen_total: int | None
    """`Load.total` when it was read; None: take the worker as it is now."""


DRAINING = -1


@dataclass(frozen=True, slots=True)
class Failing:
    """failures: requests that a worker failed, less those that it answered since. until_ms: before
    that it gets no requests, as long as there is another worker; DRAINING: it gets none at all."""

    failures: int
    until_ms: int

    @property
    def drains(self) -> bool:
        return self.until_ms == DRAINING

    def pause_s(self, now_ms: int) -> float:
        """Seconds left of the pause."""
        return max(0, self.until_ms - now_ms) / 1000


NOT_FAILING = Failing(0, 0)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Loads of the live, routable incarnations at one moment of the Redis clock."""

    now_ms: int
    loads: dict[Incarnation, Load]
    workers_ms: int | None = None
    """When an incarnation was last registered or repaired; None: not asked."""
    shards: int | None = None
    """How many the namespace's index has; None: not asked."""
    somebody_waits: bool = False
    """Whether any request waits for a turn, at any replica; also False if not asked."""
    lapsed: frozenset[Incarnation] = frozenset()
    """Incarnations that would be routable if their leases had not run out."""
    failing: dict[Incarnation, Failing] = field(default_factory=dict)
    """Those whose workers failed requests; empty if not asked."""

    @property
    def paused(self) -> list[Incarnation]:
        """Those that get no requests because they failed some, or drain."""
        return [inc for inc in self.failing if inc in self.lapsed]


@dataclass(frozen=True, slots=True)
class Refused:
    """reason: `lapsed`, `full`, `changed` or `superseded`. fresh: loads to decide again from; they
    include everything that the same call reserved."""

    reason: str
    fresh: Snapshot
