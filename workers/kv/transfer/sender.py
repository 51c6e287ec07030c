"""The source's side of a transfer: sends blocks out of its own slots."""

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
from workers.kv.transfer.tcp import MAX_SENDING, in_thread, send_all


class BlockSender:
    """Sends blocks out of the pool of `groups`, layer by layer."""

    def __init__(self, groups: LayerGroups) -> None:
        self._groups = groups
        # Its own threads: a target that takes nothing holds one up.
        self._threads = ThreadPoolExecutor(MAX_SENDING, thread_name_prefix="kv-sender")

    async def send(
        self, sock: socket.socket, table: BlockTable, blocks: Sequence[BlockIdentity]
    ) -> None:
        """Sends blocks of the table. Raises OSError and TimeoutError."""
        slots = dict(zip(table.chain, table.slots, strict=False))
        block_ids = np.array([slots[block].block_id for block in blocks], np.int64)
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
        """Returns the checksums of a group, and its contents."""

        def read() -> tuple[memoryview, memoryview]:
            packed = self._groups.read(group, block_ids)
            return checksums(packed, blocks, group).data, content(packed)

        return await asyncio.to_thread(read)


def _send(sock: socket.socket, parts: Sequence[memoryview]) -> None:
    for part in parts:
        send_all(sock, part)
