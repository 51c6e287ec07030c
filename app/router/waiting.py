"""Requests that wait at a router while no worker can take them.

They stand in one line in Redis, which all replicas share: whose turn it is does not depend on where
a request came in. A replica keeps its own waiters, and polls Redis while it has any.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from heapq import nsmallest
from itertools import count
from operator import attrgetter
from typing import Any

from app.core.config import PRIORITIES, RouterSettings, parse_weights
from app.core.errors import AllWorkersBusy, CallerGone, NamespaceMissing, RedisUnavailable
from app.core.keys import Keyspace
from app.router.fleet import Fleet
from app.router.metrics import Telemetry
from app.state import line, reservations
from app.state.line import Ticket
from app.state.scripts import Call, ScriptRunner

log = logging.getLogger(__name__)

SHARES = dict(zip(PRIORITIES, (16.0, 1.0, 1 / 16), strict=True))
"""Factor on a tenant's weight, by priority. No priority is strict, so nothing starves."""
POLL_S = 0.02
PAUSE_PER_WORKER_S = 50e-6
"""Between two looks at the loads, of which each takes Redis 1 µs. A replica looks at every release,
so without a pause, 16 replicas of a large fleet would leave Redis time for nothing else."""
RENEW_S = 0.25
TICKET_TTL_MS = 1000
"""After this long without a call from a replica, its tickets are void."""
NAME_S = 2.0
"""How often each ticket is named to Redis, in case somebody took it out there."""
TICKET_KEPT_MS = 10_000
MAX_NAMED = 128
"""Tickets that one step names as waiting, and that it takes out: each time 3 ms of Redis's time at
most, if every ticket is of another flow."""
MIN_TURNS, MAX_TURNS = 16, 128
WORKERS_PER_TURN = 8
OTHERS = "other"
"""Metrics' name for tenants with no weight set: callers choose names, and labels are kept."""


@dataclass(slots=True, eq=False)
class Waiter:
    """A waiting request.

    weight: of its flow. tenant, priority: as labelled in metrics. decide: asks for the request's
    decision once more; False: that is not possible now. since_s: by time.perf_counter.
    """

    ticket: Ticket
    weight: float
    tenant: str
    priority: str
    answer: asyncio.Future[Any]
    decide: Callable[[], bool]
    since_s: float
    name_at_s: float = 0.0
    """When to name its ticket in the line that all replicas share; 0: at once."""
    deciding: bool = False
    """Whether its turn has come and a worker is being looked for."""
    outcome: str = ""
    """What it counts as in the metrics; "" while it waits."""


class Room:
    """The waiters of one replica, never more than `capacity`.

    When it is full, the flow with the most waiters for its weight loses its latest one, so a flow
    that floods a replica takes no places from others.
    """

    def __init__(self, capacity: int) -> None:
        assert capacity > 0
        self._capacity = capacity
        self._flows: dict[str, dict[str, Waiter]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Waiter]:
        for waiters in list(self._flows.values()):
            yield from list(waiters.values())

    def get(self, flow: str, name: str) -> Waiter | None:
        """The waiter with this ticket, if it is here."""
        return self._flows.get(flow, {}).get(name)

    def enter(self, waiter: Waiter) -> Waiter | None:
        """Add a waiter. Returns the one that had to make room for it, which may be itself."""
        own = self._flows.setdefault(waiter.ticket.flow, {})
        own[waiter.ticket.name] = waiter
        self._size += 1
        if self._size <= self._capacity:
            return None
        most = max(self._flows.values(), key=lambda flow: (_crowding(flow), flow is own))
        gone = most[next(reversed(most))]
        self.remove(gone)
        return gone

    def remove(self, waiter: Waiter) -> None:
        """Remove a waiter; harmless if it is not here."""
        flow, name = waiter.ticket.flow, waiter.ticket.name
        if self._flows.get(flow, {}).pop(name, None) is None:
            return
        self._size -= 1
        if not self._flows[flow]:
            del self._flows[flow]


