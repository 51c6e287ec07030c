"""Work of routers besides decisions: expire, retire, release, sweep and prune.

Every replica does a little of it, so it does not matter which of them are alive.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from contextlib import suppress
from itertools import islice
from typing import Any

from app.core.errors import KvrouteError, NamespaceMissing, RedisUnavailable, WrongVersion
from app.core.types import Incarnation
from app.http.supervisor import supervised
from app.router.history import History
from app.router.replica import Replica
from app.state import index, leases, planner, predictions, reading, reservations
from app.state.columns import Columns
from app.state.connect import memory_of
from app.state.reservations import Release
from app.state.scripts import Call

log = logging.getLogger(__name__)

MAINTENANCE_INTERVAL_S = 0.25
RETIRE_GRACE_MS = 5000
"""Workers that Redis has not heard from for this long after their lease are gone for good, with
their requests and blocks. Until then they are just not routed to."""
SWEEP_BUCKETS = 32
"""A step of the sweep then takes Redis about a millisecond."""
SWEEP_PAUSE_S = 0.005
SWEEP_PAUSE_MS, SWEEP_IDLE_MS = 4, 200
"""Steps of all routers are this far apart, with and without something to sweep, so that more
routers cost Redis no more. Both are a little less than the pauses that one router makes."""
FILL_INTERVAL_S = 10.0
POLICY_INTERVAL_S, POLICY_TIMEOUT_S = 10.0, 2.0
PLANNER_INTERVAL_S = 1.0
PRUNE_BUCKETS = 64
"""Each of 8,192 buckets is then searched every 32 s, or more often if that is too slow for the
lifetime of predictions."""
UNPREDICTED_INTERVAL_S = 2.0
"""Pause while no predictions are kept: some may be left from when an agent was away."""
SCRUB_INTERVAL_MS = 300_000
"""Entries that no death explains are looked for this often: 8 µs of Redis's time per bucket."""
EXPIRE_LIMIT = 64
MAX_REPORTS = 4096


