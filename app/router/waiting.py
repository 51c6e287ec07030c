"""Requests that wait at a router while no worker can take them.

They stand in one queue in Redis, which all replicas share: whose turn it is does not depend on
where a request came in. A replica keeps those that came to it, and polls Redis while it has any.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from contextlib import suppress
from heapq import nsmallest
from itertools import count
from operator import attrgetter
from typing import Any

from app.core.errors import (
    AllWorkersBusy,
    NamespaceMissing,
    NoWorkers,
    RedisUnavailable,
    WrongVersion,
)
from app.core.settings.kinds import PRIORITY_SHARES, parse_weights
from app.policy.view import View
from app.router.pending import Pending, WaitQueue
from app.router.replica import Replica
from app.state import reservations, waiting
from app.state.columns import Columns
from app.state.scripts import Call

log = logging.getLogger(__name__)

POLL_S = 0.02
PAUSE_PER_WORKER_S = 50e-6
"""Pause between two looks at the loads, of which each takes Redis 1 µs. A replica looks at every
release, so without a pause 16 replicas of a large fleet would leave Redis no time."""
RENEW_S = 0.25
TICKET_TTL_MS = 1000
"""Tickets of a replica are void after this long without a call from it."""
MIXED_MS = 600_000
"""Milliseconds after a reservation of another flow for which --wait-above-s holds."""
NAME_S = 2.0
"""Seconds between two namings of a ticket to Redis, in case somebody took it out there."""
TICKET_KEPT_MS = 10_000
MAX_NAMED = 128
"""Tickets that one step names as waiting, and that it takes out: each time 3 ms of Redis's time at
most, if every ticket is of another flow."""
MIN_TURNS, MAX_TURNS = 16, 128
WORKERS_PER_TURN = 8
OTHERS = "other"
"""Metrics' name for tenants with no weight set: callers choose names, and labels are kept."""


