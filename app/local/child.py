"""Processes that this one starts, and the signals that end them with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO

from app.local import with_parent

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


def start_child(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    output: IO[bytes] | None = None,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a program; command[0] is its path.

    output: for what it prints; None: where this process prints. On Linux it gets SIGTERM as soon as
    the thread that starts it here ends, however that ends. The caller stops it otherwise, and holds
    interrupts until it has noted the process.
    """
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(with_parent.__file__)), str(os.getpid()), *command],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        env=env,
        pass_fds=pass_fds,
        # Ctrl-C in a terminal reaches only the owner, which stops its children in their order.
        process_group=0,
    )
