"""Signals that end a process, and what must not be cut short by them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a process and what it started: Ctrl-C, a supervisor, a closed terminal."""


def heed_interrupts() -> None:
    """Have each of INTERRUPTS raise KeyboardInterrupt in the main thread."""
    for number in INTERRUPTS:
        # nohup has SIGHUP ignored on purpose. A shell ignores SIGINT for what it starts in the
        # background, but whoever sends that one means it.
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Holds back INTERRUPTS until it is left.

    An exception while a process is being started would leave one that nobody knows about.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals interrupt only the main thread
        return
    came: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        came.append(number)

    handlers = {n: signal.signal(n, note) for n in INTERRUPTS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])
