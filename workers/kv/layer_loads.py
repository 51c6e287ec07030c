"""Loads onto the device, layer by layer, from host memory and from disk."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice, pairwise

import numpy as np
import torch
from torch import Tensor

from app.core.errors import BlockLost
from app.core.types import Tier
from workers.kv.arrival import CopyEvent
from workers.kv.copiers import PoolCopier
from workers.kv.disk import SlotFile
from workers.kv.disk_pieces import DiskPieces
from workers.kv.memory import WORD_BYTES, HostStream, Ids, MemoryPool, checked_map, new_stream
from workers.kv.slots import Move

log = logging.getLogger(__name__)


class LayerLoads:
    """Fills slots of `device`: with all of a load's first layers, then with the next ones.

    host, disk: where blocks come from, if they do. Each load's `arrival` is told how far it is.
    """

    def __init__(self, device: MemoryPool, host: MemoryPool | None, disk: SlotFile | None) -> None:
        self.groups = device.shape.layer_groups
        self._device = device
        self._disk = disk
        self._host = None if host is None else PoolCopier(host, device, self.groups[0].stop)
        self._stream = new_stream(device)
        """For what comes from disk."""

    def carry_out(self, move: Move, count: int) -> int:
        """Load the first `count` blocks; returns how many leading ones are good."""
        move.arrival.limit(count)
        sources = [slot.block_id for slot in move.sources[:count]]
        targets = [slot.block_id for slot in move.targets[:count]]
        if not count:
            return 0
        done, event = count, None
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
            self._stream.submit(partial(self._clear, lost)).synchronize()
        return done

    def _clear(self, slots: Sequence[int]) -> None:
        self._device.words[slots] = 0

    def _from_host(self, sources: list[int], targets: list[int]) -> Iterator[tuple[CopyEvent, int]]:
        """For each group of layers: the event of its copy, and how many blocks are good."""
        assert self._host is not None, "there is no host tier"
        ids = checked_map(sources, self._host.source.num_blocks, targets, self._device.num_blocks)
        for layers in self.groups:
            yield self._host.begin(*ids, layers), len(sources)

    def _from_disk(
        self, sources: list[int], targets: list[int], generations: Sequence[int]
    ) -> Iterator[tuple[CopyEvent, int]]:
        """The same. Only with the last group it is known which blocks are good."""
        assert self._disk is not None, "there is no disk tier"
        slots, into = checked_map(sources, self._disk.num_slots, targets, self._device.num_blocks)
        order = np.argsort(slots)
        pieces = self._disk.pieces(slots[order], [generations[n] for n in order])
        good = len(sources)
        for layers, later in pairwise([*self.groups, slice(0, 0)]):
            event = self._read(pieces, into[order], layers, later)
            if not later.stop:
                lost = pieces.finish()
                _warn(lost, good)
                good = min((int(order[n]) for n in lost), default=good)
            yield event, good

    def _read(self, pieces: DiskPieces, into: Ids, layers: slice, later: slice) -> CopyEvent:
        next_bytes = (later.stop - later.start) * self._device.shape.layer_words * WORD_BYTES
        slots = self._device.words[:, layers]
        if isinstance(self._stream, HostStream):
            pieces.read(rows_of(slots, into), next_bytes)
            return self._stream.submit(lambda: None)
        staged = torch.empty(
            (len(into), *slots.shape[1:]), dtype=slots.dtype, pin_memory=slots.is_cuda
        )
        pieces.read(rows_of(staged, np.arange(len(into))), next_bytes)
        return self._stream.submit(partial(put_rows, staged, slots, into))


def put_rows(rows: Tensor, target: Tensor, target_ids: Ids) -> None:
    """Write rows of host memory to rows of the device; on CUDA, only start to."""
    at = torch.from_numpy(target_ids).to(target.device)
    target.index_copy_(0, at, rows.to(target.device, non_blocking=True))


def rows_of(words: Tensor, ids: Ids) -> list[memoryview]:
    """The bytes of these rows, each of which lies together."""
    rows = words.numpy()
    return [rows[n].reshape(-1).data.cast("B") for n in ids.tolist()]


def _warn(lost: dict[int, BlockLost], num_blocks: int) -> None:
    for error in islice(lost.values(), 1):
        log.warning("%s (%d of %d blocks were lost)", error, len(lost), num_blocks)
