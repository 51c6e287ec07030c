"""The target: fetches blocks into its own slots, where they are used layer by layer."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing

import numpy as np

from app.core.types import SequenceHash
from workers.kv.memory import Ids
from workers.kv.transfer.layer_groups import LayerGroups, checksums, content
from workers.kv.transfer.tcp import (
    STALL_S,
    WHOLE_S,
    BlocksRequest,
    Source,
    TransferError,
    connected,
    log_failure,
    read_offered,
    receive,
    send,
    wanted_frame,
)

log = logging.getLogger(__name__)


class Arrival:
    """Blocks that arrive in slots of this worker, all of a layer before the next layer.

    num_good: leading blocks whose layers were right so far, or 0 once some do not come. seconds:
    until the last group that came. on_change: called on the event loop after each group, and at the
    end. Written by the event loop, and read by any thread.
    """

    def __init__(
        self, num_blocks: int, groups: LayerGroups, on_change: Callable[[], None] = lambda: None
    ) -> None:
        self.num_blocks = self.num_good = num_blocks
        self.num_arrived = 0
        """Groups of layers."""
        self.ended = False
        self.seconds = 0.0
        self.waited_s = 0.0
        """How long `wait_layer` took, all in all."""
        self._groups = groups
        self._on_change = on_change
        self._changed = threading.Condition()
        self._began_s = time.monotonic()

    @property
    def is_settled(self) -> bool:
        """Is nothing more written to the slots?"""
        return self.ended or self.num_arrived == self._groups.num_groups

    @property
    def remaining_s(self) -> float:
        """How long the rest takes, if it comes as fast as what has come; 0 once it is settled.

        Infinite while that is not known, and if blocks were lost.
        """
        if self.is_settled:
            return 0.0
        if not self.num_arrived or self.num_good < self.num_blocks:
            return float("inf")
        left = self._groups.num_groups - self.num_arrived
        return left * (time.monotonic() - self._began_s) / self.num_arrived

    def wait_layer(self, layer: int) -> None:
        """Wait until all blocks' layer is there. Raises TransferError if it does not come: then
        what was computed from the blocks must be computed again, once this is settled."""
        group = layer // self._groups.layers_per_group
        began_s = time.monotonic()
        with self._changed:
            there = self._changed.wait_for(lambda: self.ended or self.num_arrived > group, STALL_S)
            self.waited_s += time.monotonic() - began_s
            if not there:
                self.num_good = 0
            if self.num_good < self.num_blocks:
                raise TransferError(f"{self.num_good} of {self.num_blocks} blocks came whole")

    def limit(self, num_good: int) -> None:
        """No more than so many blocks are of use; with 0, no more are fetched."""
        with self._changed:
            self.num_good = min(self.num_good, num_good)

    def arrive(self) -> None:
        """The next group is in its slots."""
        with self._changed:
            self.num_arrived += 1
            self.seconds = time.monotonic() - self._began_s
            self._changed.notify_all()
        self._on_change()

    def end(self) -> None:
        """Nothing more comes."""
        with self._changed:
            if self.num_arrived < self._groups.num_groups:
                self.num_good = 0
            self.ended = True
            self._changed.notify_all()
        self._on_change()


class BlockReceiver:
    """Fetches blocks into the pool of `groups`. kind: as BlocksRequest has it. key: as for
    `wanted_frame`."""

    def __init__(self, groups: LayerGroups, kind: Mapping[str, str], key: str = "") -> None:
        self.groups = groups
        self._kind = kind
        self._key = key

    async def fetch(
        self,
        source: Source,
        blocks: Sequence[SequenceHash],
        block_ids: Sequence[int],
        arrival: Arrival,
    ) -> None:
        """Fetch the blocks into those slots. Whatever fails, only `arrival` tells, which then ends.

        Nobody else may get the slots before this returns. Cancel it only where nobody ever will.
        """
        try:
            with closing(await connected(source)) as sock:
                wanted = BlocksRequest(source.transfer_id, blocks, self._kind)
                await send(sock, wanted_frame(wanted, self._key))
                offered = await read_offered(sock, len(blocks))
                arrival.limit(offered.num_blocks)
                ids = np.array(block_ids[: offered.num_blocks], np.int64)
                until_s = time.monotonic() + WHOLE_S
                for group in range(self.groups.num_groups):
                    if not arrival.num_good:
                        return
                    # No timeout cuts this off: a thread may be writing to the slots.
                    if time.monotonic() > until_s:
                        raise TransferError(f"not all of it has come within {WHOLE_S:g} s")
                    await self._receive(sock, group, blocks[: len(ids)], ids, arrival)
        except (TransferError, OSError, TimeoutError) as error:
            log_failure(source, error)
        finally:
            arrival.end()

    async def _receive(
        self,
        sock: socket.socket,
        group: int,
        blocks: Sequence[SequenceHash],
        block_ids: Ids,
        arrival: Arrival,
    ) -> None:
        stated = np.empty(len(blocks), "<u8")
        packed = self.groups.packed(group, len(blocks))
        await receive(sock, stated.data.cast("B"))
        await receive(sock, content(packed))

        def take() -> int:
            wrong = np.flatnonzero(checksums(packed, blocks, group) != stated)
            num_good = int(wrong[0]) if len(wrong) else len(blocks)
            self.groups.write(group, block_ids[:num_good], packed)
            return num_good

        num_good = await asyncio.to_thread(take)
        if num_good < len(blocks):
            log.warning("block %016x arrived with a wrong checksum", blocks[num_good])
        arrival.limit(num_good)
        arrival.arrive()
