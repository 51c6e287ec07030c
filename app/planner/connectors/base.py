"""The interface of connectors, and the two that need no library."""

from __future__ import annotations

import asyncio
import shlex
from typing import Any, Protocol

import orjson

from app.core.errors import ConfigError, KvrouteError
from app.core.roles import Role


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
