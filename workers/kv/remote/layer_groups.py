"""Layers of scattered blocks, packed in host memory as they travel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from xxhash import xxh3_64_intdigest

from app.core.types import SequenceHash
from workers.kv.copiers import copy_bytes, copy_gathered, new_stream, on_stream
from workers.kv.memory import WORD_BYTES, Ids, MemoryPool

GROUP_BYTES = 64 << 10
"""Of a block, so much travels at once, in whole layers: with less, each piece costs more than its
bytes."""
_U64 = (1 << 64) - 1


class LayerGroups:
    """Copies groups of layers out of a pool and into it. Calls block, and may come from any thread.

    Slots are given as an array of distinct ones of the pool.
    """

    def __init__(self, pool: MemoryPool) -> None:
        layer_bytes = pool.shape.layer_words * WORD_BYTES
        self.layers_per_group = min(pool.shape.num_layers, -(-GROUP_BYTES // layer_bytes))
        self.num_groups = -(-pool.shape.num_layers // self.layers_per_group)
        self._words = pool.words
        self._copy = copy_gathered if pool.words.is_cuda else copy_bytes
        self._stream = new_stream(pool)

    def packed(self, group: int, num_blocks: int) -> Tensor:
        """Host memory for that many blocks' layers of a group, pinned beside a CUDA device."""
        size = (num_blocks, *self._layers(group).shape[1:])
        return torch.empty(size, dtype=self._words.dtype, pin_memory=self._words.is_cuda)

    def read(self, group: int, block_ids: Ids) -> Tensor:
        """Those blocks' layers, packed."""
        packed = self.packed(group, len(block_ids))
        self._carry(self._layers(group), packed, block_ids, np.arange(len(block_ids)))
        return packed

    def write(self, group: int, block_ids: Ids, packed: Tensor) -> None:
        """Write the first blocks of `packed` to as many slots."""
        if len(block_ids):
            self._carry(packed, self._layers(group), np.arange(len(block_ids)), block_ids)

    def _layers(self, group: int) -> Tensor:
        first = group * self.layers_per_group
        return self._words[:, first : first + self.layers_per_group]

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
