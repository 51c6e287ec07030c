"""Requests under way in virtual time: the clock, the routers that decide them, the line in which
they wait, and what becomes of each."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import count

from app.core.settings.kinds import PRIORITY_SHARES
from app.policy.transfer import TransferKind
from app.simulation.books import Books
from app.simulation.steps import SimRequest

Act = Callable[[float], None]
"""An event, called with its time."""


class Agenda:
    """A clock that several fleets may share."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Act]] = []
        self._order = count()

    def at(self, when_s: float, act: Act) -> None:
        heapq.heappush(self._due, (when_s, next(self._order), act))

    def run(self, until_s: float = math.inf) -> None:
        """Let happen all that is due by `until_s`, which is the time afterwards."""
        while self._due and self._due[0][0] <= until_s:
            self.now_s, _, act = heapq.heappop(self._due)
            act(self.now_s)
        if until_s < math.inf:
            self.now_s = max(self.now_s, until_s)


class SimLoss(StrEnum):
    """Reasons why a request got no answer."""

    FULL = "full"
    NO_WORKERS = "no_workers"


@dataclass(frozen=True, slots=True)
class SimAnswer:
    """An answer, or why there is none.

    reason: of the loss, in words. worker: its place in the fleet; None: the request was lost.
    cached_tokens: those that neither the worker nor a source computed.
    """

    request: SimRequest
    arrival_s: float
    attempts: int
    loss: SimLoss | None = None
    reason: str = ""
    worker: int | None = None
    first_token_s: float | None = None
    end_s: float | None = None
    cached_tokens: int = 0
    output_tokens: int = 0
    kind: TransferKind = TransferKind.LOCAL


OnAnswer = Callable[[SimAnswer, float], None]


@dataclass(frozen=True, slots=True)
class Decided:
    """A request that went to the worker at `worker`. best_blocks: leading blocks of its prompt on
    the worker that held most of them."""

    request: SimRequest
    at_s: float
    worker: int
    best_blocks: int


@dataclass(slots=True, eq=False)
class Supply:
    """KV of a request that another worker computes or holds. name: of the request there.
    cached_tokens: of a
    split: tokens that the source did not compute.
    """

    kind: TransferKind
    source: int
    name: str
    cached_tokens: int = 0


@dataclass(slots=True, eq=False)
class Flight:
    """A request under way.

    has_turn: whether it has waited in line, and is to go on. supply: None: its worker computes the
    prompt.
    """

    request: SimRequest
    then: OnAnswer
    arrival_s: float
    replica: SimReplica
    worker: int = 0
    attempts: int = 0
    has_turn: bool = False
    first_token_s: float | None = None
    supply: Supply | None = None

    def lost(self, loss: SimLoss, reason: str) -> SimAnswer:
        return SimAnswer(self.request, self.arrival_s, self.attempts, loss, reason)


class SimReplica:
    """A router: its waiting requests, the number of its decisions, and the books that it decides
    from."""

    def __init__(self, books: list[Books]) -> None:
        self.books = books
        self.waiting: list[Flight] = []
        self.is_deciding = False
        self.decisions = 0


POLL_S = 0.02
_Flow = tuple[str, str]
"""Tenant and priority."""


class WaitingLine:
    """Requests that wait while no worker is open, by the rules of lua/turns.lua: self-clocked fair
    queueing between tenants and priorities. No worker is too small for any of them. A turn is
    charged the tokens of its prompt, whatever workers hold of them."""

    def __init__(self) -> None:
        self._flows: dict[_Flow, deque[Flight]] = {}
        self._tags: dict[_Flow, float] = {}
        self._tag = 0.0

    @property
    def is_waited_in(self) -> bool:
        return bool(self._flows)

    def add(self, flight: Flight) -> None:
        name = flight.request.tenant, flight.request.priority
        flow = self._flows.setdefault(name, deque())
        flow.append(flight)
        if len(flow) == 1:
            self._tag_first(name, self._tag)

    def turns(self, number: int) -> Iterator[Flight]:
        """Yields the next ones, of which there may be fewer."""
        for _ in range(number):
            if self._flows:
                yield self._next()

    def _next(self) -> Flight:
        name = min(self._tags, key=self._tags.__getitem__)
        flow = self._flows[name]
        flight = flow.popleft()
        flight.has_turn = True
        end = self._tags.pop(name)
        self._tag = max(self._tag, end - self._charge(name[1], flight) / 2)
        if flow:
            self._tag_first(name, end)
        else:
            del self._flows[name]
        return flight

    @staticmethod
    def _charge(priority: str, flight: Flight) -> float:
        return flight.request.prompt_tokens / PRIORITY_SHARES[priority]

    def _tag_first(self, name: _Flow, start: float) -> None:
        self._tags[name] = start + self._charge(name[1], self._flows[name][0])
