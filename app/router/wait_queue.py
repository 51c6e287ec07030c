"""The requests that wait at one replica, and who makes room when there are too many."""

from __future__ import annotations

from collections.abc import Iterator

from app.router.pending import Queued


class WaitQueue:
    """The requests that wait at one replica, never more than `capacity`.

    When it is full, the flow with the most requests for its weight loses its latest one, so a flow
    that floods a replica takes no places from others.
    """

    def __init__(self, capacity: int) -> None:
        assert capacity > 0
        self._capacity = capacity
        self._flows: dict[str, dict[str, Queued]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Queued]:
        for requests in list(self._flows.values()):
            yield from list(requests.values())

    def get(self, flow: str, name: str) -> Queued | None:
        """The request with this ticket, if it is here."""
        return self._flows.get(flow, {}).get(name)

    def enter(self, queued: Queued) -> Queued | None:
        """Add a request. Returns the one that had to make room for it, which may be itself."""
        own = self._flows.setdefault(queued.ticket.flow, {})
        own[queued.ticket.name] = queued
        self._size += 1
        if self._size <= self._capacity:
            return None
        most = max(self._flows.values(), key=lambda flow: (_crowding(flow), flow is own))
        gone = most[next(reversed(most))]
        self.remove(gone)
        return gone

    def remove(self, queued: Queued) -> None:
        """Remove a request; harmless if it is not here."""
        flow, name = queued.ticket.flow, queued.ticket.name
        if self._flows.get(flow, {}).pop(name, None) is None:
            return
        self._size -= 1
        if not self._flows[flow]:
            del self._flows[flow]


def _crowding(requests: dict[str, Queued]) -> float:
    return len(requests) / next(iter(requests.values())).weight
