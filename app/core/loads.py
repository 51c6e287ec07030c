"""What is promised to requests in flight: the loads a decision sees, and changes to them."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from app.core.fetches import Fetch
from app.core.types import Incarnation
from app.core.verdicts import MarksByWorker, State, Verdict

ROUND = 1_000_000
"""A round is as many reservations as there are workers; rounds are counted in millionths."""
MEMORY_ROUNDS = 16
"""In so many rounds, what was routed to a worker fades by a factor of e; see lua/reserve.lua."""


@dataclass(slots=True)
class Load:
    """Reservations on one incarnation. A router adds its own decisions to its copy.

    head_*: of the request prefilling now, which is the oldest one without a first token.
    routed_*, sending_*, receiving_*: history that fades or passes, never given back, and so not
    compared.
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
    routed_us: int = field(default=0, compare=False)
    """Predicted prefill of those, which fades as others follow; as of `routed_at`."""
    routed_at: int = field(default=0, compare=False)
    """`Snapshot.rounds` at the last of those."""
    sending_until_ms: int = field(default=0, compare=False)
    """When all KV that it has promised to hand on will have left, one transfer after another."""
    receiving_until_ms: int = field(default=0, compare=False)
    """When all prefixes that it fetches from others will have come."""

    def queue_s(self, now_ms: int) -> float:
        """Predicted seconds of prefill still to do; the head's share drains with time."""
        drained_us = min((now_ms - self.head_since_ms) * 1000, self.head_us)
        return (self.prefill_us - max(0, drained_us)) / 1e6

    def overdue_s(self, now_ms: int) -> float:
        """For how long first tokens have not come that were predicted by now."""
        return (now_ms - self.head_since_ms) / 1000 - self.prefill_us / 1e6

    def routed_s(self, rounds: int) -> float:
        """Predicted seconds of prefill routed here lately, as of `rounds`."""
        return self.routed_us / 1e6 * fading(rounds - self.routed_at)

    def sending_s(self, now_ms: int) -> float:
        """Predicted seconds for which what it hands on keeps its link busy."""
        return max(0, self.sending_until_ms - now_ms) / 1000

    def receiving_s(self, now_ms: int) -> float:
        """Predicted seconds until all prefixes that it fetches have come."""
        return max(0, self.receiving_until_ms - now_ms) / 1000

    def add(self, reservation: Reservation, now_ms: int, rounds: int) -> None:
        """Count one more reservation, which completes `rounds`, as lua/reserve.lua does."""
        self.routed_us = int(self.routed_us * fading(rounds - self.routed_at))
        self.routed_us += reservation.prefill_us
        self.routed_at = rounds
        self.blocks += reservation.blocks
        self.total += 1
        if reservation.sending_ms:
            self.sending_until_ms = max(self.sending_until_ms, now_ms) + reservation.sending_ms
        if reservation.receiving_ms:
            comes_ms = now_ms + reservation.receiving_ms
            self.receiving_until_ms = max(self.receiving_until_ms, comes_ms)
        if reservation.only_holds:
            return
        if self.requests == self.decoding:
            self.head_us, self.head_since_ms = reservation.prefill_us, now_ms
        self.prefill_tokens += reservation.prefill_tokens
        self.prefill_us += reservation.prefill_us
        self.requests += 1


LOAD_FIELDS = tuple(f.name for f in fields(Load))
_numbers = attrgetter(*LOAD_FIELDS)


class Loads(Mapping[Incarnation, Load]):
    """The loads of many workers. columns: (LOAD_FIELDS, workers), each worker's in its place among
    `incarnations`."""

    __slots__ = ("columns", "incarnations")

    def __init__(self, incarnations: list[Incarnation], columns: NDArray[np.float64]) -> None:
        self.incarnations = incarnations
        self.columns = columns

    @classmethod
    def of(cls, loads: Mapping[Incarnation, Load]) -> Loads:
        rows = np.array([_numbers(load) for load in loads.values()], np.float64)
        return cls(list(loads), rows.reshape(len(loads), len(LOAD_FIELDS)).T.copy())

    def of_those(self, some: Container[Incarnation]) -> Loads:
        """Those of `some` alone."""
        places = [i for i, inc in enumerate(self.incarnations) if inc in some]
        return Loads([self.incarnations[i] for i in places], self.columns[:, places])

    def at(self, position: int) -> Load:
        return Load(*map(int, self.columns[:, position].tolist()))

    def put(self, position: int, load: Load) -> None:
        self.columns[:, position] = _numbers(load)

    def __getitem__(self, inc: Incarnation) -> Load:
        try:
            return self.at(self.incarnations.index(inc))
        except ValueError:
            raise KeyError(inc) from None

    def __iter__(self) -> Iterator[Incarnation]:
        return iter(self.incarnations)

    def __len__(self) -> int:
        return len(self.incarnations)


