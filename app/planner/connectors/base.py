"""What a connector does."""

from __future__ import annotations

from typing import Protocol

from app.core.errors import KvrouteError
from app.planner.rules.state import Proposal


class ConnectorError(KvrouteError):
    """The fleet was not changed; the next proposal tries again."""


class Connector(Protocol):
    """Changes the fleet. Both raise ConnectorError, and may be cancelled at a deadline."""

    async def add(self, count: int, proposal: Proposal) -> None:
        """Have `count` more workers start; returns before they have."""

    async def remove(self, worker: str, proposal_size: int) -> None:
        """Have a worker stop that is drained. proposal_size: workers there will be without it."""


class Advise:
    """Changes nothing: what is proposed is in Redis, in metrics and in the log."""

    async def add(self, count: int, proposal: Proposal) -> None:
        """Nothing."""

    async def remove(self, worker: str, proposal_size: int) -> None:
        """Nothing."""
