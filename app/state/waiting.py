"""Queue in which requests of all replicas wait until a worker can take them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from app.core.keys import Keyspace
from app.state.client import RedisClient
from app.state.connect import deadline
from app.state.reading import STEP_TIMEOUT_S, readable
from app.state.scripts import Call, call

CHARGE_UNIT = 16
"""Charge of one token in a flow with weight 1: charges are whole numbers."""
MAX_CHARGE = 10**12
MAX_TICKETS = 2000
MAX_PICKY = 64
"""Requests with a turn at once that not every worker could take, at most."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request's place in the queue. flow: the longest wait is first in it; charges decide between
    flows. name: unique. since_ms: by the Redis clock."""

    flow: str
    name: str
    since_ms: int


def ticket(
    flow: str, replica: str, number: int, *, tokens: int, weight: float, picky: bool, since_ms: int
) -> Ticket:
    """Returns a replica's `number`-th ticket, for a turn worth `tokens` in a flow of that weight.
    picky: whether some workers could not take the request."""
    charge = min(max(1, round(CHARGE_UNIT * tokens / weight)), MAX_CHARGE)
    # Redis orders tickets of the same millisecond by their names.
    name = f"{replica}-{number:09} {charge} {'x' if picky else '-'}"
    return Ticket(flow, name, since_ms)


def wait(
    keyspace: Keyspace, replica: str, tickets: Iterable[Ticket], *, ttl_ms: int, kept_ms: int
) -> Call[int]:
    """Waits, or goes on waiting; returns how many of `tickets` did not wait before. ttl_ms: how
    long all tickets of the replica wait without another call. kept_ms: how long these do without
    one that names them; longer. Redis takes 25 µs per flow and half of one per ticket."""

    def place(one: Ticket) -> tuple[str, str]:
        return one.flow, one.name[-1]

    fields: list[str | int] = []
    for (flow, _), some in groupby(sorted(tickets, key=place), key=place):
        waiting = list(some)
        # As many as a script can hand to a command.
        for at in range(0, len(waiting), MAX_TICKETS):
            part = waiting[at : at + MAX_TICKETS]
            fields += [flow, len(part), *(f for t in part for f in (t.since_ms, t.name))]
    return call("wait", keyspace, replica, ttl_ms, kept_ms, *fields, parse=int)


def turns(
    keyspace: Keyspace, replica: str, limit: int, max_picky: int = MAX_PICKY
) -> Call[list[tuple[str, str]]]:
    """Returns flow and name of the replica's tickets among the first `limit` of all, in their
    order. Picky ones, at most the first `max_picky`, come on top so that they hold up nobody."""

    def parse(reply: list[Any]) -> list[tuple[str, str]]:
        # Anybody may have written to Redis.
        texts = [text.decode(errors="replace") for text in reply]
        return list(zip(texts[::2], texts[1::2], strict=True))

    return call("turns", keyspace, replica, limit, max_picky, parse=parse)


def leave(keyspace: Keyspace, left: Iterable[tuple[str, str, bool]]) -> Call[None]:
    """Stops waiting. left: flow and name of each ticket, and whether it had its turn."""
    fields = [field for flow, name, had_turn in left for field in (flow, name, int(had_turn))]
    return call("leave", keyspace, *fields, parse=lambda _: None)


@dataclass(frozen=True, slots=True)
class Flow:
    """Requests of one tenant and priority that wait for a worker. oldest_s: the longest wait."""

    tenant: str
    priority: str
    requests: int
    oldest_s: float


async def flows(redis: RedisClient, keyspace: Keyspace) -> list[Flow]:
    """Returns flows in the order in which their first requests get a turn. Raises
    RedisUnavailable."""
    node = redis.node_of(keyspace["flows"]).client
    async with deadline(STEP_TIMEOUT_S):
        seconds, micros = await node.time()
        members: Any = await node.zrange(keyspace["flows"], 0, -1)
        names = [readable(flow) for flow in members]
        async with node.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.zrange(keyspace[f"waiting:{name}"], 0, -1, withscores=True)
                pipe.zrange(keyspace[f"picky:{name}"], 0, -1, withscores=True)
            queues = await pipe.execute()
    now_ms = seconds * 1000 + micros // 1000
    waiting = []
    for name, easy, picky in zip(names, queues[::2], queues[1::2], strict=True):
        if tickets := easy + picky:
            priority, _, tenant = name.partition(":")
            oldest_s = max(0.0, (now_ms - min(since_ms for _, since_ms in tickets)) / 1000)
            waiting.append(Flow(tenant, priority, len(tickets), oldest_s))
    return waiting
