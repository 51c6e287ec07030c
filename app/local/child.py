"""Processes that this one starts, the signals that end it and them, and workers that outlive it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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


STOP_S = 30.0
POLL_S = 0.1


def stop_workers(folder: Path, *signals: int) -> None:
    """Stop all that any planner has started there, and wait for it; kill what is left after
    STOP_S. signals: what to send instead, STOP_S apart."""
    for number in signals or (signal.SIGTERM, signal.SIGKILL):
        for pid in running_workers(folder).values():
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline_s = time.monotonic() + STOP_S
        while running_workers(folder) and time.monotonic() < deadline_s:
            time.sleep(POLL_S)


def running_workers(folder: Path) -> dict[str, int]:
    """The processes that live, by worker; forgets the others."""
    pids: dict[str, int] = {}
    for file in folder.glob("auto-*.pid"):
        text = ""
        with suppress(OSError, ValueError):  # another planner forgets them too
            text = file.read_text()
        if text.isdigit() and _is_worker(int(text), file.stem):
            pids[file.stem] = int(text)
        else:
            file.unlink(missing_ok=True)
    return pids


def _is_worker(pid: int, worker: str) -> bool:
    """Whether that process is still the worker, and not another with its number."""
    with suppress(ChildProcessError):  # another planner's
        os.waitpid(pid, os.WNOHANG)
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return f"--worker-id={worker}".encode() in line.split(b"\0")
