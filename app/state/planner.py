"""The planner's lease, what the next leader has to know, and the proposals made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import orjson

from app.core.keys import Keyspace
from app.state.client import RedisClient
from app.state.connect import deadline
from app.state.scripts import Call, call, command

TIMEOUT_S = 2.0
KEPT = 2048


@dataclass(frozen=True, slots=True)
class Leadership:
    """A planner's claim to lead. token: 0 if `holder` leads instead. state: what the last leader
    recorded."""

    token: int
    state: Mapping[str, Any]
    holder: str


def lead(keyspace: Keyspace, holder: str, ttl_ms: int) -> Call[Leadership]:
    """Becomes or remains the leader for `ttl_ms`; 0: leaves."""

    def parse(reply: list[Any]) -> Leadership:
        token, text = int(reply[0]), reply[1].decode(errors="replace")
        if not token:
            return Leadership(0, {}, text)
        try:
            state = orjson.loads(text or "{}")
        except orjson.JSONDecodeError:
            state = {}
        return Leadership(token, state if isinstance(state, dict) else {}, holder)

    return call("lead", keyspace, holder, ttl_ms, parse=parse)


def propose(
    keyspace: Keyspace,
    token: int,
    state: Mapping[str, Any],
    proposal: Mapping[str, Any] | None = None,
    shown: Mapping[str, str | int] | None = None,
) -> Call[bool]:
    """Records `state`, and `proposal` if there is one; False: somebody else leads now. shown:
    fields of the `planner` hash for operators and other autoscalers."""
    text = orjson.dumps(proposal).decode() if proposal is not None else ""
    fields = chain.from_iterable((shown or {}).items())
    return call(
        "propose", keyspace, token, orjson.dumps(state).decode(), KEPT, text, *fields, parse=bool
    )


def wakes_until(keyspace: Keyspace) -> Call[int]:
    """Returns until when, ms of the Redis clock, a planner starts a worker for requests that find
    none; 0: none does."""

    def parse(reply: list[bytes | None]) -> int:
        wakes, until_ms = reply
        return int(until_ms) if until_ms and until_ms.isdigit() and wakes == b"1" else 0

    return command("wakes_until", "HMGET", keyspace["planner"], "wakes", "until_ms", parse=parse)


async def proposals(redis: RedisClient, keyspace: Keyspace, count: int) -> list[dict[str, Any]]:
    """Returns the newest `count` readable proposals, newest first. Raises RedisUnavailable."""
    async with deadline(TIMEOUT_S):
        entries: Any = await redis.xrevrange(keyspace["proposals"], count=count)
    rows = []
    for _, fields in entries:
        try:
            proposal = orjson.loads(fields[b"proposal"])
        except (KeyError, orjson.JSONDecodeError):
            continue
        if isinstance(proposal, dict):
            rows.append(proposal)
    return rows


async def values(redis: RedisClient, keyspace: Keyspace) -> dict[str, float]:
    """Returns worker -> seconds of prefill that losing it would cost, as a planner last found;
    empty if none runs. Raises RedisUnavailable."""
    async with deadline(TIMEOUT_S):
        text: Any = await redis.hget(keyspace["planner"], "values")
    try:
        fields = orjson.loads(text or b"{}")
        return {str(name): float(value) for name, value in fields.items()}
    except (orjson.JSONDecodeError, AttributeError, TypeError, ValueError):
        return {}
