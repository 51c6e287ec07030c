"""Whether workers that decode fetch KV while its source still keeps it for them.

What is fetched after a lease has ended belongs to other prompts: the text is wrong, nothing in the
answer tells, and the engine keeps it as the prompt's. So an answer counts if it began within a
lease from before the source was asked. Later, it counts if the source's engine says that it has
let go of nothing since, or that nothing was fetched after that.

A target that has not begun when a lease may have ended is given up: its engine then drops the
request, and what it may still fetch for it. An engine that stands still may fetch before it hears
of that, and then answers others with it. So whatever a target was sent is in doubt until the target
has answered something that it was sent later: within the lease, or after the source's engine was
asked. A target that may have fetched late is tainted.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from math import inf

from app.core.types import WorkerKey
from app.core.worker_report import WorkerInfo, process_of
from app.door.connection import UpstreamError
from app.door.waits import Wait
from app.policy.kv_lease import STALE_MS, Fetches, LeaseBooks, Leases, fetches, leases
from app.router.router import Router

LOOK_EVERY_S = 0.25
POLL_S = 0.05
JUDGED_S = 15.0
"""How long at most the source's engine is asked about what was fetched."""
LEFT_JUDGED_S = 5.0
"""The same, of what nobody waits for: sources come and go, and one that is gone says nothing."""
UNKNOWN_S = 10.0
"""How long a source's agent may be away, as when it is restarted."""
MARGIN_S = 0.5
"""By which a target is given up before its lease may end, if nobody says when it does."""
DOUBTED_S = 3600.0
"""How long at most something is in doubt."""
MOST_DOUBTS = 1000
"""Of a pair. The first counts for all later ones, until the last is past."""
FETCHED_LATE = "may hold KV that is not its prompt's, fetched after its source's lease had ended"
NOT_KNOWN = "took longer than its source's lease, and nobody says whether that had ended"
NOT_BEGUN = "has not begun, and its source's lease may have ended"


class LeaseEnded(UpstreamError):
    """What was to be fetched may have been let go."""

    cause = "lease_ended"


class TaintedTarget(UpstreamError):
    """What the worker has fetched for others may be in its answer."""

    cause = "tainted"


