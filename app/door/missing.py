"""Ends the wait for workers that are gone without a word: nobody renews their lease, and they do
not answer, although their connections are open."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from app.core.worker_report import WorkerInfo
from app.door.lifecycle import Lifecycle
from app.door.upstream import Upstream, UpstreamBroken, UpstreamError

LOOK_EVERY_S = 0.5
PROBE_S = 2.0


@dataclass(frozen=True, slots=True, eq=False)
class _Wait:
    """Of a request, for a worker."""

    life: Lifecycle
    worker: WorkerInfo
    timeout: asyncio.Timeout

    @property
    def is_vain(self) -> bool:
        return self.life.is_missing(self.worker)


class Missing:
    """Looks after requests that wait for a worker, while `run` runs."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._waiting: set[_Wait] = set()

    @asynccontextmanager
    async def waiting(self, life: Lifecycle, worker: WorkerInfo) -> AsyncIterator[None]:
        """Within it, a request waits for that worker. Raises UpstreamBroken once it is gone."""
        try:
            async with asyncio.timeout(None) as timeout:
                wait = _Wait(life, worker, timeout)
                self._waiting.add(wait)
                try:
                    yield
                finally:
                    self._waiting.remove(wait)
        except TimeoutError:
            raise UpstreamBroken("is gone: its lease has run out, and it does not answer") from None

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            by_address: defaultdict[str, list[_Wait]] = defaultdict(list)
            for wait in self._waiting:
                if wait.is_vain:
                    by_address[wait.worker.address].append(wait)
            await asyncio.gather(*(self._look_at(*missing) for missing in by_address.items()))

    async def _look_at(self, address: str, waits: list[_Wait]) -> None:
        try:
            answer = await self._upstream.send(
                address, "/health", (), b"", method=b"GET", connect_s=PROBE_S, answer_s=PROBE_S
            )
        except UpstreamError:
            for wait in waits:
                if wait in self._waiting and wait.is_vain:
                    wait.timeout.reschedule(0.0)
        else:
            answer.abort()  # whatever it says, it is there
