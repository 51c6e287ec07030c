"""Ends the wait for workers that are gone without a word: nobody renews their lease, and they do
not answer, although their connections are open."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from app.door.lifecycle import Lifecycle
from app.door.upstream import Upstream, UpstreamBroken, UpstreamError

LOOK_EVERY_S = 0.5
PROBE_S = 2.0


class Missing:
    """Looks after requests that wait for their worker, while `run` runs."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._waiting: dict[Lifecycle, asyncio.Timeout] = {}

    @asynccontextmanager
    async def waiting(self, life: Lifecycle) -> AsyncIterator[None]:
        """Within it, the worker of `life` is waited for. Raises UpstreamBroken once it is gone."""
        try:
            async with asyncio.timeout(None) as wait:
                self._waiting[life] = wait
                try:
                    yield
                finally:
                    del self._waiting[life]
        except TimeoutError:
            raise UpstreamBroken("is gone: its lease has run out, and it does not answer") from None

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            by_address: defaultdict[str, list[Lifecycle]] = defaultdict(list)
            for life in self._waiting:
                if life.awaited is not None and life.worker_is_missing:
                    by_address[life.awaited.address].append(life)
            await asyncio.gather(*(self._look_at(*missing) for missing in by_address.items()))

    async def _look_at(self, address: str, lives: list[Lifecycle]) -> None:
        try:
            answer = await self._upstream.send(
                address, "/health", (), b"", method=b"GET", connect_s=PROBE_S, answer_s=PROBE_S
            )
        except UpstreamError:
            for life in lives:
                if life in self._waiting and life.worker_is_missing:
                    self._waiting[life].reschedule(0.0)
        else:
            answer.abort()  # whatever it says, it is there
