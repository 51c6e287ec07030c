"""The source: serves the blocks that it has promised, to whoever names them."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Mapping, Sequence
from contextlib import closing

import numpy as np

from app.core.types import SequenceHash
from workers.kv.memory import Ids
from workers.kv.remote.frames import (
    ACKNOWLEDGED,
    Offered,
    TransferError,
    Wanted,
    offered_frame,
    read_wanted,
    receive,
    send,
)
from workers.kv.remote.kept import KeptBlocks
from workers.kv.remote.layer_groups import LayerGroups, checksums, content
from workers.kv.tables import BlockTable

log = logging.getLogger(__name__)

MAX_SENDING = 8
"""Transfers at once; others wait until they are accepted."""


class BlockSender:
    """`run` it on the event loop of `kept`. kind: see Wanted."""

    def __init__(self, kept: KeptBlocks, groups: LayerGroups, kind: Mapping[str, str]) -> None:
        self._kept = kept
        self._groups = groups
        self._kind = kind
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
            self._check(wanted)
            with self._kept.reading(wanted.transfer_id) as table:
                blocks, block_ids = _held(table, wanted.blocks)
                await send(sock, offered_frame(Offered(len(blocks))))
                for group in range(self._groups.num_groups):
                    await self._send_group(sock, group, blocks, block_ids)
                acknowledged = bytearray(len(ACKNOWLEDGED))
                await receive(sock, memoryview(acknowledged))
                if acknowledged == ACKNOWLEDGED:
                    self._kept.end(wanted.transfer_id)
        except TransferError as error:
            log.warning("blocks are not handed on: %s", error)
            await send(sock, offered_frame(Offered(0, str(error))))

    def _check(self, wanted: Wanted) -> None:
        for name in self._kind.keys() | wanted.kind.keys():
            here, there = self._kind.get(name), wanted.kind.get(name)
            if here != there:
                raise TransferError(f"{name}: {here} at the source, {there} at the target")

    async def _send_group(
        self, sock: socket.socket, group: int, blocks: Sequence[SequenceHash], block_ids: Ids
    ) -> None:
        def read() -> tuple[memoryview, memoryview]:
            packed = self._groups.read(group, block_ids)
            return checksums(packed, blocks, group).data, content(packed)

        for part in await asyncio.to_thread(read):
            await send(sock, part)


def _held(table: BlockTable, wanted: Sequence[SequenceHash]) -> tuple[Sequence[SequenceHash], Ids]:
    """Leading ones of the wanted blocks that the table holds, and their slots.

    Raises TransferError if there is none.
    """
    slots = dict(zip(table.chain, table.slots, strict=False))
    held = []
    for block in wanted:
        if block not in slots:
            break
        held.append(slots[block].block_id)
    if not held:
        raise TransferError(f"blocks: none of the {len(wanted)} is among the {len(slots)} kept")
    return wanted[: len(held)], np.array(held, np.int64)
