"""Workers as processes of this machine, which outlive the planner that started them.

A file for each says which process it is, so that the next planner finds them again.
"""

from __future__ import annotations

import logging
import os
import secrets
import shlex
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from app.autoscaler.connectors.base import ConnectorError
from app.core.errors import ConfigError
from app.planner.state import Proposal

log = logging.getLogger(__name__)

STOP_S = 30.0
POLL_S = 0.1


class Local:
    """Starts `kvroute worker` with `flags`, and stops it with SIGTERM.

    Raises ConfigError for flags that cannot be split, or a folder that cannot be made.
    """

    def __init__(self, flags: str, folder: Path, redis_url: str, namespace: str) -> None:
        try:
            self._flags = shlex.split(flags)
            folder.mkdir(parents=True, exist_ok=True)
        except ValueError as error:
            raise ConfigError(f"worker_flags: {error}: {flags!r}") from None
        except OSError as error:
            raise ConfigError(f"local_folder {folder}: {error.strerror}") from None
        self._folder, self._namespace = folder, namespace
        self._environment = {
            **os.environ,
            "REDIS_URL": redis_url,
            "PYTHONPATH": os.pathsep.join(sys.path),
        }

    async def add(self, count: int, proposal: Proposal) -> None:
        for _ in range(count):
            self._start(f"auto-{secrets.token_hex(4)}")

    async def remove(self, worker: str, proposal_size: int) -> None:
        pid = running(self._folder).get(worker)
        if pid is None:
            raise ConnectorError(f"worker {worker} was not started by a planner: stop it yourself")
        os.kill(pid, signal.SIGTERM)
        log.info("told worker %s to stop", worker)

    def _start(self, worker: str) -> None:
        command = [
            *(sys.executable, "-P", "-m", "app.cli", "worker", "--port=0"),
            f"--worker-id={worker}",
            f"--namespace={self._namespace}",
            *self._flags,
        ]
        try:
            log_file = str(self._folder / f"{worker}.log")
            pid = os.posix_spawn(
                command[0],
                command,
                self._environment,
                file_actions=(
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 1, log_file, os.O_WRONLY | os.O_CREAT, 0o600),
                    (os.POSIX_SPAWN_DUP2, 1, 2),
                ),
                setsid=True,  # it outlives this planner
            )
            (self._folder / f"{worker}.pid").write_text(str(pid))
        except OSError as error:
            raise ConnectorError(f"no worker started: {error.strerror}") from None
        log.info("started worker %s as process %d", worker, pid)


def stop_workers(folder: Path) -> None:
    """Stop all that any planner has started there, and wait for it; kill what is left after
    STOP_S."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in running(folder).values():
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline_s = time.monotonic() + STOP_S
        while running(folder) and time.monotonic() < deadline_s:
            time.sleep(POLL_S)


def running(folder: Path) -> dict[str, int]:
    """The processes that live, by worker; forgets the others."""
    found: dict[str, int] = {}
    for file in folder.glob("auto-*.pid"):
        text = file.read_text()
        if text.isdigit() and _is_worker(int(text), file.stem):
            found[file.stem] = int(text)
        else:
            file.unlink(missing_ok=True)
    return found


def _is_worker(pid: int, worker: str) -> bool:
    """Whether that process is still the worker, and not another with its number."""
    with suppress(ChildProcessError):  # another planner's
        os.waitpid(pid, os.WNOHANG)
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return f"--worker-id={worker}".encode() in line.split(b"\0")