def turns_at_once(openings: int, workers: int) -> int:
    """Returns how many requests may go together; others follow a round trip later.

    The more workers, the more slots come free between two polls. 128 turns take Redis 2 to 3 ms.
    """
    return min(openings, max(MIN_TURNS, min(workers // WORKERS_PER_TURN, MAX_TURNS)))


class Waiting:
    """Lets requests wait while it is entered, and says whose turn has come: see `next_turns`."""

    def __init__(self, replica: Replica) -> None:
        settings = replica.settings
        self._runner = replica.runner
        self._keyspace = replica.keyspace
        self._fleet = replica.fleet
        self._telemetry = replica.telemetry
        self._max_queue_s = settings.max_queue_s
        self._timeout_s = settings.wait_timeout_s
        self._weights = parse_weights(settings.tenant_weights)
        self._queue = WaitQueue(settings.wait_queue)
        self._name = secrets.token_hex(4)
        self._numbers = count(1)
        self._columns = Columns()
        self._left: list[tuple[str, str, bool]] = []
        """Tickets still to be taken out of the queue: see `waiting.leave`."""
        self._wake = asyncio.Event()
        self._renewed_s = 0.0
        """Time when Redis last learnt that this replica has tickets."""
        self._retry_after_s = 0.0
        self._pause_s = 0.0
        self._stopped = False

    def max_queue_s(self, view: View) -> float:
        """Returns the longest prefill queue of a worker that takes requests, in seconds; infinite
        while all requests are of one flow, whose requests only have each other to wait for."""
        return self._max_queue_s if view.now_ms - view.mixed_ms < MIXED_MS else math.inf

    @property
    def somebody(self) -> bool:
        """Whether any request waits at this replica."""
        return len(self._queue) > 0

    def enter(self, pending: Pending, *, tokens: int, picky: bool, now_ms: int) -> None:
        """Let a request wait until its answer is done, whoever sets it.

        tokens: worth of its turn. picky: not every worker could take it. now_ms: by the Redis
        clock.
        """
        tenant, priority = pending.request.tenant, pending.request.priority
        weight = self._weights.get(tenant, 1.0) * PRIORITY_SHARES[priority]
        pending.ticket = waiting.ticket(
            f"{priority}:{tenant}",
            self._name,
            next(self._numbers),
            tokens=tokens,
            weight=weight,
            picky=picky,
            since_ms=now_ms,
        )
        pending.weight, pending.since_s = weight, time.perf_counter()
        pending.tenant = tenant if tenant in self._weights else OTHERS
        if not self.somebody:
            self._wake.set()
        crowded_out = self._queue.enter(pending)
        pending.answer.add_done_callback(lambda _: self._leave(pending))
        if crowded_out is not None:
            busy = f"{len(self._queue)} requests are already waiting for a worker"
            self._end(crowded_out, "crowded_out", AllWorkersBusy(busy, self._retry_after_s))
        if self._stopped:
            self._turn_away_as_stopped(pending)
        self._telemetry.waiting.set(len(self._queue))

    def look_again(self) -> None:
        """Check at once whether a worker has room, as something ended; else it is seen later."""
        if self.somebody:
            self._wake.set()

    def stop(self) -> None:
        """Turn away all that wait, from now on."""
        self._stopped = True
        for pending in self._queue:
            self._turn_away_as_stopped(pending)

    def _turn_away_as_stopped(self, pending: Pending) -> None:
        self._end(pending, "stopped", AllWorkersBusy("this router replica is stopping", 0.0))

    async def __aenter__(self) -> Waiting:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Take the tickets that are left out of the queue: others would otherwise wait behind them
        until they are void."""
        left = [
            waiting.leave(self._keyspace, self._left[at : at + MAX_NAMED])
            for at in range(0, len(self._left), MAX_NAMED)
        ]
        if left:
            with suppress(RedisUnavailable):
                await self._runner.run(left)

    async def next_turns(self) -> list[Pending]:
        """Returns the requests to decide now; waits until it is time to look.

        Each counts as being decided until its `deciding` is set to False.
        """
        await asyncio.sleep(self._pause_s)
        polls = self._queue or self._left
        with suppress(TimeoutError):
            async with asyncio.timeout(POLL_S if polls else None):
                await self._wake.wait()
        self._wake.clear()
        try:
            due = await self._step()
        except (RedisUnavailable, NamespaceMissing, WrongVersion) as error:
            log.debug("cannot tell whose turn it is: %s", error)
            due = self._without_redis()
        for pending in due:
            pending.deciding = True
        return due

    async def _step(self) -> list[Pending]:
        """Bring the queue up to date; returns the requests whose turn it is."""
        self._refuse_late()
        now_s = time.perf_counter()
        if now_s - self._renewed_s >= TICKET_TTL_MS / 2000:
            # They may have been void for a while, and taken out by others.
            for pending in self._queue:
                pending.name_at_s = 0.0
        due = [pending for pending in self._queue if pending.name_at_s <= now_s]
        named = nsmallest(MAX_NAMED, due, key=attrgetter("name_at_s"))
        left, calls = self._left[:MAX_NAMED], list[Call[Any]]()
        if left:
            calls.append(waiting.leave(self._keyspace, left))
        renews = bool(named or (self._queue and now_s - self._renewed_s >= RENEW_S))
        if renews:
            calls.append(
                waiting.wait(
                    self._keyspace,
                    self._name,
                    [pending.ticket for pending in named if pending.ticket is not None],
                    ttl_ms=TICKET_TTL_MS,
                    kept_ms=TICKET_KEPT_MS,
                )
            )
        changes = reservations.changes(self._keyspace, self._columns)
        *_, snapshot = await self._runner.run([*calls, changes])
        snapshot = snapshot or await self._runner.one(reservations.loads(self._keyspace))
        del self._left[: len(left)]
        for pending in named:
            pending.name_at_s = now_s + NAME_S
        if renews:
            self._renewed_s = now_s
        view = await self._fleet.view(snapshot)
        self._retry_after_s = view.shortest_queue_s
        self._pause_s = PAUSE_PER_WORKER_S * len(view.infos)
        openings = view.openings(self.max_queue_s(view))
        if not openings:
            return []
        return await self._first(turns_at_once(openings, len(view.infos)))

    async def _first(self, openings: int) -> list[Pending]:
        """Returns our requests among the first `openings` in the queue."""
        due = []
        for flow, name in await self._runner.one(
            waiting.turns(self._keyspace, self._name, openings)
        ):
            pending = self._queue.get(flow, name)
            if pending is None:
                # It left meanwhile, or somebody put it there: the queue is told in the next step.
                self._left.append((flow, name, False))
            elif not pending.deciding:
                due.append(pending)
        return due

    def _without_redis(self) -> list[Pending]:
        """Returns all that wait: they are decided as others are then; those that must still wait
        stay in the queue."""
        if not self._queue:
            # Nobody renews these tickets, so they become void by themselves.
            self._left.clear()
        return [pending for pending in self._queue if not pending.deciding]

    def _refuse_late(self) -> None:
        oldest_s = time.perf_counter() - self._timeout_s
        for pending in self._queue:
            if pending.since_s <= oldest_s and not pending.deciding:
                late = f"no worker had room within {self._timeout_s:g} s"
                error: Exception = AllWorkersBusy(late, self._retry_after_s)
                if self._fleet.sleeps:
                    error = NoWorkers(f"no worker has started within {self._timeout_s:g} s")
                self._end(pending, "timed_out", error)

    def _end(self, pending: Pending, outcome: str, error: Exception) -> None:
        if not pending.answer.done():
            pending.outcome = outcome
            pending.fail(error)

    def _leave(self, pending: Pending) -> None:
        answer, ticket = pending.answer, pending.ticket
        assert ticket is not None
        had_turn = not answer.cancelled() and answer.exception() is None
        ended = "routed" if had_turn else "gone" if answer.cancelled() else "failed"
        self._queue.remove(pending)
        self._left.append((ticket.flow, ticket.name, had_turn))
        # The next in the queue may be waiting for this.
        self._wake.set()
        self._telemetry.waiting.set(len(self._queue))
        priority, outcome = pending.request.priority, pending.outcome or ended
        self._telemetry.waits.labels(pending.tenant, priority, outcome).inc()
        self._telemetry.waited_seconds.observe(time.perf_counter() - pending.since_s)
