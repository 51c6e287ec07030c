"""The requests that wait at one replica, and who makes room when there are too many."""

from __future__ import annotations

from collections.abc import Iterator

from app.router.pending import Waiter


class Room:
    """The waiters of one replica, never more than `capacity`.

    When it is full, the flow with the most waiters for its weight loses its latest one, so a flow
    that floods a replica takes no places from others.
    """

    def __init__(self, capacity: int) -> None:
        assert capacity > 0
        self._capacity = capacity
        self._flows: dict[str, dict[str, Waiter]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Waiter]:
        for waiters in list(self._flows.values()):
            yield from list(waiters.values())

    def get(self, flow: str, name: str) -> Waiter | None:
        """The waiter with this ticket, if it is here."""
        return self._flows.get(flow, {}).get(name)

    def enter(self, waiter: Waiter) -> Waiter | None:
        """Add a waiter. Returns the one that had to make room for it, which may be itself."""
        own = self._flows.setdefault(waiter.ticket.flow, {})
        own[waiter.ticket.name] = waiter
        self._size += 1
        if self._size <= self._capacity:
            return None
        most = max(self._flows.values(), key=lambda flow: (_crowding(flow), flow is own))
        gone = most[next(reversed(most))]
        self.remove(gone)
        return gone

    def remove(self, waiter: Waiter) -> None:
        """Remove a waiter; harmless if it is not here."""
        flow, name = waiter.ticket.flow, waiter.ticket.name
        if self._flows.get(flow, {}).pop(name, None) is None:
            return
        self._size -= 1
        if not self._flows[flow]:
            del self._flows[flow]


def _crowding(waiters: dict[str, Waiter]) -> float:
    return len(waiters) / next(iter(waiters.values())).weight
