"""The requests that wait at one replica, and who makes room when there are too many."""

from __future__ import annotations

from collections.abc import Iterator

from app.core.places import Shares
from app.router.pending import QueuePlace

_Place = tuple[str, str]
"""A holder, and one of its flows."""


class WaitQueue:
    """The requests that wait at one replica, never more than `capacity`.

    When it is full, the holder with most requests for their weights makes room: of its flows, the
    one with the most for its weight loses its latest one. So neither a caller that floods a
    replica, however many tenants it names, nor one of several flows takes places from others.
    """

    def __init__(self, capacity: int) -> None:
        self._shares = Shares(capacity)
        self._flows: dict[_Place, dict[str, QueuePlace]] = {}
        self._by_name: dict[str, QueuePlace] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[QueuePlace]:
        yield from list(self._by_name.values())

    def get(self, flow: str, name: str) -> QueuePlace | None:
        """The request with this ticket, if it is here."""
        queued = self._by_name.get(name)
        return queued if queued is not None and queued.ticket.flow == flow else None

    def enter(self, queued: QueuePlace) -> QueuePlace | None:
        """Add a request. Returns the one that had to make room for it, which may be itself."""
        place = _place_of(queued)
        self._flows.setdefault(place, {})[queued.ticket.name] = queued
        self._by_name[queued.ticket.name] = queued
        self._shares.take(queued.holder, 1 / queued.weight)
        if len(self) <= self._shares.capacity:
            return None
        greediest = self._shares.greediest(queued.holder)
        most = max(
            (each for each in self._flows if each[0] == greediest),
            key=lambda each: (_crowding(self._flows[each]), each == place),
        )
        gone = self._flows[most][next(reversed(self._flows[most]))]
        self.remove(gone)
        return gone

    def remove(self, queued: QueuePlace) -> None:
        """Remove a request; harmless if it is not here."""
        place, name = _place_of(queued), queued.ticket.name
        if self._by_name.get(name) is not queued:
            return
        del self._by_name[name], self._flows[place][name]
        self._shares.give_back(queued.holder, 1 / queued.weight)
        if not self._flows[place]:
            del self._flows[place]


def _place_of(queued: QueuePlace) -> _Place:
    return queued.holder, queued.ticket.flow


def _crowding(requests: dict[str, QueuePlace]) -> float:
    return len(requests) / next(iter(requests.values())).weight
