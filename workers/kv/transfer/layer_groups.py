"""Groups of layers of scattered blocks, packed in host memory as they travel."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from xxhash import xxh3_64_intdigest

from workers.kv.arrival import Arrival, CopyEvent
from workers.kv.copiers import copy_bytes, copy_gathered
from workers.kv.identity import BlockIdentity, hash_of
from workers.kv.memory import Ids, KVShape, MemoryPool, as_numbers, new_stream

_U64 = (1 << 64) - 1


class LayerGroups:
    """Groups of layers that are copied out of a worker's pools and into them.

    pools: one for each rank, in order. Packed blocks have the heads of all of them, as the pool of
    a single rank would: so the other side may split the heads otherwise. Slots are given as an
    array of distinct ones of the pools. Calls block, and may come from any thread.
    """

    def __init__(self, pools: Sequence[MemoryPool]) -> None:
        self._shape = shape = pools[0].shape.whole
        self._groups = shape.layer_groups
        self.num_groups = len(self._groups)
        self._ranks = [_Rank(pool) for pool in pools]
        self._pinned = any(pool.words.is_cuda for pool in pools)

    def packed(self, group: int, num_blocks: int) -> Tensor:
        """Returns host memory for so many blocks' layers of a group, pinned beside a GPU."""
        return self._packed(self._shape, group, num_blocks)

    def within(self, packed: Tensor, group: int) -> Tensor:
        """Returns the part that a group takes of the memory for the first group, the largest."""
        layers = self._groups[group]
        size = len(packed), layers.stop - layers.start, self._shape.layer_words
        return packed.view(-1)[: math.prod(size)].view(size)

    def read(self, group: int, block_ids: Ids) -> Tensor:
        """Returns these blocks' layers, packed."""
        packed = self.packed(group, len(block_ids))
        for rank, part, heads in self._split(group, packed):
            rank.read(self._groups[group], block_ids, part)
            if heads is not None:
                heads.copy_(as_numbers(part, rank.shape))
        return packed

    def write(self, group: int, block_ids: Ids, packed: Tensor) -> CopyEvent:
        """Writes the first blocks of `packed` to as many slots; returns the event of that. Where it
        raises, nothing more is written."""
        events: list[CopyEvent] = []
        try:
            for rank, part, heads in self._split(group, packed) if len(block_ids) else ():
                if heads is not None:
                    as_numbers(part, rank.shape).copy_(heads)
                events.append(rank.write(self._groups[group], block_ids, part))
        except BaseException:
            _All(events).synchronize()
            raise
        return _All(events)

    def arrived(self, group: int, arrival: Arrival, event: CopyEvent) -> None:
        """Tells `arrival` that this group is there with that event."""
        arrival.arrive(self._groups[group].stop, self._shape.num_layers, event)

    def _split(self, group: int, packed: Tensor) -> Iterator[tuple[_Rank, Tensor, Tensor | None]]:
        """Yields each rank, memory for its part alone, and where its heads are among all; None:
        there is but one rank, and its part is `packed` itself."""
        if len(self._ranks) == 1:
            yield self._ranks[0], packed, None
            return
        heads = as_numbers(packed, self._shape).chunk(len(self._ranks), -2)
        for rank, own in zip(self._ranks, heads, strict=True):
            yield rank, self._packed(rank.shape, group, len(packed)), own

    def _packed(self, shape: KVShape, group: int, num_blocks: int) -> Tensor:
        layers = self._groups[group]
        num_layers = layers.stop - layers.start
        size = num_blocks, num_layers, shape.layer_words
        packed = torch.empty(size, dtype=torch.int64, pin_memory=self._pinned)
        packed[..., -1] = 0  # what fills up the last word travels too
        return packed


@dataclass(frozen=True, slots=True)
class _All:
    """The event that all of these have happened."""

    events: Sequence[CopyEvent]

    def wait(self) -> None:
        for event in self.events:
            event.wait()

    def synchronize(self) -> None:
        for event in self.events:
            event.synchronize()


class _Rank:
    """One rank's pool, with a stream of its own for copies."""

    def __init__(self, pool: MemoryPool) -> None:
        self.shape = pool.shape
        self._words = pool.words
        self._copy = copy_gathered if pool.words.is_cuda else copy_bytes
        self._stream = new_stream(pool)

    def read(self, layers: slice, block_ids: Ids, packed: Tensor) -> None:
        there = np.arange(len(block_ids))
        words = self._words[:, layers]
        self._stream.submit(partial(self._copy, words, packed, block_ids, there)).synchronize()

    def write(self, layers: slice, block_ids: Ids, packed: Tensor) -> CopyEvent:
        there = np.arange(len(block_ids))
        words = self._words[:, layers]
        return self._stream.submit(partial(self._copy, packed, words, there, block_ids))


def content(packed: Tensor) -> memoryview:
    return packed.numpy().data.cast("B")


def checksums(packed: Tensor, blocks: Sequence[BlockIdentity], group: int) -> NDArray[np.uint64]:
    """Returns a checksum of each block's part, which depends on block and group too."""
    rows = packed.numpy()
    return np.array(
        [
            xxh3_64_intdigest(row, seed=(hash_of(block) + group) & _U64)
            for row, block in zip(rows, blocks, strict=True)
        ],
        "<u8",
    )
