"""A worker's KV cache, which carries out what the block manager plans and reports it to the agent.

The index is told of a block when its copy is complete, and of its end before its slot is given
away. So one task per tier frees slots ahead of the requests that will need them.

Copies run in threads, several for each tier that is loaded from and one for each that is stored to:
a slow disk delays neither a load from host memory nor a block that leaves the device.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Protocol

from app.core.errors import NotEnoughBlocks
from app.core.events import CacheEvent
from app.core.types import Tier
from workers.kv.identity import BlockIdentity
from workers.kv.manager import BlockManager
from workers.kv.tables import BlockTable, Move

log = logging.getLogger(__name__)

LOAD_THREADS = 2
STORE_WAIT_S = 0.1
"""Seconds for which blocks that leave wait for room in the tier below, before they are dropped."""
WITHDRAW_TIMEOUT_S = 1.0
"""Seconds after which a block goes, even if Redis has not heard of that."""


class EventSink(Protocol):
    """The part of an agent that publishes events."""

    def notify(self, events: Iterable[CacheEvent]) -> None: ...

    async def published(self) -> bool:
        """Waits until Redis shows no block that `notify` said is gone; False: it may yet."""


class BlockCache:
    """The cache of one engine: `run` it, and call its other methods meanwhile, on one event loop.

    carry_out: copies the blocks of a move and returns how many leading ones are copied. spare:
    slots of each tier that are kept free, ahead of requests and of stores from the tier above;
    stores are dropped if nothing is free. on_load: called after each load onto the device that
    brought all of its blocks, with their tier, number and seconds. on_arrival: called on the event
    loop whenever more of a load is there, and at its end. unconfirmed: slots that were freed though
    Redis had not heard of it in time.
    """

    def __init__(
        self,
        manager: BlockManager,
        carry_out: Callable[[Move], int],
        publisher: EventSink,
        *,
        spare: Mapping[Tier, int],
        on_load: Callable[[Tier, int, float], None] = lambda *_: None,
        on_arrival: Callable[[], None] = lambda: None,
    ) -> None:
        self.manager = manager
        self.unconfirmed = 0
        self._carry_out = carry_out
        self._publisher = publisher
        self._spare = dict(spare)
        self._on_load = on_load
        self._on_arrival = on_arrival
        self._needed: dict[object, int] = {}
        """Device slots that each waiting request needs."""
        self._confirmed = True
        self._changed = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None
        self._copies: dict[Move, asyncio.Task[None]] = {}
        self._loading = {
            tier: ThreadPoolExecutor(
                LOAD_THREADS, thread_name_prefix=f"kv-load-{tier.name.lower()}"
            )
            for tier in manager.tiers
        }
        self._storing = {
            tier: ThreadPoolExecutor(1, thread_name_prefix=f"kv-store-{tier.name.lower()}")
            for tier in manager.tiers
        }

    async def run(self) -> None:
        """Runs until cancelled, then until copies end. Cancel only while no `admit` waits."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                for tier in self.manager.tiers:
                    tasks.create_task(self._keep_spare(tier))
                self._go_on()
        finally:
            self._tasks = None
            for pool in (*self._loading.values(), *self._storing.values()):
                await asyncio.to_thread(pool.shutdown)

    async def admit(self, prefix: Sequence[BlockIdentity], num_blocks: int) -> BlockTable:
        """Returns slots for a request; the first `num_matched` hold leading blocks of `prefix`.

        Waits until there is room and blocks are loaded; what cannot be loaded has to be computed.
        Raises NotEnoughBlocks if requests use too much of the device; what the device holds of
        `prefix` is not evicted then.
        """
        while True:
            table = await self.begin(prefix, num_blocks)
            try:
                for load in table.loads:
                    await self._ended(load)
            except asyncio.CancelledError:
                self.release(table)
                raise
            with suppress(NotEnoughBlocks):
                self.settle(table)
                return table

    async def begin(self, prefix: Sequence[BlockIdentity], num_blocks: int) -> BlockTable:
        """Returns slots for a request, while the blocks of its loads may still be on their way;
        once these have ended, `settle` the table. Raises NotEnoughBlocks."""
        table = await self._prepare(prefix, num_blocks)
        self._go_on()
        return table

    def settle(self, table: BlockTable) -> None:
        """Gives the table other slots for what its ended loads did not bring, which has to be
        computed.

        Raises NotEnoughBlocks if there are none, having released the table.
        """
        if table.num_whole < table.num_matched:
            try:
                self.manager.fall_back(table)
            finally:
                self._go_on()

    def register(self, table: BlockTable, blocks: Sequence[BlockIdentity]) -> None:
        self.manager.register(table, blocks)
        self._go_on()

    def share(self, table: BlockTable, prefix: Sequence[BlockIdentity]) -> int:
        count = self.manager.share(table, prefix)
        if count:
            self._go_on()
        return count

    def release(self, table: BlockTable) -> None:
        self.manager.release(table)
        self._go_on()

    def prefetch(self, chain: Sequence[BlockIdentity]) -> int:
        """Starts to load blocks of a waiting request into free slots; returns how many."""
        count = self.manager.prefetch(chain)
        self._go_on()
        return count

    async def _prepare(self, prefix: Sequence[BlockIdentity], num_blocks: int) -> BlockTable:
        device = self.manager.tiers[Tier.DEVICE]
        waiting = object()
        try:
            while True:
                try:
                    return self.manager.prepare(prefix, num_blocks)
                except NotEnoughBlocks as error:
                    could_be_free = device.num_free + device.num_idle + device.num_leaving
                    if could_be_free - error.kept < error.needed:
                        if not self._copies:
                            raise
                        self._needed.pop(waiting, None)
                    elif self._needed.get(waiting) != error.needed:
                        self._needed[waiting] = error.needed
                        self._notice()
                await self._changed.wait()
        finally:
            self._needed.pop(waiting, None)

    async def _keep_spare(self, tier: Tier) -> None:
        slots = self.manager.tiers[tier]
        while True:
            wanted = self._spare.get(tier, 0)
            if tier is Tier.DEVICE:
                wanted = max(wanted, sum(self._needed.values()))
            short = wanted - slots.num_free
            if short > 0 and slots.num_idle:
                await self._free(tier, await self._storable(tier, short))
            else:
                await self._changed.wait()

    async def _storable(self, tier: Tier, count: int) -> int:
        """Returns how many of `count` blocks to free at once, so that there is room to store them.

        Those are all, if no room comes free below in time: requests that wait for slots must not
        wait for a slow disk.
        """
        if tier is max(self.manager.tiers):
            return count
        with suppress(TimeoutError):
            async with asyncio.timeout(STORE_WAIT_S):
                while not self.manager.moves.room_below(tier):
                    await self._changed.wait()
        return min(count, self.manager.moves.room_below(tier) or count)

    async def _free(self, tier: Tier, count: int) -> None:
        eviction = self.manager.evict(tier, count)
        self._go_on()
        if eviction.store is not None:
            await self._ended(eviction.store)
        self.manager.withdraw(eviction)
        self._go_on()
        confirmed = False
        with suppress(TimeoutError):
            async with asyncio.timeout(WITHDRAW_TIMEOUT_S):
                confirmed = await self._publisher.published()
        freed = self.manager.reclaim(eviction)
        if not confirmed:
            self.unconfirmed += freed
            if self._confirmed:
                log.warning("freeing slots whose blocks Redis may still show")
        self._confirmed = confirmed
        self._go_on()

    async def _ended(self, move: Move) -> None:
        """Waits until a copy ends, however it ends, and even if the waiter is cancelled."""
        if move in self._copies:
            await asyncio.wait([self._copies[move]])

    async def _copy(self, move: Move) -> None:
        pool = self._loading[move.source] if move.is_load else self._storing[move.target]
        num_done, seconds = 0, 0.0
        try:
            num_done, seconds = await asyncio.get_running_loop().run_in_executor(
                pool, self._timed, move
            )
        except Exception:
            log.exception("copying %d blocks failed", len(move.blocks))
        del self._copies[move]
        self.manager.finish(move, num_done)
        move.arrival.limit(num_done)
        move.arrival.end()
        if move.is_load and num_done == len(move.blocks):
            self._on_load(move.source, num_done, seconds)
        self._go_on()

    def _timed(self, move: Move) -> tuple[int, float]:
        """Returns how many leading blocks are copied, and in how many seconds; runs in a thread."""
        started = time.perf_counter()
        num_done = self._carry_out(move)
        return num_done, time.perf_counter() - started

    def _go_on(self) -> None:
        """Starts planned moves, publishes what has changed, and wakes those who wait for room."""
        assert self._tasks is not None, "the cache does not run"
        notice = partial(asyncio.get_running_loop().call_soon_threadsafe, self._on_arrival)
        for move in self.manager.moves.take_planned():
            move.arrival.on_change = notice
            self._copies[move] = self._tasks.create_task(self._copy(move))
        events = self.manager.events.take()
        if events:
            self._publisher.notify(events)
        self._notice()

    def _notice(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
