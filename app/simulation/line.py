"""Requests that wait in virtual time while no worker is open, by the rules of lua/turns.lua.

Self-clocked fair queueing between priorities: all are of one tenant, and no worker is too small for
any of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from app.core.settings.kinds import PRIORITY_SHARES
from app.simulation.flights import Flight

POLL_S = 0.02


class WaitingLine:
    """A turn is charged the tokens of its prompt, whatever workers hold of them."""

    def __init__(self) -> None:
        self._flows: dict[str, deque[Flight]] = {}
        self._tags: dict[str, float] = {}
        self._tag = 0.0
        """Of the last turn."""

    @property
    def is_waited_in(self) -> bool:
        return bool(self._flows)

    def add(self, flight: Flight) -> None:
        priority = flight.request.priority
        flow = self._flows.setdefault(priority, deque())
        flow.append(flight)
        if len(flow) == 1:
            self._tag_first(priority)

    def turns(self, number: int) -> Iterator[Flight]:
        """The next ones, of which there may be fewer."""
        for _ in range(number):
            if self._flows:
                yield self._next()

    def _next(self) -> Flight:
        priority = min(self._tags, key=self._tags.__getitem__)
        flow = self._flows[priority]
        flight = flow.popleft()
        flight.has_turn = True
        self._tag = self._tags.pop(priority)
        if flow:
            self._tag_first(priority)
        else:
            del self._flows[priority]
        return flight

    def _tag_first(self, priority: str) -> None:
        charge = self._flows[priority][0].request.prompt_tokens
        self._tags[priority] = self._tag + charge / PRIORITY_SHARES[priority]
