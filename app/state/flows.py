"""Who waits for a worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from app.core.keys import Keyspace
from app.state.client import RedisClient
from app.state.connect import deadline
from app.state.reading import STEP_TIMEOUT_S, readable


@dataclass(frozen=True, slots=True)
class Flow:
    """Requests of one tenant and priority that wait for a worker.

    oldest_s: how long the first one has waited.
    """

    tenant: str
    priority: str
    requests: int
    oldest_s: float


async def flows(redis: RedisClient, keyspace: Keyspace) -> list[Flow]:
    """Flows in the order in which their first requests get a turn. Raises RedisUnavailable."""
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
