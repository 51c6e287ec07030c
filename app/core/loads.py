"""Loads of workers, as decisions see them, and reservations that change them."""

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
"""One round, in the unit of `rounds`: a round is as many reservations as there are workers."""
MEMORY_ROUNDS = 16
"""Rounds in which the load that was routed to a worker fades by a factor of e; see lua/reserve.lua.
"""


@dataclass(slots=True)
class Load:
    """Reservations on one incarnation. A router adds its own decisions to its copy. head_*: of the
    request prefilling now, which is the oldest one without a first token. routed_*, sending_*,
    receiving_*: history that fades or passes, never given back, and so not compared."""

    prefill_tokens: int = 0
    prefill_us: int = 0
    head_us: int = 0
    head_since_ms: int = 0
    blocks: int = 0
    requests: int = 0
    decoding: int = 0
    total: int = 0
    routed_tokens: int = field(default=0, compare=False)
    """Tokens to be computed of the requests routed here, fading as others follow; as of
    `routed_at`."""
    routed_at: int = field(default=0, compare=False)
    """`Snapshot.rounds` when `routed_tokens` last changed."""
    sending_until_ms: int = field(default=0, compare=False)
    """Time, ms, at which all KV promised to others will have left, one transfer after another."""
    receiving_until_ms: int = field(default=0, compare=False)
    """Time, ms, at which all prefixes fetched from others will have come."""

    def queue_s(self, now_ms: int) -> float:
        """Returns predicted seconds of prefill still to do; the head's share drains with time."""
        drained_us = min((now_ms - self.head_since_ms) * 1000, self.head_us)
        return (self.prefill_us - max(0, drained_us)) / 1e6

    def overdue_s(self, now_ms: int) -> float:
        """Returns seconds for which predicted first tokens have been late."""
        return (now_ms - self.head_since_ms) / 1000 - self.prefill_us / 1e6

    def routed_lately(self, rounds: int) -> float:
        """Returns tokens of prefill routed here lately, as of `rounds`."""
        return self.routed_tokens * fading(rounds - self.routed_at)

    def sending_s(self, now_ms: int) -> float:
        return max(0, self.sending_until_ms - now_ms) / 1000

    def receiving_s(self, now_ms: int) -> float:
        return max(0, self.receiving_until_ms - now_ms) / 1000

    def add(self, reservation: Reservation, now_ms: int, rounds: int) -> None:
        """Counts one more reservation, which completes `rounds`, as lua/reserve.lua does."""
        self.routed_tokens = int(self.routed_tokens * fading(rounds - self.routed_at))
        self.routed_tokens += reservation.prefill_tokens
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
    """Loads of many workers. columns: (LOAD_FIELDS, workers), in the order of `incarnations`."""

    __slots__ = ("columns", "incarnations")

    def __init__(self, incarnations: list[Incarnation], columns: NDArray[np.float64]) -> None:
        self.incarnations = incarnations
        self.columns = columns

    @classmethod
    def of(cls, loads: Mapping[Incarnation, Load]) -> Loads:
        rows = np.array([_numbers(load) for load in loads.values()], np.float64)
        return cls(list(loads), rows.reshape(len(loads), len(LOAD_FIELDS)).T.copy())

    def of_those(self, some: Container[Incarnation]) -> Loads:
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
    """Returns the fraction left after so many millionths of a round; never more than 1."""
    return math.exp(-max(0, rounds) / (MEMORY_ROUNDS * ROUND))


NOWHERE = Incarnation(0)
"""No worker has it: Redis counts incarnations from 1."""


@dataclass(slots=True)
class Reservation:
    """Capacity of a worker promised to one request, and what that was decided from.

    Not frozen: making a frozen one takes three times as long.
    """

    request_id: str
    prefill_tokens: int
    """Tokens to be computed: the prompt less what is cached. 0: blocks are held for another worker.
    """
    prefill_us: int
    blocks: int
    attempt: str = "-"
    """`<began, ms>-<tag>`, without spaces: when the try began, Redis clock, and a tag that tells it
    from other tries of the same request."""
    retry: bool = False
    """Whether this replaces what earlier tries of the request hold."""
    carried: bool = False
    """Whether a door carries the request, and extends the reservation."""
    sending_ms: int = 0
    """Predicted ms for which handing KV on to another worker keeps the link busy."""
    receiving_ms: int = 0
    """Predicted ms until the prefix fetched from another worker has come."""
    lease_ms: int = 0
    """Least ms for which the source keeps the KV that `fetch` is to take."""
    fetch: Fetch | None = None
    flow: str = ""
    """Name of those whose turns the request shares: `<priority>:<tenant>`; "": of none."""
    incarnation: Incarnation = NOWHERE
    max_requests: int = 0
    """Requests at which the worker is full."""
    seen_total: int | None = None
    """`Load.total` when it was read; None: take the worker as it is when it is made."""
    source: Reservation | None = None
    """Reservation on the worker that computes or holds the prompt for this one: both are made, or
    neither."""

    @property
    def only_holds(self) -> bool:
        return self.prefill_tokens == 0

    def as_they_are(self) -> Reservation:
        """Returns a copy for the workers as they are when it is made."""
        return replace(self, seen_total=None, source=self.source and self.source.as_they_are())


@dataclass(slots=True)
class Snapshot:
    """Loads of the live, routable incarnations at one moment of the Redis clock."""

    now_ms: int
    loads: Loads
    rounds: int = 0
    """Reservations made in the namespace so far, in millionths of a round."""
    workers_ms: int | None = None
    """Time of the last registration or repair of an incarnation, ms; None: not asked."""
    shards: int | None = None
    changed: set[bytes] = field(default_factory=set)
    """Incarnations, as written in Redis, whose load or registration has changed, and perhaps
    others. The reader empties the set; until then, the same caller's later snapshots name them too.
    """
    somebody_waits: bool = False
    """Whether any request waits for a turn, at any replica; False also if not asked."""
    mixed_ms: int = 0
    """Latest time at which a reservation was of another flow than the one before it; 0: never."""
    lapsed: frozenset[Incarnation] = frozenset()
    """Incarnations that would be routable if their leases had not run out."""
    unreadable: frozenset[Incarnation] = frozenset()
    """Live incarnations whose loads are missing, damaged, or written by another release."""
    marks: MarksByWorker = field(default_factory=MarksByWorker)
    fetches: Sequence[Fetch] = ()
    """Fetches whose lease may end before long, or has ended; empty if not asked."""

    @property
    def away(self) -> dict[Incarnation, int]:
        """Incarnation whose agent is away, while routers vouch for its engine -> since when, ms."""
        since = ((inc, marks.away_ms(self.now_ms)) for inc, marks in self.marks.items())
        return {inc: ms for inc, ms in since if ms is not None}

    @property
    def paused(self) -> list[Incarnation]:
        """Incarnations that get no requests, though they are known to be there."""
        lapsed = self.lapsed & self.marks.keys()
        return [inc for inc in lapsed if self.verdict(inc).state is not State.LAPSED]

    def verdict(self, inc: Incarnation) -> Verdict:
        return self.marks[inc].verdict(self.now_ms, has_lease=inc not in self.lapsed)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A wish that was not granted. reason: `lapsed`, `full`, `changed` or `superseded`. fresh:
    loads to decide again from, with all that the same call reserved; None: ask for them."""

    reason: str
    fresh: Snapshot | None
