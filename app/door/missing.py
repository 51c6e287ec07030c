"""Ends the wait for workers that are gone without a word: nobody renews their lease, and they do
not answer, although their connections are open."""

from __future__ import annotations

import asyncio
from collections import defaultdict

from app.core.worker_report import WorkerInfo
from app.door.connection import UpstreamBroken, UpstreamError
from app.door.lifecycle import Lifecycle
from app.door.upstream import Upstream
from app.door.waits import Wait

LOOK_EVERY_S = 0.5
PROBE_S = 2.0


class _Wait(Wait):
    """Of a request, for a worker."""

    __slots__ = ("_life", "worker")

    def __init__(self, life: Lifecycle, worker: WorkerInfo, open_waits: set[_Wait]) -> None:
        super().__init__(open_waits, _is_gone)
        self.worker = worker
        self._life = life

    @property
    def is_vain(self) -> bool:
        return self._life.is_missing(self.worker)


def _is_gone() -> UpstreamBroken:
    return UpstreamBroken("is gone: its lease has run out, and it does not answer", cause="gone")


class MissingWorkers:
    """Looks after requests that wait for a worker, while `run` runs."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._waiting: set[_Wait] = set()

    def waiting(self, life: Lifecycle, worker: WorkerInfo) -> _Wait:
        """Within it, a request waits for that worker. Raises UpstreamBroken once it is gone."""
        return _Wait(life, worker, self._waiting)

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
                    wait.end()
        else:
            answer.abort()  # whatever it says, it is there
