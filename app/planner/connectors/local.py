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
from contextlib import suppress
from pathlib import Path

from app.core.errors import ConfigError
from app.core.roles import Role
from app.local.child import running_workers
from app.planner.connectors.base import ConnectorError

log = logging.getLogger(__name__)


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

    async def add(self, role: Role, count: int, desired: int, reason: str) -> None:
        for _ in range(count):
            self._start(f"auto-{secrets.token_hex(4)}", role)

    async def remove(self, worker: str, role: Role, desired: int) -> None:
        pid = running_workers(self._folder).get(worker)
        if pid is None:
            raise ConnectorError(f"worker {worker} was not started by a planner: stop it yourself")
        with suppress(ProcessLookupError):  # it has ended by itself meanwhile
            os.kill(pid, signal.SIGTERM)
        log.info("told worker %s to stop", worker)

    def _start(self, worker: str, role: Role) -> None:
        command = [
            *(sys.executable, "-P", "-m", "app.cli", "worker", "--port=0"),
            f"--worker-id={worker}",
            f"--namespace={self._namespace}",
            *self._flags,
            *([] if role is Role.BOTH else [f"--role={role}"]),
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
        except OSError as error:
            raise ConnectorError(f"no worker started: {error.strerror}") from None
        try:
            (self._folder / f"{worker}.pid").write_text(str(pid))
        except OSError as error:
            os.kill(pid, signal.SIGKILL)  # nobody could find it again
            raise ConnectorError(f"worker {worker} is not noted: {error.strerror}") from None
        log.info("started worker %s as process %d", worker, pid)