@dataclass(slots=True, eq=False)
class KvLease:
    """Of a target, on what its source keeps for it.

    streams: the target's answer begins with its first token; else nobody sees that. kept_s: how
    long it is for sure. asked_s: from when on that counts, by the event loop's clock. before: what
    the source's engine had counted by then.
    nudge: has the source's engine make a step. An engine also counts as fetched late what a target
    lets go of late, unfetched: nobody can tell which it was.
    """

    router: Router
    source: WorkerInfo
    target: WorkerInfo
    streams: bool
    asked_s: float
    kept_s: float
    before: LeaseBooks | None
    nudge: Callable[[], Awaitable[None]]
    judged: LeaseBooks | None = None
    """As of when it was last known that nothing had been fetched late."""
    fetched: Fetches = Fetches.UNKNOWN
    """What the target had fetched, when that was last found out."""
    fetched_since_s: float = -inf
    """When that began to be found out, by the event loop's clock."""
    steps: int | None = None
    """That the target's engine had made then."""
    sent_s: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    """When its target was sent the request, or that this is given up."""
    is_left: bool = False
    """Whether nobody waits for the target any more."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Of whoever finds out."""
    known_s: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    """When anything was last known."""

    @property
    def age_s(self) -> float:
        """Since the source was asked."""
        return asyncio.get_running_loop().time() - self.asked_s

    @property
    def is_sure(self) -> bool:
        """Whether it has not ended, whatever the source's engine says."""
        return self.age_s <= self.kept_s

    @property
    def is_due(self) -> bool:
        """Whether to look what the source's engine says, or if nobody says anything, to give up."""
        margin_s = 0.0 if self.before is not None else min(MARGIN_S, self.kept_s / 4)
        return self.age_s > self.kept_s - margin_s

    @property
    def is_over(self) -> bool:
        """Whether it has come to an end without a late fetch.

        A target that still prolongs it is alive. An engine that has begun anew hands nothing on,
        and holds nothing.
        """
        fleet = self.router.fleet
        books = fleet.lease_books(self.source)
        if self.before is None or self.age_s > DOUBTED_S:
            return True
        if books is not None and process_of(books.life) != process_of(self.before.life):
            return True
        life = fleet.engine_life(self.target.key)
        if life is not None and process_of(life) != process_of(self.target.engine_life):
            return True
        return self.age_s > 2 * self.kept_s and self.state() is Leases.KEPT

    @property
    def has_news(self) -> bool:
        """Whether it may have been fetched late since that was last found out."""
        if self.is_sure or self.before is None:
            return False
        books, told = self.books(), self.judged or self.before
        is_told = books is not None and books.late > told.late
        return is_told or (self.is_left and self._steps() != self.steps)

    def _steps(self) -> int | None:
        """That the target's engine has made."""
        theirs = self.router.fleet.lease_books(self.target)
        return theirs and theirs.steps

    def books(self) -> LeaseBooks | None:
        """What the source's engine has counted."""
        return self.router.fleet.lease_books(self.source)

    def state(self) -> Leases:
        """As far as is known now."""
        now_ms, now_s = self.router.fleet.redis_now_ms, asyncio.get_running_loop().time()
        books = self.books()
        state = Leases.UNKNOWN
        if now_ms is not None:
            state = leases(self.before, books, now_ms - STALE_MS)
        if state is not Leases.UNKNOWN:
            self.known_s = now_s
        elif self.before is not None and now_s < self.known_s + UNKNOWN_S:
            return Leases.KEPT
        return state

    @property
    def is_judged(self) -> bool:
        """Whether nothing has happened since it was found that nothing had been fetched late."""
        books, judged = self.books(), self.judged
        return books is not None and judged is not None and books.same_leases(judged)

    async def find_out(self) -> None:
        """Set `fetched` to what the target has by now, as the source's engine says. If that was
        late, the target is tainted."""
        loop, asked_ms = asyncio.get_running_loop(), self.router.fleet.redis_now_ms
        self.fetched_since_s, self.steps = loop.time(), self._steps()
        self.fetched = Fetches.UNKNOWN
        if self.router.fleet.is_tainted(self.target.key):
            self.fetched = Fetches.LATE
        elif self.before is not None and asked_ms is not None:
            self.fetched = await self._asked(self.before, asked_ms)
            if self.fetched is Fetches.LATE:
                await self.router.taint(self.target, FETCHED_LATE)
        if self.fetched is Fetches.LATE:
            # Its engine may drop what it holds: then only what is fetched late from now on counts.
            self.before = self.books() or self.before

    async def _asked(self, before: LeaseBooks, asked_ms: int) -> Fetches:
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + (LEFT_JUDGED_S if self.is_left else JUDGED_S)
        first, is_nudged = None, False
        while loop.time() < ends_s:
            books = self.books()
            if first is None and books is not None and books.is_of(asked_ms):
                first = books
            state = fetches(before, first, books)
            if state is Fetches.IN_TIME:
                self.judged = books
            if state is not Fetches.UNKNOWN:
                return state
            if first is not None and not is_nudged:
                is_nudged = True
                await self.nudge()
            await asyncio.sleep(POLL_S)
        return Fetches.UNKNOWN


class _Watch(Wait):
    __slots__ = ("lease",)

    def __init__(self, lease: KvLease, open_waits: set[_Watch]) -> None:
        super().__init__(open_waits, _not_begun)
        self.lease = lease


def _not_begun() -> LeaseEnded:
    return LeaseEnded(NOT_BEGUN)


