"""A Router for each namespace that a replica serves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from app.router.router import Router
from app.state.client import RedisClient

log = logging.getLogger(__name__)

MAX_NAMESPACES = 256
"""Each polls Redis."""


class Routers:
    """Runs Routers while `run` runs. own: the one that there always is."""

    def __init__(
        self,
        namespace: str,
        connect: Callable[[], RedisClient],
        make: Callable[[str, RedisClient], Router],
    ) -> None:
        """connect: makes a client. All namespaces but one's own share one."""
        self._clients = (connect(), connect())
        self.own = make(namespace, self._clients[0])
        self._make = make
        self._routers = {namespace: self.own}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._tasks: asyncio.TaskGroup | None = None

    @property
    def by_namespace(self) -> Mapping[str, Router]:
        return MappingProxyType(self._routers)

    async def run(self) -> None:
        """Run until cancelled."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                for client in self._clients:
                    self._tasks.create_task(client.follow())
                for namespace in self._routers:
                    self._start(namespace)
        finally:
            self._tasks = None
            for client in self._clients:
                await client.aclose()

    async def stop(self) -> None:
        """Let no request wait any longer: the replica is about to stop."""
        for router in self._routers.values():
            await router.stop()

    def serve(self, namespaces: Iterable[str]) -> None:
        """Serve these namespaces, besides one's own, as far as they are not too many; only while
        `run` runs."""
        announced = {self.own.namespace, *namespaces}
        for gone in self._routers.keys() - announced:
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

    def _start(self, namespace: str) -> None:
        assert self._tasks is not None
        self._running[namespace] = self._tasks.create_task(self._routers[namespace].run())
