"""The namespaces that a replica serves, as the directory of models says, and a Router for each."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, compress
from types import MappingProxyType

from app.core.errors import RedisUnavailable
from app.http.supervisor import supervised
from app.router.router import Router
from app.state import models
from app.state.client import RedisClient
from app.state.scripts import ScriptRunner

log = logging.getLogger(__name__)

MAX_NAMESPACES = 256
"""Namespaces served at most, as each polls Redis."""
DIRECTORY_INTERVAL_S = 2.0
LOOKED_AT = 1000
"""New namespaces that are looked at each time."""
KEPT_S = 60.0
"""Seconds that a claim is known which the directory has no more: Redis may have lost it, and
workers announce it again every ten seconds."""


class Routers:
    """Runs Routers while `run` runs. own: the one that there always is."""

    def __init__(
        self,
        namespace: str,
        connect: Callable[[], RedisClient],
        make: Callable[[str, RedisClient], Router],
        timeout_s: float,
    ) -> None:
        """connect: makes a client. All namespaces but one's own share one."""
        self.claims: models.Claims = {}
        self._lost_s: dict[tuple[str, str], float] = {}
        """Names, with namespaces that claim them no more as the directory says, and since when."""
        self._has_looked = self._has_asked = False
        self._timeout_s = timeout_s
        self._clients = (connect(), connect())
        self.own = make(namespace, self._clients[0])
        self._make = make
        self._routers = {namespace: self.own}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._tasks: asyncio.TaskGroup | None = None

    @property
    def by_namespace(self) -> Mapping[str, Router]:
        return MappingProxyType(self._routers)

    def runner(self, namespace: str) -> ScriptRunner | None:
        """Returns a runner for what is told there beside requests; None: it is not served, or not
        yet."""
        router = self._routers.get(namespace)
        if router is None or router.fleet.block_size is None:
            return None
        return ScriptRunner(router.redis, self._timeout_s)

    @property
    def has_looked(self) -> bool:
        """Whether Redis was asked once, since the start, for all models and workers."""
        if not self._has_looked and self._has_asked:
            routers = self._routers.values()
            self._has_looked = all(router.fleet.has_looked for router in routers)
        return self._has_looked

    async def run(self) -> None:
        """Run until cancelled."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                failures = self.own.telemetry.task_failures
                for client in self._clients:
                    self._tasks.create_task(supervised("redis", client.follow, failures))
                for namespace in self._routers:
                    self._start(namespace)
                follow = supervised("directory", self._follow_directory, failures)
                self._tasks.create_task(follow)
        finally:
            self._tasks = None
            for client in self._clients:
                await client.aclose()

    async def stop(self) -> None:
        """Let no request wait any longer: the replica is about to stop."""
        for router in self._routers.values():
            await router.stop()

    def serve(self, namespaces: Iterable[str]) -> None:
        """Serve these namespaces, besides one's own, as far as they are not too many; others no
        more, once nobody waits there and nothing is carried. Only while `run` runs."""
        announced = {self.own.namespace, *namespaces}
        for gone in self._routers.keys() - announced:
            if self._routers[gone].is_idle:
                log.info("namespace %s is not served any more: nobody announces it", gone)
                self._running.pop(gone).cancel()
                del self._routers[gone]
        for namespace in sorted(announced - self._routers.keys()):
            if len(self._routers) >= MAX_NAMESPACES:
                log.warning("namespace %s is not served: %d are", namespace, MAX_NAMESPACES)
                continue
            log.info("namespace %s is served as well", namespace)
            self._routers[namespace] = self._make(namespace, self._clients[1])
            self._start(namespace)

    async def _follow_directory(self) -> None:
        runner = ScriptRunner(self.own.redis, self._timeout_s)
        while True:
            try:
                self._note(await models.directory(runner.redis), time.monotonic())
                wanted, served = {*chain(*self.claims.values())}, self._routers.keys()
                # Anybody may write there: only those count in which there are workers.
                new = list(wanted - served)
                new = random.sample(new, min(LOOKED_AT, len(new)))
                exist = await runner.run([models.exists(namespace) for namespace in new])
                self.serve([*(wanted & served), *compress(new, exist)])
            except RedisUnavailable as error:
                log.debug("models not read: %s", error)
            self._has_asked = True
            await asyncio.sleep(DIRECTORY_INTERVAL_S)

    def _note(self, directory: models.Claims, now_s: float) -> None:
        """Keep what the directory says, and for a while what it no longer says."""
        now, before = _pairs(directory), _pairs(self.claims)
        lost = {pair: self._lost_s.get(pair, now_s) for pair in before if pair not in now}
        self._lost_s = {pair: at_s for pair, at_s in lost.items() if now_s - at_s < KEPT_S}
        claims = dict(directory)
        for name, namespace in self._lost_s:
            claims[name] = (*claims.get(name, ()), namespace)
        if claims != self.claims:
            self.claims = claims

    def _start(self, namespace: str) -> None:
        assert self._tasks is not None
        run = supervised("router", self._routers[namespace].run, self.own.telemetry.task_failures)
        self._running[namespace] = self._tasks.create_task(run)


def _pairs(claims: models.Claims) -> dict[tuple[str, str], None]:
    return {(name, holder): None for name, holders in claims.items() for holder in holders}
