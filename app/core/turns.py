"""The line in which requests of all replicas wait until a worker can take them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from app.core.keys import Keyspace
from app.core.scripts import Call, call

CHARGE_UNIT = 16
"""Charges are whole numbers; so many of them are a token of a flow that weighs 1."""
MAX_CHARGE = 10**12
MAX_TICKETS = 2000
MAX_PICKY = 64
"""Of requests that not every worker could take, no more have a turn at once."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request's place in line.

    flow: within one, who waits longest is first; between them, charges decide. name: unique.
    since_ms: of the Redis clock.
    """

    flow: str
    name: str
    since_ms: int


def ticket(
    flow: str, replica: str, number: int, *, tokens: int, weight: float, picky: bool, since_ms: int
) -> Ticket:
    """The `number`-th of a replica, for a turn worth `tokens` in a flow of that weight.

    picky: not every worker could take the request.
    """
    charge = min(max(1, round(CHARGE_UNIT * tokens / weight)), MAX_CHARGE)
    # Of the same millisecond, Redis has them in the order of their names.
    name = f"{replica}-{number:09} {charge} {'x' if picky else '-'}"
    return Ticket(flow, name, since_ms)


def wait(keyspace: Keyspace, replica: str, tickets: Iterable[Ticket], ttl_ms: int) -> Call[int]:
    """Wait, or go on waiting, for another `ttl_ms`; how many did not wait before.

    Redis takes half a microsecond a ticket.
    """

    def place(one: Ticket) -> tuple[str, str]:
        return one.flow, one.name[-1]

    fields: list[str | int] = []
    for (flow, _), some in groupby(sorted(tickets, key=place), key=place):
        waiting = list(some)
        # As many as a script can hand to a command.
        for at in range(0, len(waiting), MAX_TICKETS):
            part = waiting[at : at + MAX_TICKETS]
            fields += [flow, len(part), *(f for t in part for f in (t.since_ms, t.name))]
    return call("wait", keyspace, replica, ttl_ms, *fields, parse=int)


def turns(
    keyspace: Keyspace, replica: str, limit: int, max_picky: int = MAX_PICKY
) -> Call[list[tuple[str, str]]]:
    """Flow and name of the replica's tickets among the first `limit` of all, in their order.

    Picky ones come on top, as they shall hold up nobody: the first `max_picky` at most.
    """

    def parse(reply: list[Any]) -> list[tuple[str, str]]:
        texts = [text.decode() for text in reply]
        return list(zip(texts[::2], texts[1::2], strict=True))

    return call("turns", keyspace, replica, limit, max_picky, parse=parse)


def leave(keyspace: Keyspace, left: Iterable[tuple[str, str, bool]]) -> Call[None]:
    """Wait no more: flow and name of tickets, and whether each had its turn."""
    fields = [field for flow, name, had_turn in left for field in (flow, name, int(had_turn))]
    return call("leave", keyspace, *fields, parse=lambda _: None)
