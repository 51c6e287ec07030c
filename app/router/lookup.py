"""Look-ups in Redis, of a batch's prompts and the workers together; and answers that its index has
yet to hear of. Events come some 10 ms after an answer, and the next turn of a chat may be faster.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from app.core.errors import KvrouteError, WrongVersion
from app.core.overlaps import Overlaps
from app.core.trust import Trust
from app.core.types import NO_OVERLAP, Incarnation, SequenceHash, TierOverlap
from app.policy.decision import Query, RouteRequest
from app.policy.plan import Plan
from app.policy.view import View
from app.router.history import History
from app.router.learned import LearnedWorkers
from app.router.replica import Replica
from app.router.reports import Reports
from app.state import overlap, reservations
from app.state.columns import Columns

KEPT_S = 1.0
"""Engines whose events have not come by then publish nothing of the prompt."""
MAX_KEPT = 128
"""Answers beyond this many push out the oldest: a replica with so many in a second waits for
none."""


class _RecentAnswer(NamedTuple):
    incarnation: Incarnation
    chain: list[SequenceHash]
    at_s: float


class Recent:
    """Prompts that workers have just answered, and therefore hold. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._answered: deque[_RecentAnswer] = deque()
        self._by_root: dict[SequenceHash, deque[_RecentAnswer]] = {}
        """Answers by their first block."""

    def add(self, incarnation: Incarnation, chain: list[SequenceHash], now_s: float) -> None:
        """Note that a worker has answered a prompt with this chain."""
        if not chain:
            return
        if len(self._answered) == MAX_KEPT:
            self._forget_first()
        answered = _RecentAnswer(incarnation, chain, now_s)
        self._answered.append(answered)
        self._by_root.setdefault(chain[0], deque()).append(answered)

    def _forget_first(self) -> None:
        root = self._answered.popleft().chain[0]
        self._by_root[root].popleft()
        if not self._by_root[root]:
            del self._by_root[root]

    def held(
        self, chain: list[SequenceHash], published: Mapping[Incarnation, TierOverlap], now_s: float
    ) -> dict[Incarnation, int]:
        """Returns the leading blocks of `chain` that workers hold, where that exceeds what is
        published."""
        while self._answered and now_s - self._answered[0].at_s > KEPT_S:
            self._forget_first()
        longer: dict[Incarnation, int] = {}
        reached: dict[Incarnation, int] = {}
        num_blocks = len(chain)
        for inc, answered, _ in self._by_root.get(chain[0], ()) if chain else ():
            known = reached.get(inc)
            if known is None:
                known = reached[inc] = published.get(inc, NO_OVERLAP).total
            # Each hash stands for all blocks before it too: most differ in the one after `known`.
            if known < num_blocks and known < len(answered) and chain[known] == answered[known]:
                longer[inc] = reached[inc] = _shared(chain, answered, known)
        return longer


def _shared(one: list[SequenceHash], other: list[SequenceHash], known: int) -> int:
    """Returns how many leading blocks both share; `known` and one more are known to be shared."""
    last = min(len(one), len(other))
    return bisect_left(range(last), True, known + 1, key=lambda at: one[at] != other[at])


