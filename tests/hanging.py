"""Runs a kvroute command beside a task that goes on when its process is told to stop."""

import asyncio
import sys
import time
from contextlib import suppress

from app.cli import main as kvroute
from app.http import server

LONG_S = 3600.0


async def heedless():
    while True:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(LONG_S)


async def blocking():
    try:
        await asyncio.sleep(LONG_S)
    finally:
        sleeping()


async def threaded():
    await asyncio.to_thread(sleeping)


def sleeping():
    time.sleep(LONG_S)


TASKS = {task.__name__: task for task in (heedless, blocking, threaded)}


def main(task, late_s, *command):
    """task: one of TASKS. late_s: how long after its drain time the process must end."""
    run = server.run

    async def beside(main):
        hanging = asyncio.create_task(TASKS[task]())
        await main
        assert not hanging.done()

    server.LATE_S = float(late_s)
    server.run = lambda main: run(beside(main))
    kvroute(command)


if __name__ == "__main__":
    main(*sys.argv[1:])
