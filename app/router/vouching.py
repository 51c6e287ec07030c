"""Vouching for workers whose agents are away: they stay in service while their engines answer.

An agent that is killed, frozen or cut off from Redis renews no lease; that says nothing of its
engine. So a replica looks at the engines of leases that are about to end, and vouches for those
that show a sign of life. The lease goes on in Redis, for all replicas, and with it loads,
reservations and the blocks that were published last. Each replica does so, and none is needed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from app.core.errors import RedisUnavailable
from app.core.types import Incarnation
from app.core.worker_report import WorkerInfo
from app.router.replica import Replica
from app.state import leases, models

log = logging.getLogger(__name__)

LOOK_S = 0.25
ENDING_MS = 1500
"""Engines are asked when so much is left of a lease: agents renew it when twice as much is, and
lua/vouch.lua waits for them until a second is left."""
SILENT_MS = 2500
"""Time after a lapse when engines are asked; lua/vouch.lua waits for half a second more."""
ASK_S = 0.5
"""Seconds between two questions to an engine, whatever has become of the last ones."""
MOST_ASKED = 12
"""Open questions to one engine: one that is late for seconds still answers every ASK_S."""
MOST_ASKED_TOGETHER = 512
FRESH_S = 1.0
"""Seconds for which a sign of life counts."""
ANNOUNCE_S = 10.0
"""Seconds between announcements of their models' names, as agents make them."""


@dataclass(frozen=True, slots=True)
class Signs:
    """Signs of engines' life. answers: whether one does when it is asked. heard_s: monotonic
    seconds when the last piece of an answer came from a base URL."""

    answers: Callable[[WorkerInfo], Awaitable[bool]]
    heard_s: Callable[[str], float]


@dataclass(slots=True)
class _Engine:
    """Questions to an engine: when it last answered and was asked, monotonic, and how many are
    open."""

    answered_s: float = float("-inf")
    asked_s: float = float("-inf")
    asked: int = 0


def may_be_silent(left_ms: float, *, is_out: bool) -> bool:
    """Whether an agent may renew no more that has so much left of its lease. is_out: its worker is
    out of
    service: then the lease has lapsed, and yet it is renewed every two seconds.
    """
    return left_ms <= (-SILENT_MS if is_out else ENDING_MS)


class Vouching:
    """Looks after workers of whose agents nothing is heard, while `run` runs."""

    def __init__(self, replica: Replica, signs: Signs) -> None:
        self._runner = replica.runner
        self._keyspace = replica.keyspace
        self._fleet = replica.fleet
        self._most_ms = round(replica.settings.agent_away_s * 1000)
        self._signs = signs
        self._engines: dict[Incarnation, _Engine] = {}
        self._has_answered = asyncio.Event()
        """Whether an engine has answered since the last look that had not for long."""
        self._announced_s = float("-inf")

    async def run(self) -> None:
        """Run until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while self._most_ms:
                try:
                    await self._look(tasks)
                except RedisUnavailable as error:
                    log.debug("no leases looked at: %s", error)
                self._has_answered.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._has_answered.wait()

    async def _look(self, tasks: asyncio.TaskGroup) -> None:
        now_ms = self._fleet.redis_now_ms
        if now_ms is None:
            return
        ending = await self._runner.one(leases.ending(self._keyspace, now_ms + ENDING_MS))
        view = self._fleet.last_view
        out = view.paused if view is not None else {}
        infos = [
            (inc, info)
            for inc, ends_ms in ending.items()
            if (info := self._fleet.info_of(inc))
            and (inc in self._fleet.away or may_be_silent(ends_ms - now_ms, is_out=inc in out))
        ]
        now_s = time.monotonic()
        self._ask(infos, now_s, tasks)
        living = [inc for inc, info in infos if now_s - self._sign_s(inc, info) <= FRESH_S]
        if living:
            call = leases.vouch(self._keyspace, living, most_ms=self._most_ms)
            self._log(living, await self._runner.one(call))
        if now_s - self._announced_s >= ANNOUNCE_S and self._fleet.away:
            self._announced_s = now_s
            away = (self._fleet.info_of(inc) for inc in self._fleet.away)
            names = {name for info in away if info for name in (*info.models, *info.adapters)}
            await self._runner.one(models.announce(self._keyspace.namespace, sorted(names)))

    def _sign_s(self, inc: Incarnation, info: WorkerInfo) -> float:
        """Returns monotonic seconds of the last sign."""
        return max(self._engines[inc].answered_s, self._signs.heard_s(info.address))

    def _ask(
        self,
        infos: Sequence[tuple[Incarnation, WorkerInfo]],
        now_s: float,
        tasks: asyncio.TaskGroup,
    ) -> None:
        known = self._engines
        ending = {inc for inc, _ in infos}
        self._engines = {i: one for i, one in known.items() if i in ending or one.asked}
        together = sum(one.asked for one in self._engines.values())
        for inc, info in infos:
            engine = self._engines.setdefault(inc, _Engine())
            is_due = now_s - engine.asked_s >= ASK_S and engine.asked < MOST_ASKED
            if is_due and together < MOST_ASKED_TOGETHER:
                together += 1
                engine.asked, engine.asked_s = engine.asked + 1, now_s
                tasks.create_task(self._ask_one(engine, info))

    async def _ask_one(self, engine: _Engine, info: WorkerInfo) -> None:
        try:
            if await self._signs.answers(info):
                if time.monotonic() - engine.answered_s > FRESH_S:
                    self._has_answered.set()
                engine.answered_s = time.monotonic()
        finally:
            engine.asked -= 1

    def _log(self, living: list[Incarnation], vouched: list[bool]) -> None:
        for inc, is_vouched in zip(living, vouched, strict=True):
            if is_vouched and inc not in self._fleet.away:
                log.warning(
                    "%s: its agent renews no lease, its engine answers: it stays in service",
                    self._fleet.name_of(inc),
                )
