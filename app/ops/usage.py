"""`kvroute usage`: who has used what, by the hours that Redis keeps."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import click

from app.core.keys import Keyspace
from app.core.usage import BY, HOUR_MS, UsageSums, Who, added_up, cached_share
from app.ops.terminal import TIMEOUT_S, CommandAnswer, answering, text_table
from app.options import Command
from app.state import usage as stored
from app.state.client import RedisClient
from app.state.connect import deadline
from app.state.scripts import ScriptRunner

SINCE = re.compile(r"([1-9]\d{0,3})([hd])")
MOST_HOURS = 3660 * 24
Rows = Sequence[tuple[Who, UsageSums]]


def hours_in(since: str) -> int:
    """Returns the number of hours in a text like `36h` or `7d`. Raises ValueError for any other."""
    match = SINCE.fullmatch(since)
    hours = int(match[1]) * (24 if match[2] == "d" else 1) if match else 0
    if not 0 < hours <= MOST_HOURS:
        raise ValueError(f"needs hours or days, as 12h or 7d, {MOST_HOURS // 24} days at most")
    return hours


async def by_hour(redis: RedisClient, keyspace: Keyspace, hours: int) -> list[Rows]:
    """Returns what was used in each of the last hours, the present one last. Raises
    RedisUnavailable."""
    async with deadline(TIMEOUT_S):
        seconds, _ = await redis.time()
    now = seconds * 1000 // HOUR_MS
    asked = range(now - hours + 1, now + 1)
    return list((await stored.read(ScriptRunner(redis, TIMEOUT_S), keyspace, asked)).values())


async def answer(redis: RedisClient, keyspace: Keyspace, by: str, hours: int) -> dict[str, Any]:
    """Returns the sums of the last hours, for JSON. Raises RedisUnavailable."""
    rows = [row for some in await by_hour(redis, keyspace, hours) for row in some]
    sums = added_up(rows, by)
    total = UsageSums()
    for one in sums.values():
        total = total.plus(one)
    shown = [{"name": name} | as_dict(one) for name, one in sums.items()]
    return {"by": by, "hours": hours, "rows": shown, "total": as_dict(total)}


def as_dict(usage: UsageSums) -> dict[str, Any]:
    """Returns the counts by name, and the share of the prompts that was cached."""
    share = cached_share(usage)
    return usage._asdict() | {"cached_share": None if share is None else round(share, 4)}


class _Since(click.ParamType[int]):
    name = "hours or days"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        try:
            return value if isinstance(value, int) else hours_in(value)
        except ValueError as error:
            self.fail(f"{value!r} {error}", param, ctx)


@click.command(cls=Command)
@click.option("--by", type=click.Choice(tuple(BY)), default="key", help="What to add up by.")
@click.option("--since", default="7d", type=_Since(), help="How far back: 12h, 7d.")
@answering
async def usage(redis: RedisClient, keyspace: Keyspace, by: str, since: int) -> CommandAnswer:
    """Show how many requests and tokens each key, tenant or model has used.

    Routers add that up in the namespace that they are started with, for the models of all others,
    too. A * marks what includes tokens that the router counted, as an engine did not tell.
    """
    found = await answer(redis, keyspace, by, since)
    head = (by, "requests", "failed", "refused", "prompt", "cached", "output", "waited")
    rows = [_line(row["name"], row) for row in found["rows"]]
    return CommandAnswer(found, text_table(head, [*rows, _line("all", found["total"])]))


def _line(name: str, row: dict[str, Any]) -> Sequence[str]:
    share, mark = row["cached_share"], "*" if row["by_router"] else ""
    return (
        name,
        *(f"{row[field]:,}" for field in ("requests", "failed", "refused")),
        f"{row['prompt_tokens']:,}{mark}",
        "-" if share is None else f"{share:.0%}",
        f"{row['output_tokens']:,}{mark}",
        f"{row['waited_ms'] / 1000:,.1f} s",
    )