class KvLeases:
    """Looks after requests whose targets have yet to begin, while `run` runs."""

    def __init__(self) -> None:
        self._open: set[_Watch] = set()
        self._doubts: defaultdict[WorkerKey, dict[WorkerKey, deque[KvLease]]] = defaultdict(dict)
        """By target and source, as they were sent."""
        self._judging: defaultdict[WorkerKey, set[asyncio.Future[None]]] = defaultdict(set)
        """Targets of which it is being found out what they have fetched."""

    def watched(self, lease: KvLease) -> Wait:
        """Within it, a request waits for its target to begin. Raises LeaseEnded."""
        self._doubt(lease)
        return _Watch(lease, self._open)

    def leave(self, lease: KvLease) -> None:
        """Nobody waits for its target any more, which may fetch all the same."""
        doubts = self._doubts.get(lease.target.key, {}).get(lease.source.key)
        if doubts and lease in doubts:
            doubts.remove(lease)
            lease.sent_s, lease.is_left = asyncio.get_running_loop().time(), True
            self._doubt(lease)

    def _doubt(self, lease: KvLease) -> None:
        if lease.before is None:
            return
        doubts = self._doubts[lease.target.key].setdefault(lease.source.key, deque())
        if len(doubts) == MOST_DOUBTS:
            doubts.pop()
        doubts.append(lease)

    async def confirm(self, target: WorkerKey, sent_s: float, lease: KvLease | None) -> None:
        """Of an answer that begins now: returns once it is sure that its target has fetched nothing
        late, for this request or another.

        sent_s: when the request was sent, by the event loop's clock. Raises LeaseEnded,
        TaintedTarget.
        """
        if lease is not None and not lease.is_sure:
            state = await self._fetched(lease)
            if state is not Fetches.IN_TIME:
                raise LeaseEnded(FETCHED_LATE if state is Fetches.LATE else NOT_KNOWN)
        for doubts in list(self._doubts.get(target, {}).values()):
            if doubts and not doubts[0].is_sure:
                state = await self._fetched(doubts[0])
                if state is Fetches.LATE:
                    raise TaintedTarget(FETCHED_LATE)
            while doubts and doubts[0].sent_s <= sent_s:
                doubts.popleft()
        # What this answer begins with may be what another one is being judged for.
        while judging := self._judging.get(target):
            await asyncio.wait(list(judging))

    async def run(self) -> None:
        """Run until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await asyncio.sleep(LOOK_EVERY_S)
                for watch in list(self._open):
                    if watch.lease.is_due and not watch.lease.turn.locked():
                        self._look_at(watch, tasks)
                for target in list(self._doubts):
                    self._look_after(target, tasks)

    def _look_after(self, target: WorkerKey, tasks: asyncio.TaskGroup) -> None:
        of_target = self._doubts[target]
        for source, doubts in list(of_target.items()):
            while doubts and doubts[0].is_over:
                doubts.popleft()
            if not doubts:
                del of_target[source]
            elif doubts[0].has_news and not doubts[0].turn.locked():
                tasks.create_task(self._fetched(doubts[0]))
        if not of_target:
            del self._doubts[target]

    def _look_at(self, watch: _Watch, tasks: asyncio.TaskGroup) -> None:
        lease = watch.lease
        state = lease.state()
        if state is Leases.KEPT or (lease.is_judged and not lease.streams):
            return
        if lease.before is None:
            watch.end()  # in time, for sure
            return
        if lease.streams or state is Leases.UNKNOWN:
            watch.end()
        tasks.create_task(self._judge(watch))

    async def _judge(self, watch: _Watch) -> None:
        if await self._fetched(watch.lease) is not Fetches.IN_TIME and watch in self._open:
            watch.end()

    async def _fetched(self, lease: KvLease) -> Fetches:
        """What the target has fetched by now; if that was late, it is tainted."""
        loop, key = asyncio.get_running_loop(), lease.target.key
        asked_s, done = loop.time(), loop.create_future()
        self._judging[key].add(done)
        try:
            async with lease.turn:
                # Not if somebody else began to find out only after this was asked.
                if lease.fetched_since_s < asked_s:
                    await lease.find_out()
                return lease.fetched
        finally:
            done.set_result(None)
            self._judging[key].discard(done)
            if not self._judging[key]:
                del self._judging[key]
