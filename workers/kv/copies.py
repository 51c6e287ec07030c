"""Copies whole KV blocks between device, host and disk."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from app.core.types import Tier
from workers.kv.copiers import STAGED_BYTES, PoolCopier
from workers.kv.disk import Blocks, SlotFile
from workers.kv.disk_records import DiskBlock
from workers.kv.identity import hash_of
from workers.kv.layer_loads import LayerLoads, put_rows
from workers.kv.memory import WORD_BYTES, Ids, MemoryPool, checked_map, new_stream
from workers.kv.slots import Move

log = logging.getLogger(__name__)

UNSTAGED_BYTES = 256 << 20
"""Written to or read from disk as one batch where the memory needs no staging: each batch ends with
a wait for all threads."""


class Copies:
    """Copies blocks between all tiers of a worker; calls block, and may come from any thread.

    Every failure is reported as a number: how many leading blocks are copied correctly. A block
    does not count if it could not be read, did not match its checksum or was not taken by a full
    disk, nor if its slot was meanwhile given to another block.
    """

    def __init__(self, pools: Mapping[Tier, MemoryPool], disk: SlotFile | None = None) -> None:
        self._pools = dict(pools)
        self._disk = disk
        for tier, pool in pools.items():
            if disk is not None and disk.block_bytes != pool.shape.block_bytes:
                raise ValueError(
                    f"blocks of {pool.shape.block_bytes} bytes of the {tier.name} tier do not fit "
                    f"those of {disk.block_bytes} on disk"
                )
        self._copiers = {
            (a, b): PoolCopier(pools[a], pools[b]) for a in pools for b in pools if a is not b
        }
        self._loads = None
        if Tier.DEVICE in pools and len(pools[Tier.DEVICE].shape.layer_groups) > 1:
            self._loads = LayerLoads(pools[Tier.DEVICE], pools.get(Tier.HOST), disk)
        self._stream = new_stream(*pools.values())
        """For blocks that the device has from the disk, or gives to it."""

    def carry_out(self, move: Move, at_most: int | None = None) -> int:
        """Copy the blocks of a move; returns how many leading ones are now copied.

        at_most: of its blocks, as many as may be good. A load arrives layer by layer.
        """
        count = min(move.num_ready, len(move.blocks) if at_most is None else at_most)
        if move.is_load and self._loads is not None:
            return self._loads.carry_out(move, count)
        if move.source is Tier.DISK:
            generations = move.generations
        else:
            generations = [slot.generation for slot in move.targets]
        on_disk = [
            DiskBlock(generation, block, slot.parent)
            for generation, block, slot in zip(generations, move.blocks, move.targets, strict=True)
        ]
        done = self.copy_blocks(
            move.source,
            move.target,
            [slot.block_id for slot in move.sources[:count]],
            [slot.block_id for slot in move.targets[:count]],
            on_disk[:count],
        )
        done = min(done, move.num_ready)
        if move.is_load:
            move.arrival.limit(done)
            num_layers = self._pools[Tier.DEVICE].shape.num_layers
            move.arrival.arrive(num_layers, num_layers)
        return done

    def copy_blocks(
        self,
        source: Tier,
        target: Tier,
        source_ids: Sequence[int],
        target_ids: Sequence[int],
        on_disk: Sequence[DiskBlock] = (),
    ) -> int:
        """Copy blocks from one tier's slots to another's; returns how many leading ones are copied.

        on_disk: one for each block if either tier is the disk. Raises ValueError if slots are not
        in their tiers, are named twice, or differ in number between the two sides.
        """
        if Tier.DISK not in (source, target):
            self._copiers[source, target].copy(source_ids, target_ids)
            return len(source_ids)
        assert self._disk is not None, "there is no disk tier"
        pool = self._pools[target if source is Tier.DISK else source]
        num_slots = {
            source: pool.num_blocks,
            target: pool.num_blocks,
            Tier.DISK: self._disk.num_slots,
        }
        sources, targets = checked_map(source_ids, num_slots[source], target_ids, num_slots[target])
        copy = self._load if source is Tier.DISK else self._store
        at_once = STAGED_BYTES if pool.words.is_cuda else UNSTAGED_BYTES
        step = max(1, at_once // pool.shape.block_bytes)
        for at in range(0, len(sources), step):
            part = slice(at, at + step)
            done = copy(pool, sources[part], targets[part], on_disk[part])
            if done < len(sources[part]):
                return at + done
        return len(sources)

    def _store(
        self, pool: MemoryPool, block_ids: Ids, slots: Ids, on_disk: Sequence[DiskBlock]
    ) -> int:
        if pool.words.is_cpu:
            return self._on_disk(self._write, slots, on_disk, pool.words, block_ids)
        staged = _staged(pool, len(slots))

        def leave() -> None:
            at = torch.from_numpy(block_ids).to(pool.device)
            staged.copy_(pool.words.index_select(0, at), non_blocking=True)

        self._stream.submit(leave).synchronize()
        return self._on_disk(self._write, slots, on_disk, staged, np.arange(len(slots)))

    def _load(
        self, pool: MemoryPool, slots: Ids, block_ids: Ids, on_disk: Sequence[DiskBlock]
    ) -> int:
        if pool.words.is_cpu:
            return self._on_disk(self._read, slots, on_disk, pool.words, block_ids)
        staged = _staged(pool, len(slots))
        done = self._on_disk(self._read, slots, on_disk, staged, np.arange(len(slots)))
        self._stream.submit(
            partial(put_rows, staged[:done], pool.words, block_ids[:done])
        ).synchronize()
        return done

    def _on_disk(
        self,
        act: Callable[[Ids, Sequence[DiskBlock], Blocks, Ids], Iterable[int]],
        slots: Ids,
        on_disk: Sequence[DiskBlock],
        words: Tensor,
        places: Ids,
    ) -> int:
        """Run `act` on all blocks, in slot order; returns how many leading ones succeeded.

        words: in host memory; places: where the blocks are there. act: returns the positions of
        those that failed.
        """
        order = np.argsort(slots)
        nths = order.tolist()
        in_order = [on_disk[n] for n in nths]
        failed = act(slots[order], in_order, _blocks(words), places[order])
        return min((nths[n] for n in failed), default=len(slots))

    def _write(
        self, slots: Ids, on_disk: Sequence[DiskBlock], memory: Blocks, places: Ids
    ) -> Iterable[int]:
        assert self._disk is not None
        failed = self._disk.write(slots, on_disk, memory, places)
        for n, error in islice(failed.items(), 1):
            log.warning(
                "block %016x was not stored in disk slot %d: %s (%d of %d blocks were not)",
                hash_of(on_disk[n].block),
                slots[n],
                error,
                len(failed),
                len(slots),
            )
        return failed

    def _read(
        self, slots: Ids, on_disk: Sequence[DiskBlock], memory: Blocks, places: Ids
    ) -> Iterable[int]:
        assert self._disk is not None
        lost = self._disk.read(slots, [what.generation for what in on_disk], memory, places)
        for error in islice(lost.values(), 1):
            log.warning("%s (%d of %d blocks were lost)", error, len(lost), len(slots))
        return lost


def _staged(pool: MemoryPool, num_blocks: int) -> Tensor:
    """Pinned memory for blocks on their way between a CUDA device and the disk."""
    shape = (num_blocks, *pool.words.shape[1:])
    return torch.empty(shape, dtype=pool.words.dtype, pin_memory=True)


def _blocks(words: Tensor) -> Blocks:
    """The same host memory."""
    return words.numpy().view(np.uint8).reshape(-1).view(f"V{words[0].numel() * WORD_BYTES}")