class LookUp:
    """Reads what a decision is made from, in at most two round trips, which take reports along."""

    def __init__(
        self,
        replica: Replica,
        history: History,
        recent: Recent,
        reports: Reports,
        taught: LearnedWorkers,
    ) -> None:
        self._replica = replica
        self._history = history
        self._recent = recent
        self._reports = reports
        self._taught = taught
        self._loads = reservations.loads(replica.keyspace)
        self.columns = Columns()
        """Loads that the deciding task knows."""
        self._boundaries = overlap.Boundaries()

    def routed(self, plan: Plan) -> None:
        """Learn that a request goes where it was planned to."""
        self._taught.routed(plan)

    async def workers(self) -> View:
        """Returns the workers as they are now. Raises RedisUnavailable, NamespaceMissing,
        WrongVersion."""
        try:
            snapshot = await self._replica.runner.one(self._loads)
        except WrongVersion as error:
            self._replica.fleet.note(error)
            raise
        return await self._replica.fleet.view(snapshot)

    async def batch(self, queries: Sequence[Query]) -> View:
        """Returns the workers as they are now; sets what the queries know of their prompts.

        Raises RedisUnavailable, NamespaceMissing, WrongVersion.
        """
        runner, fleet, keyspace = self._replica.runner, self._replica.fleet, self._replica.keyspace
        chains = [query.request.chain for query in queries]
        limited = _limited(queries)
        while True:
            shards = fleet.shards or (await runner.one(self._loads)).shards or 1
            recall = self._history.recall(queries)
            predicting = self._history.predicted(queries, shards)
            computing = self._history.computing(queries)
            with (
                self._replica.telemetry.seconds_of("look_up").time(),
                self._reports.riding() as trip,
            ):
                # Only now, so that what the trip settles is told before it.
                asking = self._replica.limiter.asking(limited) if limited else None
                along = [*trip.calls, *([asking.call] if asking else ())]
                along.append(reservations.changes(keyspace, self.columns))
                along += (*recall, *predicting.values(), *computing.values())
                overlaps, replies = await overlap.match(
                    *(runner, keyspace, chains, shards), along=along, boundaries=self._boundaries
                )
                trip.replies = replies[: len(trip.calls)]
            del replies[: len(trip.calls)]
            if asking is not None:
                asking.told(replies.pop(0))
                limited = []
            told = iter(replies)
            snapshot = next(told)
            if isinstance(snapshot, KvrouteError):
                raise snapshot
            recalled = [next(told) for _ in recall]
            predicted = {place: next(told) for place in predicting}
            in_flight = {place: next(told) for place in computing}
            snapshot = snapshot or await runner.one(self._loads)
            view = await fleet.view(snapshot)
            # Otherwise the namespace was recreated, and the blocks are elsewhere.
            if snapshot.shards == shards:
                break
        self._replica.telemetry.blind.inc(overlaps.count(None))
        for place, (query, published) in enumerate(zip(queries, overlaps, strict=True)):
            self._tell(query, view, published, predicted.get(place), in_flight.get(place))
        for visits in recalled:
            if isinstance(visits, list):
                self._history.follow(queries, visits, snapshot.now_ms)
        return view

    def _tell(
        self, query: Query, view: View, published: Overlaps | None, ahead: Any, coming: Any
    ) -> None:
        """Set what the query knows of its prompt.

        published: as `overlap.match` returns. ahead: blocks that workers which publish nothing will
        hold. coming: fields of what is in flight. Both are Redis's replies; an error is no dict.
        """
        chain, held_by = query.request.chain, self._taught.held
        predicted: dict[Incarnation, int] = {}
        computing: dict[Incarnation, int] = {}
        if isinstance(ahead, dict):
            for inc, blocks in ahead.items():
                if inc in view.guessed:
                    predicted[inc] = held_by(inc, chain, blocks, view)
        if isinstance(coming, dict):
            blocks_of = self._history.note_computing(query, coming, view.now_ms)
            computing = {inc: n for inc, n in blocks_of.items() if inc not in view.guessed}
        query.is_short = published is None or isinstance(published, overlap.LowerBound)
        overlaps = Overlaps() if published is None else published
        query.published = overlaps if predicted or computing else None
        query.computing = [
            inc for inc, n in computing.items() if n > overlaps.get(inc, NO_OVERLAP).total
        ]
        if predicted or computing:
            overlaps = with_predicted(overlaps, predicted | computing)
        query.trust = _trust(published, query.is_short, bool(computing))
        held = self._recent.held(query.request.chain, overlaps, time.monotonic())
        query.bound = {
            inc: blocks - overlaps.get(inc, NO_OVERLAP).total for inc, blocks in held.items()
        }
        query.held = overlaps = with_predicted(overlaps, held) if held else overlaps
        query.overlaps = view.reusable(overlaps, query.request.isl_tokens)


def _limited(queries: Sequence[Query]) -> list[RouteRequest]:
    """Returns the requests of limited keys that are not let in."""
    limited = []
    for query in queries:  # a loop, as that calls nothing where no key has limits
        spending = query.request.spending
        if spending is not None and not spending.is_let_in:
            limited.append(query.request)
    return limited


def _trust(published: Overlaps | None, is_short: bool, is_predicted: bool) -> Trust:
    if published is None:
        return Trust.BLIND
    is_bound = is_short or is_predicted or isinstance(published, overlap.Rough)
    return Trust.BOUND if is_bound else Trust.EXACT


def with_predicted(overlaps: Overlaps, predicted: dict[Incarnation, int]) -> Overlaps:
    """Returns `overlaps`, longer on the device where more blocks are predicted than published."""
    own = dict(overlaps.own)
    for inc, blocks in predicted.items():
        known = overlaps.get(inc, NO_OVERLAP)
        if blocks > known.total:
            own[inc] = TierOverlap(known.device + blocks - known.total, known.host, known.disk)
    return Overlaps(own, overlaps.shared, overlaps.resumes)
