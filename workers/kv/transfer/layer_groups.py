"""Layers of scattered blocks, packed in host memory as they travel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from xxhash import xxh3_64_intdigest

from app.core.types import SequenceHash
from workers.kv.copiers import copy_bytes, copy_gathered, new_stream, on_stream
from workers.kv.memory import WORD_BYTES, Ids, KVShape, MemoryPool, as_numbers

GROUP_BYTES = 64 << 10
"""Of a block, so much travels at once, in whole layers: with less, each piece costs more than its
bytes."""
_U64 = (1 << 64) - 1


class LayerGroups:
    """Copies groups of layers out of a worker's pools and into them.

    pools: one for each rank, in order. What is packed has the heads of all of them, as the pool of
    a single rank would: so the other side may split the heads otherwise. Slots are given as an
    array of distinct ones of the pools. Calls block, and may come from any thread.
    """

    def __init__(self, pools: Sequence[MemoryPool]) -> None:
        self._shape = shape = pools[0].shape.whole
        layer_bytes = shape.layer_words * WORD_BYTES
        self.layers_per_group = min(shape.num_layers, -(-GROUP_BYTES // layer_bytes))
        self.num_groups = -(-shape.num_layers // self.layers_per_group)
        self._ranks = [_Rank(pool) for pool in pools]
        self._pinned = any(pool.words.is_cuda for pool in pools)

    def packed(self, group: int, num_blocks: int) -> Tensor:
        """Host memory for that many blocks' layers of a group, pinned beside a CUDA device."""
        return self._packed(self._shape, group, num_blocks)

    def read(self, group: int, block_ids: Ids) -> Tensor:
        """Those blocks' layers, packed."""
        packed = self.packed(group, len(block_ids))
        for rank, part, heads in self._split(group, packed):
            rank.read(self._layers(group), block_ids, part)
            if heads is not None:
                heads.copy_(as_numbers(part, rank.shape))
        return packed

    def write(self, group: int, block_ids: Ids, packed: Tensor) -> None:
        """Write the first blocks of `packed` to as many slots."""
        if not len(block_ids):
            return
        for rank, part, heads in self._split(group, packed):
            if heads is not None:
                as_numbers(part, rank.shape).copy_(heads)
            rank.write(self._layers(group), block_ids, part)

    def _split(self, group: int, packed: Tensor) -> Iterator[tuple[_Rank, Tensor, Tensor | None]]:
        """Each rank, memory for its part alone, and where its heads are among all; None: there is
        but one rank, and its part is `packed` itself."""
        if len(self._ranks) == 1:
            yield self._ranks[0], packed, None
            return
        heads = as_numbers(packed, self._shape).chunk(len(self._ranks), -2)
        for rank, own in zip(self._ranks, heads, strict=True):
            yield rank, self._packed(rank.shape, group, len(packed)), own

    def _packed(self, shape: KVShape, group: int, num_blocks: int) -> Tensor:
        num_layers = len(range(shape.num_layers)[self._layers(group)])
        size = num_blocks, num_layers, shape.layer_words
        packed = torch.empty(size, dtype=torch.int64, pin_memory=self._pinned)
        packed[..., -1] = 0  # what fills up the last word travels too
        return packed

    def _layers(self, group: int) -> slice:
        first = group * self.layers_per_group
        return slice(first, first + self.layers_per_group)


class _Rank:
    """One rank's pool, which has a stream of its own for copies."""

    def __init__(self, pool: MemoryPool) -> None:
        self.shape = pool.shape
        self._words = pool.words
        self._copy = copy_gathered if pool.words.is_cuda else copy_bytes
        self._stream = new_stream(pool)

    def read(self, layers: slice, block_ids: Ids, packed: Tensor) -> None:
        self._carry(self._words[:, layers], packed, block_ids, np.arange(len(block_ids)))

    def write(self, layers: slice, block_ids: Ids, packed: Tensor) -> None:
        self._carry(packed, self._words[:, layers], np.arange(len(block_ids)), block_ids)

    def _carry(self, source: Tensor, target: Tensor, source_ids: Ids, target_ids: Ids) -> None:
        with on_stream(self._stream):
            try:
                self._copy(source, target, source_ids, target_ids)
            finally:  # even if it failed: afterwards, others may get the slots
                if self._stream is not None:
                    self._stream.synchronize()


def content(packed: Tensor) -> memoryview:
    """The same memory, as bytes."""
    return packed.numpy().data.cast("B")


def checksums(packed: Tensor, blocks: Sequence[SequenceHash], group: int) -> NDArray[np.uint64]:
    """Of each block's part: they differ between blocks and groups even if the contents do not."""
    rows = packed.numpy()
    return np.array(
        [
            xxh3_64_intdigest(row, seed=(block + group) & _U64)
            for row, block in zip(rows, blocks, strict=True)
        ],
        "<u8",
    )
