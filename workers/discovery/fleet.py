"""Agent of all engines that a source tells of: it follows each for as long as that is there.

One answer may lack engines that are there: a name server may give some of the addresses, a file be
half written, and a server of Kubernetes that was just started know of no pods yet.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from app.core.errors import RedisUnavailable, cut
from app.core.keys import Keyspace
from app.core.limits import MAX_ENGINES, MAX_NAME
from app.core.settings.agent import EngineAgentSettings
from app.http.supervisor import attempted, supervised
from app.state import leases
from app.state.leases import claim
from app.state.scripts import ScriptRunner
from workers.bridge.follower import EngineFollower
from workers.discovery.engine import Absences, DiscoveredEngine, Engines, Members, Tell
from workers.tasks import FAILURES

log = logging.getLogger(__name__)

RENEWALS = 3
STALE_S = 90.0
"""Age of what a source told at which it is a finding: a dead watch is noticed after 70 s."""
STALE = (
    f"for over {STALE_S:g} s an agent was not told which engines there are: does the name server, "
    "Kubernetes or the file fail? Its log says how; engines stay"
)


class EngineClaims:
    """Leases in Redis on the engines that this process is the agent of: `renew` often, then
    `leave`.

    source: processes with the same one share its engines. keys: of the engines of which this is the
    agent. free: of those that have none, though they are ready, as this process has as many as it
    takes.
    """

    def __init__(
        self, runner: ScriptRunner, keyspace: Keyspace, source: str, lease_s: float
    ) -> None:
        self.keys: frozenset[str] = frozenset()
        self.free: frozenset[str] = frozenset()
        self.lease_s = lease_s
        self._runner, self._keyspace, self._source = runner, keyspace, source
        self._holder = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"

    async def renew(self, engines: Engines) -> None:
        """Renews the claims. While Redis is away, all stays as it was."""
        try:
            self.keys, free = await self._claim(engines, round(self.lease_s * 1000))
            self.free = free if len(self.keys) >= MAX_ENGINES else frozenset()
        except RedisUnavailable as error:
            log.warning("engines not claimed: %s", error)

    async def leave(self, engines: Engines) -> None:
        """Gives the engines up: others become their agents at once."""
        try:
            await self._claim(engines, 0)
        except RedisUnavailable as error:
            log.warning("engines not given up, until the lease ends: %s", error)

    async def drain(self, workers: Collection[str]) -> None:
        """Has nothing routed to these workers from now on, though nobody is their agent."""
        try:
            keys = await self._runner.one(leases.in_service(self._keyspace))
            await self._runner.run(
                [leases.drain(self._keyspace, key) for key in keys if key.worker_id in workers]
            )
        except RedisUnavailable as error:
            log.warning("not drained: %s: %s", ", ".join(workers), error)

    async def _claim(self, engines: Engines, ttl_ms: int) -> tuple[frozenset[str], frozenset[str]]:
        ready = [key for key, engine in engines.items() if engine.ready and not engine.leaving]
        others = [key for key in engines if key not in ready]
        return await self._runner.one(
            claim(
                *(self._keyspace, self._source, self._holder, ready, others),
                ttl_ms=ttl_ms,
                room=MAX_ENGINES,
            )
        )


@dataclass(frozen=True, slots=True)
class FleetChange:
    """Keys of engines: to begin with; to take out of service; those that are gone; those of which
    another process is the agent from now on; to take out of service without an agent, as it ended
    before they began to leave."""

    begin: tuple[str, ...] = ()
    leave: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    hand_over: tuple[str, ...] = ()
    drain: tuple[str, ...] = ()


def plan(followed: Engines, engines: Engines, claimed: Collection[str]) -> FleetChange:
    """Returns what is to be done, so that those of `engines` that are claimed are followed instead
    of `followed`."""
    hand_over = [key for key in followed if key in engines and key not in claimed]
    drop, leave = [], []
    for key, engine in followed.items():
        now = engines.get(key)
        if now.ended if now else engine.is_replaced(engines.values()):
            drop.append(key)
        elif now is None or (key in claimed and (now.leaving or now.settings != engine.settings)):
            leave.append(key)
    names = {engine.settings.worker_id for engine in followed.values()}
    others = [
        key for key in engines if key in claimed and engines[key].settings.worker_id not in names
    ]
    begin = [key for key in others if not engines[key].leaving]
    staying = {engine.settings.worker_id for engine in engines.values() if not engine.leaving}
    drain = [
        key
        for key in others
        if engines[key].leaving and not engines[key].ended
        if engines[key].settings.worker_id not in staying
    ]
    return FleetChange(tuple(begin), tuple(leave), tuple(drop), tuple(hand_over), tuple(drain))


class EngineFleet:
    """Followers of all engines of a source: `run` until `stop` is called.

    source: tells of the engines until it is cancelled. gone_s: for so long answers lack an engine
    that is gone.
    """

    def __init__(
        self,
        source: Callable[[Tell], Awaitable[None]],
        claims: EngineClaims,
        begin: Callable[[EngineAgentSettings], EngineFollower],
        gone_s: float,
    ) -> None:
        self.engines: Engines | None = None
        self._heard_s = -math.inf
        self.claims = claims
        self._source, self._begin = source, begin
        self._wrong: tuple[str, ...] = ()
        self._absences = Absences(gone_s)
        self._followed: dict[str, Following] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._is_stopping = False

    @property
    def followers(self) -> Mapping[str, EngineFollower]:
        """Returns the followers by the key of the engine."""
        return {key: one.follower for key, one in self._followed.items()}

    def age_s(self) -> float:
        return asyncio.get_running_loop().time() - self._heard_s

    def findings(self) -> tuple[str, ...]:
        """Returns what is wrong with what the source tells, and how many engines have no agent."""
        found = [
            f"an engine is as it was, as what is told of it is wrong: {why}" for why in self._wrong
        ]
        if free := sorted(self.claims.free):
            few = f"{len(free)} of {len(self.engines or ())} engines have no agent"
            names = cut(", ".join(free))
            found.insert(
                0, f"{few}: start another with the same flags, as each takes {MAX_ENGINES}: {names}"
            )
        if self.age_s() > STALE_S:
            found.append(STALE)
        return tuple(cut(text, MAX_NAME) for text in found)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            listening = tasks.create_task(
                supervised("discovery", partial(self._source, self._tell), FAILURES)
            )
            while not self._is_stopping:
                self._changed.clear()
                if self.engines is not None:
                    engines = self._present(self.engines)
                    before = self.claims.free
                    await self.claims.renew(engines)
                    if self.claims.free - before:
                        log.error("%s", self.findings()[0])
                    await self._act(tasks, engines)
                with suppress(TimeoutError):
                    async with asyncio.timeout(self.claims.lease_s / RENEWALS):
                        await self._changed.wait()
            listening.cancel()

    async def stop(self) -> None:
        """Ends, and leaves the engines in service: routers look after them until an agent is
        back."""
        self._is_stopping = True
        for one in self._followed.values():
            one.hand_over()
        self._changed.set()
        if self._running:
            await asyncio.wait(list(self._running.values()))
        await self.claims.leave(self.engines or {})

    def _tell(self, members: Members) -> None:
        engines = dict(members.engines)
        self._wrong = tuple(members.wrong.values())
        self._heard_s = asyncio.get_running_loop().time()
        if not engines and self.engines != engines:
            log.warning("no engine is found; those that were stay")
        lacked = self._absences.lacking
        self._absences.note(engines, self._heard_s)
        if lacked != self._absences.lacking or engines != self.engines:
            self.engines = engines
            self._changed.set()

    def _present(self, told: Engines) -> Engines:
        for key, one in self._followed.items():
            if one.follower.is_away:
                self._absences.forget(key)
        return {**self._absences.lacking, **told}

    async def _act(self, tasks: asyncio.TaskGroup, engines: Engines) -> None:
        if self._is_stopping:
            return
        followed = {key: one.engine for key, one in self._followed.items()}
        todo = plan(followed, engines, self.claims.keys)
        for key in todo.hand_over:
            log.info("%s has another agent", followed[key].settings.worker_id)
            self._followed[key].hand_over()
        for key in todo.drop:
            self._followed[key].drop()
        for key in todo.leave:
            if not self._followed[key].is_ending:
                log.info("%s leaves", followed[key].settings.worker_id)
                self._followed[key].leave()
        for key in todo.begin:
            # Whatever is wrong with one, the others go on.
            await attempted("engine", partial(self._join, tasks, key, engines[key]), FAILURES)
        if todo.drain:
            await self.claims.drain({engines[key].settings.worker_id for key in todo.drain})

    async def _join(self, tasks: asyncio.TaskGroup, key: str, engine: DiscoveredEngine) -> None:
        log.info("%s at %s joins", engine.settings.worker_id, engine.settings.engine_url)
        follower = self._begin(engine.settings)
        follower.findings = self.findings
        self._followed[key] = Following(engine, follower)
        self._running[key] = tasks.create_task(self._follow(key))

    async def _follow(self, key: str) -> None:
        try:
            await attempted("engine", self._followed[key].run, FAILURES)
        finally:
            del self._followed[key], self._running[key]
            self._changed.set()


class Following:
    """Task of one follower: `run`, until one of the other methods says that it ends."""

    def __init__(self, engine: DiscoveredEngine, follower: EngineFollower) -> None:
        self.engine, self.follower = engine, follower
        self.is_ending = False
        self._leaves, self._ends = asyncio.Event(), asyncio.Event()
        self._is_kept = False

    def leave(self) -> None:
        """Has the engine get no more requests; ends once it has none left, or after drain_s."""
        self.is_ending = True
        self._leaves.set()

    def drop(self) -> None:
        """Ends at once: the engine is gone."""
        self.is_ending = True
        self._ends.set()

    def hand_over(self) -> None:
        """Ends, and leaves the engine in service: another process is its agent from now on."""
        self._is_kept = True
        self.drop()

    async def run(self) -> None:
        running = asyncio.create_task(supervised("engine", self.follower.run, FAILURES))
        ending = [asyncio.create_task(self._drained()), asyncio.create_task(self._ends.wait())]
        try:
            await asyncio.wait(ending, return_when=asyncio.FIRST_COMPLETED)
            if self._is_kept:
                await self.follower.stop()
        finally:
            for task in (*ending, running):
                task.cancel()
            await asyncio.wait([*ending, running])

    async def _drained(self) -> None:
        await self._leaves.wait()
        await self.follower.drain(self.engine.settings.drain_s)
