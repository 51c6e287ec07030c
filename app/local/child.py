"""Processes that this one starts, the signals that end all, and workers that outlive this one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from app.core.errors import KvrouteError
from app.local import with_parent

START_DEADLINE_S = 60.0
STOP_S = 30.0
POLL_S = 0.05
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
    """Holds back INTERRUPTS until the context is left.

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

    output: file for what it prints; None: where this process prints. On Linux the program gets
    SIGTERM as soon as the thread that starts it ends, however that ends. The caller stops it
    otherwise, and holds interrupts until it has noted the process.
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


class ClusterError(KvrouteError):
    """A process of the cluster did not come up."""


@dataclass(slots=True)
class Member:
    """One process of a cluster, and where it listens."""

    name: str
    url: str
    process: subprocess.Popen[bytes]


def wait_for(member: Member, url: str, deadline: float, *, enough: tuple[int, ...] = ()) -> None:
    """Wait until `url` answers 200, or with one of the statuses in `enough`. Raises ClusterError,
    with the last answer, if it does not."""
    last = "no answer"
    while time.monotonic() < deadline:
        status = member.process.poll()
        if status is not None:
            raise ClusterError(f"{member.name} exited with status {status}")
        try:
            with urllib.request.urlopen(url, timeout=1.0) as answer:  # noqa: S310 - our own http URLs
                answer.read()  # else HAProxy logs that the client has gone
                return
        except urllib.error.HTTPError as error:
            with error:
                if error.code in enough:
                    return
                last = error.read().decode(errors="replace")
        except OSError as error:
            last = str(error)
        time.sleep(POLL_S)
    raise ClusterError(f"{member.name} is not ready after {START_DEADLINE_S:g} s: {last}")


def stop_workers(folder: Path, *signals: int) -> None:
    """Stop all workers that any planner has started, and kill those left after STOP_S. signals:
    what to send instead, STOP_S apart."""
    for number in signals or (signal.SIGTERM, signal.SIGKILL):
        for pid in running_workers(folder).values():
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline_s = time.monotonic() + STOP_S
        while running_workers(folder) and time.monotonic() < deadline_s:
            time.sleep(POLL_S)


def running_workers(folder: Path) -> dict[str, int]:
    """Returns the processes that live, by worker, and forgets the others."""
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
    with suppress(ChildProcessError):  # another planner's
        os.waitpid(pid, os.WNOHANG)
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return f"--worker-id={worker}".encode() in line.split(b"\0")