def turns_at_once(openings: int, workers: int) -> int:
    """How many requests may go together; others follow a round trip later.

    The more workers, the more slots come free between two polls. 128 turns take Redis 2 to 3 ms.
    """
    return min(openings, max(MIN_TURNS, min(workers // WORKERS_PER_TURN, MAX_TURNS)))


def _crowding(waiters: dict[str, Waiter]) -> float:
    return len(waiters) / next(iter(waiters.values())).weight


class Waiting:
    """Lets requests wait, while `run` runs, and has them decided when their turn comes."""

    def __init__(
        self,
        runner: ScriptRunner,
        keyspace: Keyspace,
        settings: RouterSettings,
        fleet: Fleet,
        telemetry: Telemetry,
    ) -> None:
        self._runner = runner
        self._keyspace = keyspace
        self._fleet = fleet
        self._telemetry = telemetry
        self._max_queue_s = settings.max_queue_s
        self._timeout_s = settings.wait_timeout_s
        self._weights = parse_weights(settings.tenant_weights)
        self._room = Room(settings.wait_queue)
        self._replica = secrets.token_hex(4)
        self._numbers = count(1)
        self._loads = reservations.loads(keyspace)
        self._left: list[tuple[str, str, bool]] = []
        """Tickets still to be taken out of the line: see `line.leave`."""
        self._wake = asyncio.Event()
        self._renewed_s = 0.0
        """When Redis last learnt that this replica has tickets."""
        self._retry_after_s = 0.0
        self._pause_s = 0.0
        self._stopped = False
        self._tasks: asyncio.TaskGroup | None = None

    @property
    def somebody(self) -> bool:
        """Whether any request waits at this replica."""
        return len(self._room) > 0

    def enter(
        self,
        tenant: str,
        priority: str,
        *,
        tokens: int,
        picky: bool,
        now_ms: int,
        answer: asyncio.Future[Any],
        decide: Callable[[], bool],
        hung_up: Callable[[], Awaitable[object]] | None,
    ) -> Waiter:
        """Let a request wait until `answer` is done, whoever sets it.

        tokens: what its turn is worth. picky: not every worker could take it. now_ms: by the Redis
        clock. decide: see Waiter. hung_up: returns once the caller is gone.
        """
        weight = self._weights.get(tenant, 1.0) * SHARES[priority]
        waiter = Waiter(
            ticket=line.ticket(
                f"{priority}:{tenant}",
                self._replica,
                next(self._numbers),
                tokens=tokens,
                weight=weight,
                picky=picky,
                since_ms=now_ms,
            ),
            weight=weight,
            tenant=tenant if tenant in self._weights else OTHERS,
            priority=priority,
            answer=answer,
            decide=decide,
            since_s=time.perf_counter(),
        )
        if not self.somebody:
            self._wake.set()
        crowded_out = self._room.enter(waiter)
        answer.add_done_callback(lambda _: self._leave(waiter))
        if hung_up is not None:
            assert self._tasks is not None, "not running"
            watch = self._tasks.create_task(self._watch(waiter, hung_up))
            answer.add_done_callback(lambda _: watch.cancel())
        if crowded_out is not None:
            busy = f"{len(self._room)} requests are already waiting for a worker"
            self._end(crowded_out, "crowded_out", AllWorkersBusy(busy, self._retry_after_s))
        if self._stopped:
            self._turn_away_as_stopped(waiter)
        self._telemetry.waiting.set(len(self._room))
        return waiter

    def look_again(self) -> None:
        """Check at once whether a worker has room, as something ended; else it is seen later."""
        if self.somebody:
            self._wake.set()

    def stop(self) -> None:
        """Turn away all waiters, from now on."""
        self._stopped = True
        for waiter in self._room:
            self._turn_away_as_stopped(waiter)

    def _turn_away_as_stopped(self, waiter: Waiter) -> None:
        self._end(waiter, "stopped", AllWorkersBusy("this router replica is stopping", 0.0))

    async def run(self) -> None:
        """Run until cancelled; tickets still to be taken out of the line are taken out then."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                while True:
                    polls = self._room or self._left
                    with suppress(TimeoutError):
                        async with asyncio.timeout(POLL_S if polls else None):
                            await self._wake.wait()
                    self._wake.clear()
                    try:
                        await self._step()
                    except (RedisUnavailable, NamespaceMissing) as error:
                        log.debug("cannot tell whose turn it is: %s", error)
                        self._without_redis()
                    await asyncio.sleep(self._pause_s)
        finally:
            # Others would otherwise wait behind them until they are void.
            left = [
                line.leave(self._keyspace, self._left[at : at + MAX_NAMED])
                for at in range(0, len(self._left), MAX_NAMED)
            ]
            if left:
                with suppress(RedisUnavailable):
                    await self._runner.run(left)

    async def _step(self) -> None:
        """Bring the line up to date, and have those requests decided whose turn it is."""
        self._refuse_late()
        now_s = time.perf_counter()
        if now_s - self._renewed_s >= TICKET_TTL_MS / 2000:
            # They may have been void for a while, and taken out by others.
            for waiter in self._room:
                waiter.name_at_s = 0.0
        due = [waiter for waiter in self._room if waiter.name_at_s <= now_s]
        named = nsmallest(MAX_NAMED, due, key=attrgetter("name_at_s"))
        left, calls = self._left[:MAX_NAMED], list[Call[Any]]()
        if left:
            calls.append(line.leave(self._keyspace, left))
        renews = bool(named or (self._room and now_s - self._renewed_s >= RENEW_S))
        if renews:
            calls.append(
                line.wait(
                    self._keyspace,
                    self._replica,
                    [waiter.ticket for waiter in named],
                    ttl_ms=TICKET_TTL_MS,
                    kept_ms=TICKET_KEPT_MS,
                )
            )
        *_, snapshot = await self._runner.run([*calls, self._loads])
        del self._left[: len(left)]
        for waiter in named:
            waiter.name_at_s = now_s + NAME_S
        if renews:
            self._renewed_s = now_s
        view = await self._fleet.view(snapshot)
        self._retry_after_s = view.shortest_queue_s
        self._pause_s = PAUSE_PER_WORKER_S * len(view.infos)
        if openings := view.openings(self._max_queue_s):
            await self._give_turns(turns_at_once(openings, len(view.infos)))

    async def _give_turns(self, openings: int) -> None:
        for flow, name in await self._runner.one(
            line.turns(self._keyspace, self._replica, openings)
        ):
            waiter = self._room.get(flow, name)
            if waiter is None:
                # It left meanwhile, or somebody put it there: the line is told in the next step.
                self._left.append((flow, name, False))
            elif not waiter.deciding:
                waiter.deciding = waiter.decide()

    def _without_redis(self) -> None:
        """Have all waiters decided as others are then; those that must still wait stay in line."""
        for waiter in self._room:
            if not waiter.deciding:
                waiter.deciding = waiter.decide()
        if not self._room:
            # Nobody renews these tickets, so they become void by themselves.
            self._left.clear()

    def _refuse_late(self) -> None:
        oldest_s = time.perf_counter() - self._timeout_s
        for waiter in self._room:
            if waiter.since_s <= oldest_s and not waiter.deciding:
                late = f"no worker had room within {self._timeout_s:g} s"
                self._end(waiter, "timed_out", AllWorkersBusy(late, self._retry_after_s))

    async def _watch(self, waiter: Waiter, hung_up: Callable[[], Awaitable[object]]) -> None:
        await hung_up()
        self._end(waiter, "gone", CallerGone("the caller hung up while its request waited"))

    def _end(self, waiter: Waiter, outcome: str, error: Exception) -> None:
        if not waiter.answer.done():
            waiter.outcome = outcome
            waiter.answer.set_exception(error)

    def _leave(self, waiter: Waiter) -> None:
        answer = waiter.answer
        had_turn = not answer.cancelled() and answer.exception() is None
        ended = "routed" if had_turn else "gone" if answer.cancelled() else "failed"
        outcome = waiter.outcome or ended
        self._room.remove(waiter)
        self._left.append((waiter.ticket.flow, waiter.ticket.name, had_turn))
        # The next in line may be waiting for this.
        self._wake.set()
        self._telemetry.waiting.set(len(self._room))
        self._telemetry.waits.labels(waiter.tenant, waiter.priority, outcome).inc()
        self._telemetry.waited_seconds.observe(time.perf_counter() - waiter.since_s)
