"""One engine that was discovered, from its beginning to its end."""

from __future__ import annotations

import asyncio

from app.http.supervisor import supervised
from workers.bridge.follower import EngineFollower
from workers.discovery.engine import Engine
from workers.tasks import FAILURES


class Following:
    """`run`, until one of the others says that it ends."""

    def __init__(self, engine: Engine, follower: EngineFollower) -> None:
        self.engine, self.follower = engine, follower
        self.is_ending = False
        self._leaves, self._ends = asyncio.Event(), asyncio.Event()
        self._is_kept = False

    def leave(self) -> None:
        """It gets no more requests; end once it has none left, or after drain_s."""
        self.is_ending = True
        self._leaves.set()

    def drop(self) -> None:
        """It is gone: end at once."""
        self.is_ending = True
        self._ends.set()

    def hand_over(self) -> None:
        """Another process is its agent from now on: end, and leave it in service."""
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
