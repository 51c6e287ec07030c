"""Requests under way in virtual time, the routers that decide them, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from app.policy.transfer import TransferKind
from app.simulation.books import Books
from app.simulation.steps import SimRequest


class Loss(StrEnum):
    """Why a request got no answer."""

    FULL = "full"
    """Every worker was full."""
    NO_WORKERS = "no_workers"
    CRASH = "crash"
    """Its worker crashed after the first token; before that, another one takes the request."""


@dataclass(frozen=True, slots=True)
class SimAnswer:
    """What became of a request. worker: its place in the fleet; None: it was lost."""

    request: SimRequest
    arrival_s: float
    attempts: int
    loss: Loss | None = None
    reason: str = ""
    """Of the loss, in words."""
    worker: int | None = None
    first_token_s: float | None = None
    end_s: float | None = None
    cached_tokens: int = 0
    """Those that neither it nor a source computed."""
    output_tokens: int = 0
    kind: TransferKind = TransferKind.LOCAL


Then = Callable[[SimAnswer, float], None]


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
    """KV of a request that another worker computes or holds for its own."""

    kind: TransferKind
    source: int
    name: str
    """Of the request there."""
    cached_tokens: int = 0
    """Of a split: what the source did not compute."""
    is_over: bool = False
    """Whether it has arrived, or never will."""


@dataclass(slots=True, eq=False)
class Flight:
    """A request under way, and when things happened to it."""

    request: SimRequest
    then: Then
    arrival_s: float
    replica: Replica
    worker: int = 0
    attempts: int = 0
    has_turn: bool = False
    """Whether it has waited in line, and is to go on."""
    first_token_s: float | None = None
    supply: Supply | None = None
    """None: its worker computes the prompt."""

    @property
    def needs(self) -> set[int]:
        """The workers without which it cannot go on."""
        supply = self.supply
        return {self.worker} if supply is None or supply.is_over else {self.worker, supply.source}

    def lost(self, loss: Loss, reason: str) -> SimAnswer:
        return SimAnswer(self.request, self.arrival_s, self.attempts, loss, reason)


class Replica:
    """A router: the requests that wait for it, how many it has decided, and the books that it
    decides from."""

    def __init__(self, books: list[Books]) -> None:
        self.books = books
        self.waiting: list[Flight] = []
        self.is_deciding = False
        self.decisions = 0
