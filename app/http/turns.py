"""Waiting for one of a few places, in turn with other callers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from app.core.errors import Crowded
from app.core.places import Places


class Turns:
    """Places for callers. num: places. max_calls: calls at once, waiting or with a place."""

    def __init__(self, num: int, max_calls: int) -> None:
        self._places: Places[asyncio.Future[None]] = Places(num, max_calls)

    @asynccontextmanager
    async def place(self, holder: str) -> AsyncIterator[None]:
        """Waits for a place, and holds it within. Raises Crowded if too many wait, and this holder
        more than others."""
        turn = asyncio.get_running_loop().create_future()
        for gone in self._places.enter(holder, turn):
            gone.set_exception(Crowded("too many are waiting for the same already"))
        self._begin()
        try:
            await turn
        except BaseException:
            # Cancelled just when its turn came?
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._leave(holder)
            else:
                self._places.withdraw(holder, turn)
            raise
        try:
            yield
        finally:
            self._leave(holder)

    def _leave(self, holder: str) -> None:
        self._places.leave(holder)
        self._begin()

    def _begin(self) -> None:
        while (turn := self._places.next()) is not None:
            turn.set_result(None)
