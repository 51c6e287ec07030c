"""Connectors that need no library: they advise, run a command, or start workers here."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shlex
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import orjson

from app.core.errors import ConfigError, KvrouteError
from app.core.roles import Role
from app.local.child import running_workers


class ConnectorError(KvrouteError):
    """The fleet was not changed; the next proposal tries again."""


class Connector(Protocol):
    """Changes the fleet. Both methods raise ConnectorError, and may be cancelled at a deadline.

    desired: number of workers that there will be.
    """

    async def add(self, role: Role, count: int, desired: int, reason: str) -> None:
        """Have `count` more workers of that role start; returns before they have."""

    async def remove(self, worker: str, role: Role, desired: int) -> None:
        """Have a worker stop that is drained."""


class Advise:
    """A connector that changes nothing: proposals are in Redis, in metrics and in the log."""

    async def add(self, role: Role, count: int, desired: int, reason: str) -> None:
        pass

    async def remove(self, worker: str, role: Role, desired: int) -> None:
        pass


MOST_SHOWN = 500


class ExecConnector:
    """Runs `command` for each change, without a shell, with a JSON object on standard input:
    `action` (`add` or `remove`), `count`, `worker`, `role`, `desired` and `reason`. Any exit status
    but 0 is a failure."""

    def __init__(self, command: str) -> None:
        try:
            self._words = shlex.split(command)
        except ValueError as error:
            raise ConfigError(f"exec_command: {error}: {command!r}") from None
        if not self._words:
            raise ConfigError("exec_command: the connector exec needs a command")

    async def add(self, role: Role, count: int, desired: int, reason: str) -> None:
        await self._run(
            {"action": "add", "count": count, "role": role, "desired": desired, "reason": reason}
        )

    async def remove(self, worker: str, role: Role, desired: int) -> None:
        await self._run(
            {"action": "remove", "count": 1, "worker": worker, "role": role, "desired": desired}
        )

    async def _run(self, order: dict[str, Any]) -> None:
        try:
            process = await asyncio.create_subprocess_exec(
                *self._words,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as error:
            raise ConnectorError(f"{self._words[0]}: {error.strerror or error}") from None
        try:
            _, printed = await process.communicate(orjson.dumps(order) + b"\n")
        except asyncio.CancelledError:
            process.kill()
            await process.wait()
            raise
        if process.returncode:
            text = printed.decode(errors="replace").strip()[-MOST_SHOWN:]
            raise ConnectorError(f"{self._words[0]} ended with {process.returncode}: {text}")


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
