"""Runs a kvroute command beside a task that goes on when its process is told to stop."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from app.cli import main as kvroute
from app.http import server

LONG_S = 3600.0


async def heedless() -> None:
    while True:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(LONG_S)


async def blocking() -> None:
    try:
        await asyncio.sleep(LONG_S)
    finally:
        sleeping()


async def threaded() -> None:
    await asyncio.to_thread(sleeping)


def sleeping() -> None:
    time.sleep(LONG_S)


TASKS = {task.__name__: task for task in (heedless, blocking, threaded)}


def main(task: str, late_s: str, *command: str) -> None:
    """task: one of TASKS. late_s: how long after its drain time the process must end."""
    run = server.run

    async def beside(main: Coroutine[Any, Any, None]) -> None:
        hanging = asyncio.create_task(TASKS[task]())
        await main
        assert not hanging.done()

    server.LATE_S = float(late_s)
    server.run = lambda main: run(beside(main))
    kvroute(command)


if __name__ == "__main__":
    main(*sys.argv[1:])