def fading(rounds: int) -> float:
    """What is left after so many millionths of a round; nothing grows if they were lost."""
    return math.exp(-max(0, rounds) / (MEMORY_ROUNDS * ROUND))


@dataclass(slots=True)
class Reservation:
    """What one request is to be promised. Not frozen, and neither is a Wish: see RouteRequest."""

    request_id: str
    prefill_tokens: int
    """To be computed: the prompt less what is cached. 0: it only holds blocks for another one."""
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
    sending_ms: int = 0
    """Predicted time for which handing its KV on to another worker keeps the link busy."""
    receiving_ms: int = 0
    """Predicted time until the prefix that it fetches from another worker has come."""
    lease_ms: int = 0
    """For how long at least it keeps its KV for another worker, which is to make this `fetch`."""
    fetch: Fetch | None = None

    @property
    def only_holds(self) -> bool:
        return self.prefill_tokens == 0


@dataclass(slots=True)
class Wish:
    """A reservation, and what the decision for its worker was made from."""

    incarnation: Incarnation
    reservation: Reservation
    max_requests: int
    """At this many the worker is full."""
    seen_total: int | None
    """`Load.total` when it was read; None: take the worker as it is now."""
    source: Wish | None = None
    """Of the worker that computes or holds the prompt for this one: both are made, or neither."""

    def as_they_are(self) -> Wish:
        """The same, of the workers as they are now."""
        return replace(self, seen_total=None, source=self.source and self.source.as_they_are())


@dataclass(slots=True)
class Snapshot:
    """Loads of the live, routable incarnations at one moment of the Redis clock."""

    now_ms: int
    loads: Loads
    rounds: int = 0
    """Of reservations made in the namespace so far, in millionths."""
    workers_ms: int | None = None
    """When an incarnation was last registered or repaired; None: not asked."""
    shards: int | None = None
    """How many the namespace's index has; None: not asked."""
    changed: set[bytes] = field(default_factory=set)
    """Incarnations, as written in Redis: those whose load or registration has changed, and perhaps
    others. Whoever learns what is new of them empties it; until then, the same caller's later
    snapshots name them, too."""
    somebody_waits: bool = False
    """Whether any request waits for a turn, at any replica; also False if not asked."""
    lapsed: frozenset[Incarnation] = frozenset()
    """Incarnations that would be routable if their leases had not run out."""
    unreadable: frozenset[Incarnation] = frozenset()
    """Live ones whose loads are missing, damaged, or written by another release."""
    marks: MarksByWorker = field(default_factory=MarksByWorker)
    """What speaks against workers; empty if not asked."""
    fetches: Sequence[Fetch] = ()
    """Of KV whose lease may end before long, or has ended; empty if not asked."""

    @property
    def away(self) -> dict[Incarnation, int]:
        """Those whose agents are away, while routers vouch for their engines: since when, ms."""
        since = ((inc, marks.away_ms(self.now_ms)) for inc, marks in self.marks.items())
        return {inc: ms for inc, ms in since if ms is not None}

    @property
    def paused(self) -> list[Incarnation]:
        """Those that get no requests, though it is known that they are there."""
        lapsed = self.lapsed & self.marks.keys()
        return [inc for inc in lapsed if self.verdict(inc).state is not State.LAPSED]

    def verdict(self, inc: Incarnation) -> Verdict:
        return self.marks[inc].verdict(self.now_ms, has_lease=inc not in self.lapsed)


@dataclass(frozen=True, slots=True)
class Refusal:
    """reason: `lapsed`, `full`, `changed` or `superseded`. fresh: loads to decide again from; they
    include everything that the same call reserved. None: they have to be asked for."""

    reason: str
    fresh: Snapshot | None
