"""Who takes an answer, as those see it who pass one on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from app.core.worker_report import WorkerInfo

Headers = Sequence[tuple[bytes, bytes]]


class Client(Protocol):
    """All raise ClientStalled if it takes nothing for too long."""

    async def start(self, status: int, headers: Headers) -> None:
        """As `whole`."""

    async def send(self, piece: bytes, *, last: bool = False) -> None: ...

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """A whole answer. headers: but for its length. Raises WorkerFailed if a stream was begun
        that it cannot be."""

    async def refuse(self, status: int, headers: Headers, body: bytes, by: WorkerInfo) -> None:
        """A whole answer: an error, as the engine of that worker tells it."""
