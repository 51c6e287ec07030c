"""Basics of operators' commands: a Redis client to run on, and the format of answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import wraps
from typing import Any, NamedTuple, TypeVar

import click
import orjson

from app.core.errors import printable
from app.core.keys import Keyspace
from app.core.settings.kinds import CommonSettings
from app.options import options
from app.state.connect import connect, deadline, naming

T = TypeVar("T")
TIMEOUT_S = 5.0
COMMON = options(CommonSettings, without=("host", "log_level"))


class CommandAnswer(NamedTuple):
    """An answer as JSON's types and as lines of text. error: raised once it is printed."""

    plain: Any
    lines: Iterable[str]
    error: Exception | None = None


def on_redis(command: Callable[..., Awaitable[T]]) -> Callable[..., T]:
    """Runs `command` with a client of the Redis, and the keyspace, that the options name."""

    @wraps(command)
    def run(redis_url: str, namespace: str, **values: Any) -> T:
        async def connected() -> T:
            async with connect(redis_url, timeout_s=TIMEOUT_S) as redis:
                async with deadline(TIMEOUT_S):
                    await redis.masters()  # a Cluster's client then knows where each key is
                return await command(redis, Keyspace(namespace), **values)

        with naming(redis_url):
            return asyncio.run(connected())

    return run


def answering(command: Callable[..., Awaitable[CommandAnswer]]) -> Callable[..., None]:
    """Runs `command` on Redis and prints its CommandAnswer, as JSON with --json."""
    run = on_redis(command)

    @wraps(command)
    def answer(as_json: bool, **values: Any) -> None:
        plain, lines, error = run(**values)
        say(*([json_text(plain)] if as_json else lines))
        if error is not None:
            raise error

    return COMMON(click.option("--json", "as_json", is_flag=True, help="Print JSON.")(answer))


def counted(number: int, noun: str, nouns: str = "") -> str:
    """Returns `1 block` or `2,000 blocks`. nouns: the plural, if it is not noun + s."""
    return f"{number:,} {noun if number == 1 else nouns or noun + 's'}"


def say(*lines: str, err: bool = False) -> None:
    """Print lines, whatever is in them. err: to standard error."""
    for line in lines:
        click.echo(printable(line), err=err)


def json_text(value: Any) -> str:
    return orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS).decode()


def text_table(head: Sequence[str], rows: Iterable[Sequence[Any]], empty: str = "") -> list[str]:
    """Returns lines with columns as wide as their widest cell, all but the first right-aligned; or
    `empty`, if that is given and there are no rows."""
    cells = [list(head), *([printable(str(cell)) for cell in row] for row in rows)]
    if empty and len(cells) == 1:
        return [empty]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
