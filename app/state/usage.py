"""Usage of requests in Redis: one hash for each hour, which expires."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from app.core.keys import Keyspace
from app.core.usage import UsageSums, Who
from app.state.scripts import Call, ScriptRunner, call, command

MAX_FIELDS = 4096
"""Fields of an hour: callers choose the names of tenants."""
NONE = "-"
HOURS_AT_ONCE = 64


def count(
    keyspace: Keyspace,
    hour: int,
    replica: str,
    number: int,
    used: Mapping[Who, UsageSums],
    *,
    kept_ms: int,
) -> Call[bool]:
    """Adds usage to the sums of an hour since 1970; returns whether this call did that, not an
    earlier one with the same number."""
    rows = ((w.key or NONE, w.tenant or NONE, w.model, *usage) for w, usage in used.items())
    fields = [field for row in rows for field in row]
    return call("count", keyspace, hour, replica, number, kept_ms, MAX_FIELDS, *fields, parse=bool)


async def read(
    runner: ScriptRunner, keyspace: Keyspace, hours: Iterable[int]
) -> dict[int, list[tuple[Who, UsageSums]]]:
    """Returns the readable usage of each of these hours. Raises RedisUnavailable."""
    hours, used = list(hours), dict[int, list[tuple[Who, UsageSums]]]()
    for at in range(0, len(hours), HOURS_AT_ONCE):
        some = hours[at : at + HOURS_AT_ONCE]
        calls = [
            command("usage", "HGETALL", f"{keyspace['usage:']}{hour}", parse=_parsed)
            for hour in some
        ]
        used |= zip(some, await runner.run(calls), strict=True)
    return used


def _parsed(reply: list[Any]) -> list[tuple[Who, UsageSums]]:
    rows = []
    for field, value in zip(reply[::2], reply[1::2], strict=True):
        names, counts = field.decode(errors="replace").split(" ", 2), value.split()
        if (
            len(names) == 3
            and len(counts) == len(UsageSums._fields)
            and value.replace(b" ", b"").isdigit()
        ):
            key, tenant, model = names
            who = Who(key if key != NONE else "", tenant if tenant != NONE else "", model)
            rows.append((who, UsageSums(*map(int, counts))))
    return rows
