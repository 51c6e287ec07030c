"""Last resort against a process that was told to stop and does not end."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
from typing import Any

from app.output import ERR

log = logging.getLogger(__name__)

BLOCKED_S = 3.0
"""Seconds after which the process is ended if its main thread heeds no signal or is slow to log."""


def end_within(seconds: float, loop: asyncio.AbstractEventLoop) -> None:
    """Ends this process after `seconds`, with status 1, and logs which tasks of `loop` are left
    then.

    Only the main thread may call this. A later call can bring the end forward, not put it off.
    """

    def end(*_: object) -> None:
        log.error("not ended %g s after it was told to stop; its tasks and threads:", seconds)
        for task in asyncio.all_tasks(loop):
            log.error("did not end: %s", where(task))
        ERR.flush()
        faulthandler.dump_traceback()  # of all threads
        os._exit(1)

    left_s, _ = signal.getitimer(signal.ITIMER_REAL)
    if not 0 < left_s <= seconds:
        signal.signal(signal.SIGALRM, end)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        faulthandler.dump_traceback_later(seconds + BLOCKED_S, exit=True)


def where(task: asyncio.Task[Any]) -> str:
    """Returns a task's coroutines, the outermost first, and the line at which the last waits."""
    coroutine: Any = task.get_coro()
    names, place = [], ""
    while frame := getattr(coroutine, "cr_frame", None):
        names.append(frame.f_code.co_qualname)
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        coroutine = coroutine.cr_await
    return f"{' > '.join(names)} at {place}"
