"""Figures that workers measure, as a router reads them from the metrics stream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import replace

from redis.asyncio import Redis

from app.core import registration
from app.core.errors import RedisUnavailable
from app.core.keys import METRICS_INTERVAL_S, Keyspace, metrics_interval_s
from app.core.types import Incarnation
from app.core.worker_report import Speed
from app.policy.view import View
from app.policy.workers import UNMEASURED, Measurement
from app.state.streams import id_ms, pages_backwards

log = logging.getLogger(__name__)

PAGE = 512
"""Entries of the metrics stream read at a time, in some 20 ms: two of each of 256 workers."""
MAX_AHEAD_S = 60.0
"""Seconds that an entry of the metrics stream may be ahead of the Redis clock."""


class Measurements:
    """Latest measurement of each incarnation.

    now_ms: the Redis clock; None: unknown. view: the last one of the workers.
    """

    def __init__(
        self,
        redis: Redis,
        keyspace: Keyspace,
        timeout_s: float,
        now_ms: Callable[[], int | None],
        view: Callable[[], View | None],
    ) -> None:
        self.unshown: dict[Incarnation, Measurement] = {}
        """Measurements that no view shows yet."""
        self._redis = redis
        self._keyspace = keyspace
        self._timeout_s = timeout_s
        self._now_ms = now_ms
        self._view = view
        self._measured: dict[Incarnation, Measurement] = {}
        self._taught: dict[Incarnation, Speed] = {}
        """Speeds of workers whose agents cannot learn them."""
        self._newest_ms: int | None = None

    def of(self, incarnation: Incarnation) -> Measurement:
        return self._measured.get(incarnation, UNMEASURED)

    def teach(self, incarnation: Incarnation, speed: Speed) -> None:
        """Set how fast a worker is, whatever it reports."""
        self._taught[incarnation] = speed
        measured = replace(self.of(incarnation), speed=speed)
        self._measured[incarnation] = self.unshown[incarnation] = measured

    def forget(self, incarnation: Incarnation) -> None:
        self._measured.pop(incarnation, None)

    def forget_except(self, live: Collection[Incarnation]) -> None:
        self._measured = {inc: m for inc, m in self._measured.items() if inc in live}
        self._taught = {inc: speed for inc, speed in self._taught.items() if inc in live}

    @property
    def age_s(self) -> float:
        """Age of the newest entry that was read; 0 before any."""
        now_ms = self._now_ms()
        if now_ms is None or self._newest_ms is None:
            return 0.0
        return max(0.0, (now_ms - self._newest_ms) / 1000)

    async def follow(self, every: int = 1) -> None:
        """Keep the latest entry of each incarnation in the metrics stream, until cancelled.

        every: of so many entries of a worker, one is read: an entry costs a router 40 µs, and Redis
        4 µs. As long as a live worker has none yet, all are.
        """
        position: bytes | None = None
        while True:
            try:
                position = await self.poll(position)
            except RedisUnavailable as error:
                # A restarted server may count its ids from an earlier clock: start over.
                position = None
                log.debug("metrics not read: %s", error)
            await asyncio.sleep(self._pause_s(every))

    def _pause_s(self, every: int) -> float:
        view = self._view()
        live, away = (view.incarnations, view.away) if view is not None else ([], {})
        if every == 1 or any(inc not in self._measured and inc not in away for inc in live):
            return METRICS_INTERVAL_S
        return every * metrics_interval_s(len(live))

    async def poll(self, position: bytes | None) -> bytes | None:
        """Take the newest entry of each worker after `position`; returns the newest of all.

        Goes back until a page shows no other worker. The whole stream would take Redis and us
        longer than a decision may wait.
        """
        newest = position
        taken: set[bytes | None] = set()
        oldest = f"({position.decode()}" if position else "-"
        async for page in pages_backwards(
            *(self._redis, self._keyspace["metrics"], PAGE),
            oldest=oldest,
            timeout_s=self._timeout_s,
        ):
            num_taken = len(taken)
            if page and newest is position:
                newest = page[0][0]
            for entry_id, fields in page:
                incarnation = fields.get(b"incarnation")
                if incarnation not in taken and self._take(id_ms(entry_id), fields):
                    taken.add(incarnation)
            if len(taken) == num_taken:
                break
        if newest is None:
            return None
        self._newest_ms = id_ms(newest)
        now_ms = self._now_ms()
        if now_ms is not None and self._newest_ms - now_ms > MAX_AHEAD_S * 1000:
            # Somebody wrote it by hand: later entries may be dated from now, and so come before it.
            return None
        return newest

    def _take(self, at_ms: int, fields: dict[bytes, bytes]) -> bool:
        """Keep what an entry says; returns False if it makes no sense."""
        try:
            incarnation = Incarnation(int(fields[b"incarnation"]))
            measured = Measurement(*registration.decode_metrics(fields), at_ms)
        except (KeyError, ValueError) as error:
            worker = fields.get(b"worker", b"").decode(errors="replace")
            log.warning("ignoring a metrics entry of %s: %s", worker, error)
            return False
        if incarnation in self._taught:
            measured = replace(measured, speed=self._taught[incarnation])
        self._measured[incarnation] = self.unshown[incarnation] = measured
        return True
