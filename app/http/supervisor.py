"""Supervision of tasks beside a server's requests, so that no surprise in them ends the server."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from app.http.metrics import Counter, Table, counter

log = logging.getLogger(__name__)

TASK_FAILURES = counter(
    "task_failures",
    "Times that something beside the requests failed unexpectedly and was begun anew, by what.",
    "task",
)


class Tasks(Table):
    """Metrics of a process that counts nothing else."""

    failures = TASK_FAILURES


FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Seconds before a task that failed is begun anew: twice as long each time, until it has run for
the longest without failing."""


Beside = Callable[[str, Callable[[], Awaitable[object]]], asyncio.Task[None]]
"""Runs something once beside the requests: its name, and the call."""


async def attempted(task: str, run: Callable[[], Awaitable[object]], failures: Counter) -> None:
    """Runs something once; logs and counts whatever it raises: panics of libraries are no
    Exceptions."""
    try:
        await run()
    except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException:
        failures.labels(task).inc()
        log.exception("%s failed unexpectedly", task)


async def supervised(task: str, run: Callable[[], Awaitable[object]], failures: Counter) -> None:
    """Runs what should run for as long as the server does, until cancelled or it returns.

    Whatever it raises is logged and counted, and it is begun anew: `run` must be able to, and must
    itself catch what is to end its process. What it raises instead of ending once it is cancelled
    is logged and counted, too, and it ends all the same.

    failures: TASK_FAILURES in a Table.
    """
    # At once: rate() does not see the first failure in a series that begins with it.
    failed = failures.labels(task)
    pause_s = FIRST_PAUSE_S
    while True:
        begun_s = time.monotonic()
        try:
            await run()
        except Exception:
            failed.inc()
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                log.exception("%s failed unexpectedly as it ended", task)
                raise asyncio.CancelledError from None
            if time.monotonic() - begun_s >= LONGEST_PAUSE_S:
                pause_s = FIRST_PAUSE_S
            log.exception("%s failed unexpectedly; it is begun anew in %g s", task, pause_s)
        else:
            return
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
