"""Requests on their way to a decision, and those of them that wait at one replica."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

from app.core.places import Shares
from app.policy.decision import Decision, Query
from app.state.waiting import Ticket


@dataclass(slots=True, eq=False)
class Pending(Query):
    """A request on its way to a decision, and its place in the queue once it has to wait.

    answer: cancelled once the caller is gone. for_any: whether the request only waits for a worker
    to exist. ticket: its place in the queue that all replicas share; None: it never had to wait.
    weight: of its flow. tenant: as labelled in metrics. since_s: when it began to wait, by
    time.perf_counter. name_at_s: when to name the ticket to Redis; 0: at once. deciding: whether
    its turn has come. outcome: how its wait ended, as labelled in metrics; "": not yet.
    """

    answer: asyncio.Future[Decision] = field(kw_only=True)
    for_any: bool = False
    ticket: Ticket | None = None
    weight: float = 1.0
    tenant: str = ""
    since_s: float = 0.0
    name_at_s: float = 0.0
    deciding: bool = False
    outcome: str = ""

    @property
    def decided(self) -> bool:
        """Whether the answer is a decision: it has neither failed nor lost its caller."""
        answer = self.answer
        return answer.done() and not answer.cancelled() and answer.exception() is None

    def note_wait(self, now_s: float) -> None:
        """Set how long it has waited by `now_s`, of time.perf_counter."""
        self.waited_ms = round(1000 * (now_s - self.since_s)) if self.ticket else 0

    def resolve(self, decision: Decision) -> None:
        """Answer, unless that was done or the caller is gone."""
        if not self.answer.done():
            self.answer.set_result(decision)

    def fail(self, error: Exception) -> None:
        """Answer with an error, unless that was done or the caller is gone."""
        if not self.answer.done():
            # Frames that the error came through hold this request, and it holds the error.
            self.answer.set_exception(error.with_traceback(None))


_Flow = tuple[str, str]
"""A holder, and the name of one of its flows."""


class WaitQueue:
    """The requests that wait at one replica, never more than `capacity`.

    When the queue is full, the holder with most requests for their weights makes room: of its
    flows, the one with the most for its weight loses its latest request. So a caller that floods a
    replica takes no places from others, however many tenants it names.
    """

    def __init__(self, capacity: int) -> None:
        self._shares = Shares(capacity)
        self._flows: dict[_Flow, dict[str, Pending]] = {}
        self._by_name: dict[str, Pending] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[Pending]:
        yield from list(self._by_name.values())

    def get(self, flow: str, name: str) -> Pending | None:
        """Returns the request with this ticket, if it waits here."""
        pending = self._by_name.get(name)
        return pending if pending is not None and _ticket_of(pending).flow == flow else None

    def enter(self, pending: Pending) -> Pending | None:
        """Add a request. Returns the one that had to make room for it, which may be itself."""
        flow, ticket = _flow_of(pending), _ticket_of(pending)
        self._flows.setdefault(flow, {})[ticket.name] = pending
        self._by_name[ticket.name] = pending
        self._shares.take(flow[0], 1 / pending.weight)
        if len(self) <= self._shares.capacity:
            return None
        greediest = self._shares.greediest(flow[0])
        most = max(
            (each for each in self._flows if each[0] == greediest),
            key=lambda each: (_crowding(self._flows[each]), each == flow),
        )
        gone = self._flows[most][next(reversed(self._flows[most]))]
        self.remove(gone)
        return gone

    def remove(self, pending: Pending) -> None:
        """Remove a request; harmless if it is not here."""
        flow, name = _flow_of(pending), _ticket_of(pending).name
        if self._by_name.get(name) is not pending:
            return
        del self._by_name[name], self._flows[flow][name]
        self._shares.give_back(flow[0], 1 / pending.weight)
        if not self._flows[flow]:
            del self._flows[flow]


def _ticket_of(pending: Pending) -> Ticket:
    assert pending.ticket is not None, "it does not wait"
    return pending.ticket


def _flow_of(pending: Pending) -> _Flow:
    return pending.request.holder, _ticket_of(pending).flow


def _crowding(requests: dict[str, Pending]) -> float:
    return len(requests) / next(iter(requests.values())).weight