class Maintenance:
    """Expires reservations, retires lapsed leases, sweeps up after the dead, while `run` runs."""

    def __init__(self, replica: Replica, history: History) -> None:
        self._runner = replica.runner
        self._keyspace = replica.keyspace
        self._fleet = replica.fleet
        self._telemetry = replica.telemetry
        self._history = history
        self._columns = Columns()
        # Beyond the limit, the oldest are left to expire.
        self._reports: deque[Call[list[str | None]]] = deque(maxlen=MAX_REPORTS)
        self.danger_of_eviction = ""
        """Why the eviction policy of Redis is dangerous; "": it is not."""

    async def run(self) -> None:
        """Run until cancelled; what is to be told soon still is then."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for task, run in {
                    "workers": self._maintain_workers,
                    "index": self._maintain_index,
                    "fill": self._watch_fill,
                    "eviction_policy": self._watch_memory,
                    "planner": self._watch_planner,
                    "prune": self._prune,
                }.items():
                    tasks.create_task(supervised(task, run, self._telemetry.task_failures))
        finally:
            if self._reports:
                with suppress(RedisUnavailable):
                    await self._runner.run(list(self._reports))

    def release_soon(
        self, request_id: str, attempt: str = "", began_by_ms: int | None = None
    ) -> None:
        """Release soon what Redis may hold and nobody else will end; see `reservations.Release`."""
        release = Release(request_id, attempt, began_by_ms)
        self.tell_soon(reservations.release(self._keyspace, [release]))

    def tell_soon(self, report: Call[list[str | None]]) -> None:
        """Tell Redis of a first token or an end, which it could not be told of at once."""
        self._reports.append(report)

    async def _maintain_workers(self) -> None:
        expire = reservations.expire(self._keyspace, EXPIRE_LIMIT)
        heard_ms = 0
        # Redis may have been unreachable until now.
        settled_s = time.monotonic() + RETIRE_GRACE_MS / 1000
        while True:
            reports = list(islice(self._reports, EXPIRE_LIMIT))
            calls: list[Call[Any]] = [expire, *reports]
            # Nobody could renew a lease while Redis was unreachable.
            if not self._fleet.recovers and time.monotonic() >= settled_s:
                calls.append(leases.retire_lapsed(self._keyspace, RETIRE_GRACE_MS, heard_ms))
            # Whoever decides has usually looked since.
            looks = time.monotonic() - self._fleet.seen_s >= MAINTENANCE_INTERVAL_S
            if looks:
                calls.append(reservations.changes(self._keyspace, self._columns))
            pause = MAINTENANCE_INTERVAL_S
            try:
                if self._fleet.last_view is None:
                    # Nothing may be written in a namespace of another version.
                    await self._fleet.view(
                        await self._runner.one(reservations.loads(self._keyspace))
                    )
                expired, *others = await self._runner.run_each(calls)
                if isinstance(expired, RedisUnavailable):
                    raise expired  # Redis is down: all stays in order
                self._telemetry.reservations_of("expired").inc(expired)
                if self._settle(reports, others) and self._reports:
                    pause = 0.0
                for reply in others[len(reports) :]:
                    if isinstance(reply, KvrouteError):
                        raise reply
                if looks and others[-1] is not None:
                    await self._fleet.view(others[-1])
                heard_ms = self._fleet.last_view.now_ms if self._fleet.last_view else 0
            except (RedisUnavailable, NamespaceMissing, WrongVersion) as error:
                self._fleet.note(error)
                log.debug("maintenance: %s", error)
            if self._fleet.last_view is not None:
                view = self._fleet.last_view
                self._fleet.forget_except([*view.incarnations, *view.paused, *view.lapsed])
            await asyncio.sleep(pause)

    def _settle(
        self,
        reports: list[Call[list[str | None]]],
        replies: list[list[str | None] | RedisUnavailable],
    ) -> bool:
        """Take the first reports off the queue; those that failed go to its end, so that none holds
        up the rest. Returns whether Redis took any."""
        took = False
        for sent, reply in zip(reports, replies, strict=False):
            # It may have had to make room for a new one meanwhile.
            is_kept = self._reports[0] is sent
            if is_kept:
                self._reports.popleft()
            if isinstance(reply, RedisUnavailable):
                if is_kept:
                    self._reports.append(sent)
                continue
            took = True
            (attempt,) = reply
            if attempt is not None:
                is_end = sent.name == "release"
                (self._history.withdraw if is_end else self._history.confirm)(attempt)
                event = "released" if is_end else "prefill_complete"
                self._telemetry.reservations_of(event).inc()
        return took

    async def _watch_fill(self) -> None:
        rng = random.Random()
        while True:
            pause = MAINTENANCE_INTERVAL_S
            shards = self._fleet.shards
            if shards is not None:
                pause = FILL_INTERVAL_S
                with suppress(RedisUnavailable):
                    fill = await reading.fill(self._runner.redis, self._keyspace, shards, rng)
                    self._telemetry.index_fill.set(fill)
            await asyncio.sleep(pause)

    async def _watch_planner(self) -> None:
        """Learn whether a planner starts workers for requests that find none."""
        wakes_until = planner.wakes_until(self._keyspace)
        while True:
            with suppress(RedisUnavailable):
                self._fleet.wakes_until_ms = await self._runner.one(wakes_until)
            await asyncio.sleep(PLANNER_INTERVAL_S)

    async def _watch_memory(self) -> None:
        """Look again for an eviction policy that is refused at the start: it may change at any
        time."""
        while True:
            with suppress(RedisUnavailable):
                danger, fill = await memory_of(self._runner.redis, POLICY_TIMEOUT_S)
                if danger != self.danger_of_eviction:
                    log.warning("%s", danger or "Redis drops no keys any more when it is full")
                self.danger_of_eviction = danger
                self._telemetry.evicting.set(bool(danger))
                self._telemetry.memory_fill.set(fill)
            await asyncio.sleep(POLICY_INTERVAL_S)

    async def _prune(self) -> None:
        """Go through all predictions in steps, endlessly, and remove those that have expired."""
        settings = self._history.predictions
        while True:
            pause = MAINTENANCE_INTERVAL_S if self._history.predicts else UNPREDICTED_INTERVAL_S
            try:
                steps = await self._runner.run(
                    [
                        predictions.prune(self._keyspace.of_shard(shard), settings, PRUNE_BUCKETS)
                        for shard in range(self._fleet.shards or 0)
                    ]
                )
                for step in steps:
                    pause = min(pause, settings.prune_pause_s(step.buckets, PRUNE_BUCKETS))
            except RedisUnavailable as error:
                log.debug("prune: %s", error)
            await asyncio.sleep(pause)

    async def _maintain_index(self) -> None:
        """Sweep all shards in steps.

        A shard first names the incarnations that may write to it; only then is the namespace asked
        which of them have ended. They had registered before, so one that is unknown by then is gone
        for good.
        """
        lost: list[Incarnation] = []
        while True:
            pause = MAINTENANCE_INTERVAL_S
            try:
                steps = await self._runner.run(
                    [
                        index.sweep(
                            self._keyspace.of_shard(shard),
                            lost,
                            max_buckets=SWEEP_BUCKETS,
                            scrub_ms=SCRUB_INTERVAL_MS,
                            pause_ms=SWEEP_PAUSE_MS,
                            idle_ms=SWEEP_IDLE_MS,
                        )
                        for shard in range(self._fleet.shards or 0)
                    ]
                )
                writers = {inc for step in steps for inc in step.writers}
                calls = [leases.absent(self._keyspace, writers)] if writers else []
                lost = [inc for absent in await self._runner.run(calls) for inc in absent]
                if any(step.buckets_left for step in steps):
                    pause = SWEEP_PAUSE_S
            except RedisUnavailable as error:
                # It may come back empty, and give out the same numbers again.
                lost = []
                log.debug("sweep: %s", error)
            await asyncio.sleep(pause)
