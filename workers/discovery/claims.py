"""Which of the engines of a source this process is the agent of, by a lease in Redis."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Collection

from app.core.errors import RedisUnavailable
from app.core.keys import Keyspace
from app.core.limits import MAX_ENGINES
from app.state import leases
from app.state.claims import claim
from app.state.scripts import ScriptRunner
from workers.discovery.engine import Engines

log = logging.getLogger(__name__)


class EngineClaims:
    """`renew` often, then `leave`. source: processes with the same one share its engines."""

    def __init__(
        self, runner: ScriptRunner, keyspace: Keyspace, source: str, lease_s: float
    ) -> None:
        self.keys: frozenset[str] = frozenset()
        """Of the engines of which it is the agent."""
        self.free: frozenset[str] = frozenset()
        """Of those that have none, though they are ready: this process has as many as it takes."""
        self.lease_s = lease_s
        self._runner, self._keyspace, self._source = runner, keyspace, source
        self._holder = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"

    async def renew(self, engines: Engines) -> None:
        """While Redis is away, all stays as it was."""
        try:
            self.keys, free = await self._claim(engines, round(self.lease_s * 1000))
            self.free = free if len(self.keys) >= MAX_ENGINES else frozenset()
        except RedisUnavailable as error:
            log.warning("engines not claimed: %s", error)

    async def leave(self, engines: Engines) -> None:
        """Others become the agents of these at once."""
        try:
            await self._claim(engines, 0)
        except RedisUnavailable as error:
            log.warning("engines not given up, until the lease ends: %s", error)

    async def drain(self, workers: Collection[str]) -> None:
        """Nothing is routed to these from now on, by their ids, though nobody is their agent."""
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
