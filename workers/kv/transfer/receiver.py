"""The target's side of a transfer: fetches blocks into its own slots, layer by layer."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from workers.kv.arrival import Arrival, CopyEvent
from workers.kv.identity import BlockIdentity, hash_of
from workers.kv.memory import Ids
from workers.kv.transfer.layer_groups import LayerGroups, checksums, content
from workers.kv.transfer.tcp import (
    WHOLE_S,
    BlockSource,
    TransferError,
    connected,
    in_thread,
    log_failure,
    read_offered,
    receive_all,
    send,
    wanted_frame,
)

log = logging.getLogger(__name__)

MAX_FETCHING = 32
"""Transfers of which a group is received at once; others wait."""


class BlockReceiver:
    """Fetches blocks into the pools of `groups`.

    kind: what has to be equal on both sides, by name. key: that workers have in common; "": none.
    """

    def __init__(self, groups: LayerGroups, kind: Mapping[str, str], key: str = "") -> None:
        self.groups = groups
        self._kind = kind
        self._key = key
        # Of its own: a source that sends nothing holds one up.
        self._threads = ThreadPoolExecutor(MAX_FETCHING, thread_name_prefix="kv-receiver")

    async def fetch(
        self,
        source: BlockSource,
        blocks: Sequence[BlockIdentity],
        block_ids: Sequence[int],
        arrival: Arrival,
    ) -> None:
        """Fetches the blocks into those slots. If anything fails, `arrival` alone says so, and
        ends.

        Nobody else may get the slots before this returns. Cancel it only where nobody ever will.
        """
        taking: asyncio.Task[None] | None = None
        written: list[CopyEvent] = []
        try:
            with closing(await connected(source)) as sock:
                wanted = wanted_frame(source.transfer_id, blocks, self._kind, self._key)
                await send(sock, wanted)
                num_offered = await read_offered(sock, len(blocks))
                arrival.limit(num_offered)
                ids = np.array(block_ids[:num_offered], np.int64)
                # One comes while the other one is taken.
                rooms = [self.groups.packed(0, len(ids)) for _ in range(2)]
                until_s = time.monotonic() + WHOLE_S
                for group in range(self.groups.num_groups):
                    if not arrival.num_good:
                        return
                    # No timeout cuts this off: a thread may be writing to the slots.
                    if time.monotonic() > until_s:
                        raise TransferError(f"not all of it has come within {WHOLE_S:g} s")
                    packed = self.groups.within(rooms[group % 2], group)
                    receiving = partial(_received, sock, packed, written)
                    received = await in_thread(self._threads, sock, receiving)
                    if taking is not None:
                        await taking
                    # While the next group travels.
                    taken = self._take(received, group, blocks[: len(ids)], ids, arrival, written)
                    taking = asyncio.create_task(taken)
                if taking is not None:
                    await taking
        except (TransferError, OSError, TimeoutError) as error:
            log_failure(source, error)
        except Exception:
            log.exception("%d blocks could not be taken", len(blocks))
        finally:
            try:
                if taking is not None:
                    await asyncio.wait([taking])
                for event in written[-1:]:  # the stream is in order
                    await asyncio.to_thread(event.synchronize)
            except Exception:
                log.exception("%d blocks could not be written", len(blocks))
                arrival.limit(0)
            finally:
                arrival.end()

    async def _take(
        self,
        received: _Received,
        group: int,
        blocks: Sequence[BlockIdentity],
        block_ids: Ids,
        arrival: Arrival,
        written: list[CopyEvent],
    ) -> None:
        """Checks and writes a group. written: gets the event of what is written to the slots."""

        def take() -> tuple[int, CopyEvent]:
            stated, packed = received
            wrong = np.flatnonzero(checksums(packed, blocks, group) != stated)
            num_good = int(wrong[0]) if len(wrong) else len(blocks)
            return num_good, self.groups.write(group, block_ids[:num_good], packed)

        num_good, event = await asyncio.to_thread(take)
        written.append(event)
        if num_good < len(blocks):
            log.warning("block %016x arrived with a wrong checksum", hash_of(blocks[num_good]))
        arrival.limit(num_good)
        self.groups.arrived(group, arrival, event)


class _Received(NamedTuple):
    """A group of blocks, and the checksums that the source states of them."""

    stated: NDArray[np.uint64]
    packed: Tensor


def _received(sock: socket.socket, packed: Tensor, written: Sequence[CopyEvent]) -> _Received:
    """Returns a group in that memory, once what was in it before is in the slots."""
    for event in written[-1:]:
        event.synchronize()
    stated = np.empty(len(packed), "<u8")
    receive_all(sock, stated.data)
    receive_all(sock, content(packed))
    return _Received(stated, packed)
