"""Workers that outlive the process that started them: a file for each says which process it is."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

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
