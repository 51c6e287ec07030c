"""The source: serves the blocks that it has leased, to whoever names them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from workers.kv.identity import BlockIdentity
from workers.kv.memory import Ids
from workers.kv.tables import BlockTable
from workers.kv.transfer.layer_groups import LayerGroups, checksums, content
from workers.kv.transfer.tcp import (
    MAX_SENDING,
    BlocksOffer,
    TransferError,
    in_thread,
    offered_frame,
    send,
    send_all,
)


class BlockSender:
    """Sends blocks out of the pool of `groups`, layer by layer."""

    def __init__(self, groups: LayerGroups) -> None:
        self._groups = groups
        # Of its own: whoever takes nothing holds one up.
        self._threads = ThreadPoolExecutor(MAX_SENDING, thread_name_prefix="kv-sender")

    async def offer(
        self, sock: socket.socket, table: BlockTable, wanted: Sequence[BlockIdentity]
    ) -> None:
        """See TransferServer."""
        blocks, block_ids = _held(table, wanted)
        await send(sock, offered_frame(BlocksOffer(len(blocks))))
        num_groups = self._groups.num_groups
        reading = asyncio.create_task(self._read(0, blocks, block_ids))
        try:
            for group in range(num_groups):
                parts = await reading
                if group + 1 < num_groups:  # while this one travels
                    reading = asyncio.create_task(self._read(group + 1, blocks, block_ids))
                await in_thread(self._threads, sock, partial(_send, sock, parts))
        finally:
            reading.cancel()

    async def _read(
        self, group: int, blocks: Sequence[BlockIdentity], block_ids: Ids
    ) -> tuple[memoryview, memoryview]:
        """The checksums of a group, and its contents."""

        def read() -> tuple[memoryview, memoryview]:
            packed = self._groups.read(group, block_ids)
            return checksums(packed, blocks, group).data, content(packed)

        return await asyncio.to_thread(read)


def _send(sock: socket.socket, parts: Sequence[memoryview]) -> None:
    for part in parts:
        send_all(sock, part)


def _held(
    table: BlockTable, wanted: Sequence[BlockIdentity]
) -> tuple[Sequence[BlockIdentity], Ids]:
    """Leading ones of the wanted blocks that the table holds, and their slots.

    Raises TransferError if there is none.
    """
    slots = dict(zip(table.chain, table.slots, strict=False))
    num_kept, held = len(slots), []
    for block in wanted:
        slot = slots.pop(block, None)  # each once, however often it is asked for
        if slot is None:
            break
        held.append(slot.block_id)
    if not held:
        raise TransferError(f"blocks: none of the {len(wanted)} is among the {num_kept} kept")
    return wanted[: len(held)], np.array(held, np.int64)
