"""Transfers of a torch engine's blocks to other workers, and of theirs to the engine."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

from app.core.errors import NotEnoughBlocks
from workers.kv.arrival import Arrival
from workers.kv.cache import BlockCache
from workers.kv.identity import BlockIdentity
from workers.kv.memory import MemoryPool
from workers.kv.tables import BlockTable
from workers.kv.transfer.kv_lease import KvPort, LeasedBlocks
from workers.kv.transfer.layer_groups import LayerGroups
from workers.kv.transfer.receiver import BlockReceiver
from workers.kv.transfer.sender import BlockSender
from workers.kv.transfer.server import TransferServer
from workers.kv.transfer.tcp import BlockSource, decline

LOAD_S = 1.0
"""Seconds in which blocks that are to be handed on must be loaded onto the device."""


class BlockTransfer:
    """Transfers to and from other workers: `run` it while the cache runs, on the same event loop.

    pools: on the device, by rank. on_room: called when blocks were let go of, and others may get
    their slots.
    """

    def __init__(
        self,
        pools: Sequence[MemoryPool],
        cache: BlockCache,
        link: KvPort,
        on_room: Callable[[], None],
    ) -> None:
        groups = LayerGroups(pools)
        self._cache = cache
        self._link = link
        self.answered = link.answered
        self._groups = groups
        self._block_size = pools[0].shape.block_size
        self._on_room = on_room
        self._kept = LeasedBlocks(self._let_go)
        self._server = TransferServer(self._kept, link, BlockSender(groups).send)
        self._receiver = BlockReceiver(groups, link.kind, link.key)
        self._tasks: asyncio.TaskGroup | None = None

    @property
    def num_kept(self) -> int:
        """Blocks that are held for other workers alone."""
        held = Counter(slot for table in self._kept.tables for slot in table.slots)
        return sum(slot.references == times for slot, times in held.items())

    async def run(self) -> None:
        """Runs until cancelled; then nothing is handed on any more, and nothing more arrives."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                await self._server.run()
        finally:
            self._tasks = None
            self._kept.close()

    def _let_go(self, table: BlockTable) -> None:
        self._cache.release(table)
        self._on_room()

    def keep(self, table: BlockTable, lease_s: float) -> BlockSource:
        """Keeps a request's full blocks until they are fetched, or the lease ends."""
        return self._kept_as(self._cache.manager.keep(table), lease_s)

    async def keep_held(self, chain: Sequence[BlockIdentity], lease_s: float) -> BlockSource | None:
        """Keeps what any tier holds of a prompt, without a place in the queue."""
        num_held = len(self._cache.manager.match(chain))
        kept = None
        try:
            with suppress(NotEnoughBlocks, TimeoutError):
                async with asyncio.timeout(LOAD_S):
                    table = await self._cache.admit(chain[:num_held], num_held)
                if table.num_matched:
                    kept = self._kept_as(table, lease_s)
                else:
                    self._cache.release(table)
        finally:
            if kept is None:  # a request may have been refused what was held meanwhile
                self._on_room()
        return kept

    def fetch(
        self,
        source: BlockSource,
        blocks: Sequence[BlockIdentity],
        block_ids: Sequence[int],
        on_change: Callable[[], None],
    ) -> Arrival:
        """Begins to fetch. on_change: called whenever more has arrived, and at the end."""
        arrival = Arrival(len(blocks), on_change)
        assert self._tasks is not None, "the transfer does not run"
        self._tasks.create_task(self._receiver.fetch(source, blocks, block_ids, arrival))
        return arrival

    def decline(self, source: BlockSource) -> None:
        """Tells the source, soon, that nothing of what it keeps is needed, if this runs."""
        if self._tasks is not None:
            self._tasks.create_task(decline(source, self._link.key))

    def _kept_as(self, table: BlockTable, lease_s: float) -> BlockSource:
        return BlockSource(
            self._link.host,
            self._link.port,
            self._kept.keep(table, lease_s),
            table.num_matched * self._block_size,
        )
