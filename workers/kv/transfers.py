"""Copies KV blocks between device, host and disk: whole blocks at once, or layer by layer."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from app.core.types import Tier
from workers.kv.copiers import STAGED_BYTES, Copier, new_stream, on_stream
from workers.kv.disk import Blocks, DiskBlock, SlotFile
from workers.kv.memory import WORD_BYTES, Ids, MemoryPool, checked_map
from workers.kv.slots import Move

log = logging.getLogger(__name__)

GROUP_BYTES = 64 << 10
"""A copy stream moves this much of a block at once, or all of it: smaller copies cost more."""
UNSTAGED_BYTES = 256 << 20
"""Written to or read from disk as one batch where the memory needs no staging: each batch ends with
a wait for all threads."""


class CopyStream(ABC):
    """Copies blocks layer by layer while the caller does something else.

    Call `prepare`, then `trigger_layer`, `trigger_group` or `trigger_all` in any order, then
    `wait_layer` before a layer is used, and `wait` at the end; then trigger again, or prepare other
    blocks. Layers are copied in groups of at least 64 KiB per block: a layer is triggered and
    waited for together with its group.
    """

    def __init__(self, source: MemoryPool, target: MemoryPool) -> None:
        layer_bytes = source.shape.layer_words * WORD_BYTES
        self.layers_per_group = min(source.shape.num_layers, -(-GROUP_BYTES // layer_bytes))
        self.num_groups = -(-source.shape.num_layers // self.layers_per_group)
        self._copier = Copier(source, target, self.layers_per_group)
        self._source_ids = self._target_ids = np.empty(0, np.int64)
        self._triggered = [False] * self.num_groups

    def prepare(self, source_ids: Sequence[int], target_ids: Sequence[int]) -> None:
        """Set which blocks go where. Raises ValueError, also if the last ones were not awaited."""
        if any(self._triggered):
            raise ValueError("the blocks prepared before were triggered but not waited for")
        source, target = self._copier.source, self._copier.target
        self._source_ids, self._target_ids = checked_map(
            source_ids, source.num_blocks, target_ids, target.num_blocks
        )

    def group_of(self, layer: int) -> int:
        """The group of a layer. Raises ValueError if there is no such layer."""
        if not 0 <= layer < self._copier.source.shape.num_layers:
            raise ValueError(f"layer {layer} of {self._copier.source.shape.num_layers}")
        return layer // self.layers_per_group

    def trigger_layer(self, layer: int) -> None:
        self.trigger_group(self.group_of(layer))

    def trigger_group(self, group: int) -> None:
        """Start copying a group, unless it is already triggered. Raises ValueError."""
        if not 0 <= group < self.num_groups:
            raise ValueError(f"group {group} of {self.num_groups}")
        if not self._triggered[group]:
            first = group * self.layers_per_group
            self._trigger(group, slice(first, first + self.layers_per_group))
            self._triggered[group] = True

    def trigger_all(self) -> None:
        for group in range(self.num_groups):
            self.trigger_group(group)

    def wait_layer(self, layer: int) -> None:
        """Wait until that layer is copied; on CUDA, make later work on the current stream wait for
        it.

        Raises ValueError for a layer that was not triggered, and whatever made its copy fail.
        """
        group = self.group_of(layer)
        if not self._triggered[group]:
            raise ValueError(f"layer {layer} was not triggered")
        self._wait(group)

    def wait(self) -> None:
        """Wait until all that was triggered is copied. Raises whatever made a copy fail."""
        triggered = [group for group, begun in enumerate(self._triggered) if begun]
        self._triggered = [False] * self.num_groups
        self._finish(triggered)

    def close(self) -> None:
        """Wait for any copies under way, and shut down."""
        self.wait()

    @abstractmethod
    def _trigger(self, group: int, layers: slice) -> None: ...

    @abstractmethod
    def _wait(self, group: int) -> None: ...

    @abstractmethod
    def _finish(self, groups: Sequence[int]) -> None: ...


class ThreadCopyStream(CopyStream):
    """Copies on a thread of its own: between host memory where there is no CUDA device."""

    def __init__(self, source: MemoryPool, target: MemoryPool) -> None:
        super().__init__(source, target)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="copy-stream")
        self._copies: dict[int, Future[None]] = {}

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._thread.shutdown()

    def _trigger(self, group: int, layers: slice) -> None:
        self._copies[group] = self._thread.submit(
            self._copier.begin, self._source_ids, self._target_ids, layers
        )

    def _wait(self, group: int) -> None:
        self._copies[group].result()

    def _finish(self, groups: Sequence[int]) -> None:
        errors = [self._copies.pop(group).exception() for group in groups]
        for error in errors:
            if error is not None:
                raise error


class CudaCopyStream(CopyStream):
    """Copies on a CUDA stream of its own, with an event for each group of layers."""

    def __init__(self, source: MemoryPool, target: MemoryPool) -> None:
        super().__init__(source, target)
        self._device = target.device if target.device.type == "cuda" else source.device
        self._events: list[torch.cuda.Event] = [
            torch.cuda.Event()  # type: ignore[no-untyped-call]
            for _ in range(self.num_groups)
        ]

    def _trigger(self, group: int, layers: slice) -> None:
        # What the caller has begun to write to the source, or read from the target, comes first.
        with on_stream(self._copier.stream):
            self._copier.begin(self._source_ids, self._target_ids, layers)
            self._events[group].record()

    def _wait(self, group: int) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._events[group])

    def _finish(self, groups: Sequence[int]) -> None:
        for group in groups:
            self._events[group].synchronize()


def copy_stream(source: MemoryPool, target: MemoryPool) -> CopyStream:
    """A CUDA copy stream if either pool is on a CUDA device, otherwise a thread."""
    on_cuda = "cuda" in (source.device.type, target.device.type)
    return CudaCopyStream(source, target) if on_cuda else ThreadCopyStream(source, target)


class Transfers:
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
        self._stream = None if disk is None else new_stream(*pools.values())
        """For copies between the device and the disk."""
        self._copiers = {
            (a, b): Copier(pools[a], pools[b]) for a in pools for b in pools if a is not b
        }

    def carry_out(self, move: Move) -> int:
        """Copy the blocks of a move; returns how many leading ones are now copied."""
        count = move.num_ready
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
        return min(done, move.num_ready)

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
        with on_stream(self._stream if pool.words.is_cuda else None):
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
        at = torch.from_numpy(block_ids).to(pool.device)
        staged = _staged(pool, len(slots)).copy_(pool.words.index_select(0, at))
        return self._on_disk(self._write, slots, on_disk, staged, np.arange(len(slots)))

    def _load(
        self, pool: MemoryPool, slots: Ids, block_ids: Ids, on_disk: Sequence[DiskBlock]
    ) -> int:
        if pool.words.is_cpu:
            return self._on_disk(self._read, slots, on_disk, pool.words, block_ids)
        staged = _staged(pool, len(slots))
        done = self._on_disk(self._read, slots, on_disk, staged, np.arange(len(slots)))
        at = torch.from_numpy(block_ids[:done]).to(pool.device)
        pool.words.index_copy_(0, at, staged[:done].to(pool.device))
        torch.cuda.current_stream(pool.device).synchronize()
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
                on_disk[n].block,
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
