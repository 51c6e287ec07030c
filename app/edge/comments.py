"""Comments in streams that have not begun: balancers cut connections on which nothing comes."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Protocol

COMMENT = b": waiting\n\n"
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
LOOK_S = 1.0


class Waiting(Protocol):
    """A client that waits for its answer, whose stream may not have begun."""

    def cut_short(self, error: Exception) -> None: ...

    def comment_if_due(self, now_s: float, every_s: float, tasks: asyncio.TaskGroup) -> None: ...


async def comment_each(clients: Collection[Waiting], every_s: float) -> None:
    """Let those that wait have a comment each `every_s`, until cancelled. One task looks after all,
    as nearly every stream begins before its first one is due."""
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as tasks:
        while True:
            await asyncio.sleep(min(LOOK_S, every_s / 2))
            now_s = loop.time()
            for client in [*clients]:
                client.comment_if_due(now_s, every_s, tasks)
