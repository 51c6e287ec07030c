"""What a connector does."""

from __future__ import annotations

from typing import Protocol

from app.core.errors import KvrouteError
from app.core.roles import Role


class ConnectorError(KvrouteError):
    """The fleet was not changed; the next proposal tries again."""


class Connector(Protocol):
    """Changes the fleet. Both raise ConnectorError, and may be cancelled at a deadline.

    desired: workers that there will be.
    """

    async def add(self, role: Role, count: int, desired: int, reason: str) -> None:
        """Have `count` more workers of that role start; returns before they have."""

    async def remove(self, worker: str, role: Role, desired: int) -> None:
        """Have a worker stop that is drained."""


class Advise:
    """Changes nothing: what is proposed is in Redis, in metrics and in the log."""

    async def add(self, role: Role, count: int, desired: int, reason: str) -> None:
        """Nothing."""

    async def remove(self, worker: str, role: Role, desired: int) -> None:
        """Nothing."""
