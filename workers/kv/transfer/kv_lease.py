"""KV that a worker keeps for others: its port, and blocks leased until others have them."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar
from urllib.parse import urlsplit

from app.core.settings.worker import WorkerSettings
from app.core.types import new_id
from workers.kv.identity import BlockIdentity
from workers.kv.transfer.tcp import TransferError


@dataclass(frozen=True, slots=True)
class KvPort:
    """The address at which others reach a worker's blocks.

    kind: what has to be equal on both sides, by name. key: that others must have, and have to prove
    to them; "": none. answered: connections that have ended here, by what became of them.
    """

    listening: socket.socket
    host: str
    kind: Mapping[str, str]
    key: str = ""
    answered: Counter[str] = field(default_factory=Counter)

    @property
    def port(self) -> int:
        port: int = self.listening.getsockname()[1]
        return port


def open_kv_port(settings: WorkerSettings, kind: Mapping[str, str], stack: ExitStack) -> KvPort:
    """Opens a port that is open as long as `stack` is. Raises ConfigError if the port is taken."""
    from app.http.server import listen  # engines on their own need no web server

    listening = stack.enter_context(listen(settings.host, settings.kv_port))
    host = urlsplit(settings.resolved_address()).hostname or settings.host
    return KvPort(listening, host, kind, settings.worker_key)


class HeldBlocks(Protocol):
    """Blocks that an engine holds."""

    @property
    def chain(self) -> list[BlockIdentity]: ...


K = TypeVar("K", bound=HeldBlocks)


@dataclass(slots=True)
class _Hold(Generic[K]):
    table: K
    lease: asyncio.TimerHandle
    is_taken: bool = False


class LeasedBlocks(Generic[K]):
    """Tables whose blocks are held until they are asked for, or until their lease ends.

    release: gives a table back. It is called on the event loop, and once for each table.
    """

    def __init__(self, release: Callable[[K], None]) -> None:
        self._release = release
        self._holds: dict[str, _Hold[K]] = {}

    @property
    def tables(self) -> list[K]:
        return [hold.table for hold in self._holds.values()]

    def keep(self, table: K, lease_s: float) -> str:
        """Returns an id that nobody guesses: whoever knows the id may read the blocks."""
        transfer_id = new_id()
        lease = asyncio.get_running_loop().call_later(lease_s, self.end, transfer_id)
        self._holds[transfer_id] = _Hold(table, lease)
        return transfer_id

    @contextmanager
    def taken(self, transfer_id: str) -> Iterator[K]:
        """Yields the table, held meanwhile. Raises TransferError if it is gone or taken."""
        hold = self._holds.get(transfer_id)
        if hold is None or hold.is_taken:
            raise TransferError(f"transfer_id: {transfer_id!r} was fetched, or its lease has ended")
        hold.is_taken = True
        try:
            yield hold.table
        finally:
            self._let_go(transfer_id)

    def end(self, transfer_id: str) -> None:
        """Lets go of the blocks, unless somebody is fetching them."""
        hold = self._holds.get(transfer_id)
        if hold is not None and not hold.is_taken:
            self._let_go(transfer_id)

    def close(self) -> None:
        """Lets go of all blocks. Call once nobody fetches any."""
        for transfer_id in list(self._holds):
            self.end(transfer_id)

    def _let_go(self, transfer_id: str) -> None:
        hold = self._holds.pop(transfer_id)
        hold.lease.cancel()
        self._release(hold.table)
