"""Copies of KV blocks between device, host and disk.

A load fills slots of the device layer by layer: with the first layers of all of its blocks, then
with the next ones. A store copies whole blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice, pairwise

import numpy as np
import torch
from torch import Tensor

from app.core.types import Tier
from workers.kv.arrival import CopyEvent
from workers.kv.copiers import STAGED_BYTES, PoolCopier
from workers.kv.disk import DiskPieces, SlotFile
from workers.kv.disk_records import DiskBlock
from workers.kv.identity import hash_of
from workers.kv.memory import WORD_BYTES, HostStream, Ids, MemoryPool, checked_map, new_stream
from workers.kv.tables import Move

log = logging.getLogger(__name__)


class Copies:
    """Copies blocks between all tiers of a worker; calls block, and may come from any thread.

    pools: of the device and, if there is that tier, of the host.

    Every failure is reported as a number: how many leading blocks are copied correctly. A block
    does not count if it could not be read, did not match its checksum or was not taken by a full
    disk, nor if its slot was meanwhile given to another block.
    """

    def __init__(self, pools: Mapping[Tier, MemoryPool], disk: SlotFile | None = None) -> None:
        self._pools = dict(pools)
        self._disk = disk
        self._device = pools[Tier.DEVICE]
        self.groups = self._device.shape.layer_groups
        if Tier.HOST in pools:
            host = pools[Tier.HOST]
            self._onboard = PoolCopier(host, self._device, self.groups[0].stop)
            self._offload = PoolCopier(self._device, host)
        self._loading = new_stream(self._device)
        self._storing = new_stream(self._device)

    def carry_out(self, move: Move, at_most: int | None = None) -> int:
        """Copies the blocks of a move; returns how many leading ones are now copied.

        at_most: of its blocks, as many as may be good. A load's `arrival` is told how far it is.
        """
        count = min(move.num_ready, len(move.blocks) if at_most is None else at_most)
        copy = self._load if move.is_load else self._store
        sources = [slot.block_id for slot in move.sources[:count]]
        targets = [slot.block_id for slot in move.targets[:count]]
        return min(copy(move, sources, targets), move.num_ready)

    def _load(self, move: Move, sources: list[int], targets: list[int]) -> int:
        count = done = len(sources)
        move.arrival.limit(count)
        if not count:
            return 0
        event = None
        try:
            if move.source is Tier.HOST:
                copies = self._from_host(sources, targets)
            else:
                copies = self._from_disk(sources, targets, move.generations[:count])
            num_layers = self.groups[-1].stop
            for layers, (event, good) in zip(self.groups, copies, strict=True):
                if layers.stop == num_layers:
                    done = min(good, move.num_ready)
                    move.arrival.limit(done)
                move.arrival.arrive(layers.stop, num_layers, event)
        finally:  # even if it failed: once this ends, others may get the slots
            if event is not None:
                event.synchronize()
        if done < len(move.targets):
            # Whoever gets the slots multiplies even what it masks: a NaN would survive.
            lost = [slot.block_id for slot in move.targets[done:]]
            self._loading.submit(partial(self._device.words.__setitem__, lost, 0)).synchronize()
        return done

    def _from_host(self, sources: list[int], targets: list[int]) -> Iterator[tuple[CopyEvent, int]]:
        """Yields, for each group of layers, the event of its copy and how many blocks are good."""
        host = self._pools[Tier.HOST]
        ids = checked_map(sources, host.num_blocks, targets, self._device.num_blocks)
        for layers in self.groups:
            yield self._onboard.begin(*ids, layers), len(sources)

    def _from_disk(
        self, sources: list[int], targets: list[int], generations: Sequence[int]
    ) -> Iterator[tuple[CopyEvent, int]]:
        """Yields as `_from_host`; only the last number is how many blocks are good."""
        assert self._disk is not None, "there is no disk tier"
        slots, into = checked_map(sources, self._disk.num_slots, targets, self._device.num_blocks)
        order = np.argsort(slots)
        pieces = DiskPieces(self._disk, slots[order], [generations[n] for n in order])
        good = len(sources)
        for layers, later in pairwise([*self.groups, slice(0, 0)]):
            event = self._read(pieces, into[order], layers, later)
            if not later.stop:
                lost = pieces.finish()
                for error in islice(lost.values(), 1):
                    log.warning("%s (%d of %d blocks were lost)", error, len(lost), good)
                good = min((int(order[n]) for n in lost), default=good)
            yield event, good

    def _read(self, pieces: DiskPieces, into: Ids, layers: slice, later: slice) -> CopyEvent:
        next_bytes = (later.stop - later.start) * self._device.shape.layer_words * WORD_BYTES
        slots = self._device.words[:, layers]
        if isinstance(self._loading, HostStream):
            pieces.read(_rows(slots, into), next_bytes)
            return self._loading.submit(lambda: None)
        staged = torch.empty(
            (len(into), *slots.shape[1:]), dtype=slots.dtype, pin_memory=slots.is_cuda
        )
        pieces.read(_rows(staged, np.arange(len(into))), next_bytes)
        return self._loading.submit(partial(_put_rows, staged, slots, into))

    def _store(self, move: Move, sources: list[int], targets: list[int]) -> int:
        if move.target is Tier.HOST:
            self._offload.copy(sources, targets)
            return len(sources)
        assert self._disk is not None, "there is no disk tier"
        pool = self._pools[move.source]
        block_ids, slots = checked_map(sources, pool.num_blocks, targets, self._disk.num_slots)
        blocks = [
            DiskBlock(slot.generation, block, slot.parent)
            for slot, block in zip(move.targets, move.blocks, strict=True)
        ]
        step = max(1, STAGED_BYTES // pool.shape.block_bytes)
        if not pool.words.is_cuda:  # nothing is staged, and each write ends with a wait for threads
            step = max(1, len(sources))
        for at in range(0, len(sources), step):
            part = slice(at, at + step)
            done = self._write(pool, block_ids[part], slots[part], blocks[part])
            if done < len(slots[part]):
                return at + done
        return len(sources)

    def _write(
        self, pool: MemoryPool, block_ids: Ids, slots: Ids, blocks: Sequence[DiskBlock]
    ) -> int:
        """Writes blocks to disk in the order of its slots; returns how many leading ones went."""
        assert self._disk is not None
        order = np.argsort(slots)
        slots, places = slots[order], block_ids[order]
        words = pool.words
        if words.is_cuda:
            words, places = self._staged(pool, places), np.arange(len(slots))
        failed = self._disk.write(slots, [blocks[n] for n in order], _rows(words, places))
        for n, error in islice(failed.items(), 1):
            log.warning(
                "block %016x was not stored in disk slot %d: %s (%d of %d blocks were not)",
                hash_of(blocks[order[n]].block),
                slots[n],
                error,
                len(failed),
                len(slots),
            )
        return min((int(order[n]) for n in failed), default=len(slots))

    def _staged(self, pool: MemoryPool, block_ids: Ids) -> Tensor:
        """Returns a copy of the blocks in pinned memory."""
        shape = (len(block_ids), *pool.words.shape[1:])
        staged = torch.empty(shape, dtype=pool.words.dtype, pin_memory=True)

        def leave() -> None:
            at = torch.from_numpy(block_ids).to(pool.device)
            staged.copy_(pool.words.index_select(0, at), non_blocking=True)

        self._storing.submit(leave).synchronize()
        return staged


def _put_rows(rows: Tensor, target: Tensor, target_ids: Ids) -> None:
    """Writes rows of host memory to rows of the device; on CUDA, only starts to."""
    at = torch.from_numpy(target_ids).to(target.device)
    target.index_copy_(0, at, rows.to(target.device, non_blocking=True))


def _rows(words: Tensor, ids: Ids) -> list[memoryview]:
    """Returns the bytes of these rows, each of which lies together."""
    rows = words.numpy()
    return [rows[n].reshape(-1).data.cast("B") for n in ids.tolist()]
