"""Where requests were routed, as all replicas know it: blocks to come, and sessions.

Written after decisions, never before their answers. What Redis does not accept is lost, which costs
a little overlap.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from app.core.config import RouterSettings
from app.core.errors import RedisUnavailable
from app.core.keys import Keyspace
from app.core.types import Incarnation, SequenceHash
from app.policy.decision import RouteRequest
from app.state import index, predictions, sessions
from app.state.scripts import Call, ScriptRunner

log = logging.getLogger(__name__)

MAX_UNWRITTEN = 1024
"""Beyond this many, the oldest are lost."""


class Routed:
    """Reads and writes predictions and sessions; nothing if the settings use neither."""

    def __init__(self, runner: ScriptRunner, keyspace: Keyspace, settings: RouterSettings) -> None:
        self.predictions = (
            predictions.PredictionSettings(settings.prediction_ttl_s, settings.prediction_entries)
            if settings.count_in_flight or not settings.kv_events
            else None
        )
        """None: not kept."""
        self._runner = runner
        self._keyspace = keyspace
        self._session_affinity = settings.session_affinity
        self._session_ttl_ms = round(settings.session_ttl_s * 1000)
        self._unwritten: deque[Call[int]] = deque(maxlen=MAX_UNWRITTEN)
        self._has_unwritten = asyncio.Event()

    def recall(self, asked: list[str]) -> list[Call[list[sessions.Visit | None]]]:
        """At most one call, which returns where each session last went; "" stands for none."""
        if not self._session_affinity or not any(asked):
            return []
        return [sessions.recall(self._keyspace, asked)]

    def session_at(self, visit: sessions.Visit | None, now_ms: int) -> Incarnation | None:
        """Where a session still is, if its last visit was not too long ago."""
        if visit is None or visit.at_ms <= now_ms - self._session_ttl_ms:
            return None
        return visit.incarnation

    def foresee(
        self, chains: list[list[SequenceHash]], shards: int
    ) -> list[Call[dict[Incarnation, int]]]:
        """No calls, or one for each chain: the leading blocks that workers will hold."""
        if self.predictions is None:
            return []
        return [
            predictions.predicted(self._shard_of(chain, shards), chain, self.predictions)
            for chain in chains
        ]

    def add(self, request: RouteRequest, incarnation: Incarnation, shards: int) -> None:
        """Record that the request was routed to `incarnation`."""
        if self.predictions is not None and request.chain:
            shard = self._shard_of(request.chain, shards)
            self._unwritten.append(
                predictions.predict(shard, incarnation, request.chain, self.predictions)
            )
            self._has_unwritten.set()
        if self._session_affinity and request.session:
            self._unwritten.append(
                sessions.remember(
                    self._keyspace, request.session, incarnation, self._session_ttl_ms
                )
            )
            self._has_unwritten.set()

    async def run(self) -> None:
        """Write what was added, until cancelled; all that is pending goes in one round trip."""
        while True:
            await self._has_unwritten.wait()
            self._has_unwritten.clear()
            calls = list(self._unwritten)
            self._unwritten.clear()
            try:
                await self._runner.run(calls)
            except RedisUnavailable as error:
                log.debug("%d predictions and sessions lost: %s", len(calls), error)

    def _shard_of(self, chain: list[SequenceHash], shards: int) -> Keyspace:
        return self._keyspace.of_shard(index.shard_of(chain[0], shards) if chain else 0)
