"""Hands kept blocks on to whoever names them."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing
from typing import Generic, TypeVar

from app.core.types import SequenceHash
from workers.kv.remote.frames import (
    Offered,
    TransferError,
    Wanted,
    offered_frame,
    read_wanted,
    send,
)
from workers.kv.remote.kept import KeptBlocks

log = logging.getLogger(__name__)

MAX_SENDING = 8
"""Transfers at once; others wait until they are accepted."""
K = TypeVar("K")


class TransferServer(Generic[K]):
    """`run` it on the event loop of `kept`.

    kind: see Wanted. offer: sends what it offers of the wanted blocks, and then these; it raises
    TransferError if it has none of them.
    """

    def __init__(
        self,
        kept: KeptBlocks[K],
        kind: Mapping[str, str],
        offer: Callable[[socket.socket, K, Sequence[SequenceHash]], Awaitable[None]],
    ) -> None:
        self._kept = kept
        self._kind = kind
        self._offer = offer
        self._free = asyncio.Semaphore(MAX_SENDING)

    async def run(self, listening: socket.socket) -> None:
        """Serve until cancelled."""
        listening.setblocking(False)
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as sending:
            while True:
                await self._free.acquire()
                try:
                    sock, _ = await loop.sock_accept(listening)
                except OSError as error:  # such as: too many open files
                    log.warning("a worker that fetches could not connect: %s", error)
                    self._free.release()
                    await asyncio.sleep(0.1)
                    continue
                sending.create_task(self._serve(sock))

    async def _serve(self, sock: socket.socket) -> None:
        try:
            with closing(sock):
                await self._send(sock)
        except (OSError, TimeoutError) as error:
            log.warning("blocks were not fetched: %s", error or "the other worker has stalled")
        finally:
            self._free.release()

    async def _send(self, sock: socket.socket) -> None:
        try:
            wanted = await read_wanted(sock)
            if not wanted.blocks:
                self._kept.end(wanted.transfer_id)
                return
            with self._kept.taken(wanted.transfer_id) as kept:
                self._check(wanted)
                await self._offer(sock, kept, wanted.blocks)
        except TransferError as error:
            log.warning("blocks are not handed on: %s", error)
            await send(sock, offered_frame(Offered(0, str(error))))

    def _check(self, wanted: Wanted) -> None:
        for name in self._kind.keys() | wanted.kind.keys():
            here, there = self._kind.get(name), wanted.kind.get(name)
            if here != there:
                raise TransferError(f"{name}: {here} at the source, {there} at the target")
