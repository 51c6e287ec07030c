"""For engines you write, as none here calls it: blocks in other layouts, and for other ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum

import torch
from torch import Tensor

from workers.kv.memory import KVShape, checked_ids, checked_map

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)


class Layout(Enum):
    """How an engine lays out the blocks of one layer; it keeps one tensor per layer."""

    BLOCK_FIRST = 0
    """(num_blocks, 2, block_size, num_heads, head_size), as FlashInfer has it."""
    KV_FIRST = 1
    """(2, num_blocks, block_size, num_heads, head_size), as FlashAttention in vLLM has it.

    The value is the index of the block dimension.
    """


def layer_views(kv: Tensor, layout: Layout) -> list[Tensor]:
    """Each layer of a pool's `kv` in that layout, as a strided view of the same memory."""
    return [layer.movedim(0, layout.value) for layer in kv.unbind(1)]


def empty_layers(
    shape: KVShape, num_blocks: int, layout: Layout, device: torch.device | str = "cpu"
) -> list[Tensor]:
    """Zeroed memory for blocks in an engine's layout."""
    sizes = list(shape.layer_shape)
    sizes.insert(layout.value, num_blocks)
    return [torch.zeros(sizes, dtype=shape.dtype, device=device) for _ in range(shape.num_layers)]


def read_layers(layers: Sequence[Tensor], layout: Layout, block_ids: Sequence[int]) -> Tensor:
    """Those blocks of an engine's layers in the pool's layout: (len(block_ids), *block_shape)."""
    ids = checked_ids(block_ids, layers[0].shape[layout.value])
    at = torch.from_numpy(ids).to(layers[0].device)
    words = [_as_words(layer) for layer in layers]
    of_block = list(words[0].shape)
    del of_block[layout.value]
    blocks = words[0].new_empty((len(ids), len(words), *of_block))
    for layer, of_layer in zip(words, layer_views(blocks, layout), strict=True):
        of_layer.copy_(layer.index_select(layout.value, at))
    return blocks.view(layers[0].dtype)


def write_layers(
    layers: Sequence[Tensor], layout: Layout, block_ids: Sequence[int], blocks: Tensor
) -> None:
    """Write blocks in the pool's layout into the given slots of an engine's layers."""
    ids = checked_ids(block_ids, layers[0].shape[layout.value])
    if len(ids) != len(blocks):
        raise ValueError(f"{len(blocks)} blocks for {len(ids)} slots")
    at = torch.from_numpy(ids).to(layers[0].device)
    for layer, of_layer in zip(layers, layer_views(_as_words(blocks), layout), strict=True):
        _as_words(layer).index_copy_(layout.value, at, of_layer)


def reshard(
    sources: Sequence[Tensor],
    source_ids: Sequence[int],
    targets: Sequence[Tensor],
    target_ids: Sequence[int],
) -> None:
    """Copy blocks from the ranks of one tensor-parallel group to those of another.

    sources, targets: `kv` of each rank, in order: (num_blocks, num_layers, 2, block_size,
    heads of the rank, head_size). Block source_ids[i] of all sources becomes block target_ids[i]
    of all targets; heads keep their order. Works for scattering and gathering alike. Raises
    ValueError if the blocks of the two groups do not fit each other.
    """
    heads = [sum(kv.shape[-2] for kv in kvs) for kvs in (sources, targets)]
    if heads[0] != heads[1]:
        raise ValueError(f"{heads[0]} heads are not {heads[1]}")
    # Copying would repeat a single layer or token, and take the bits of one type for another's.
    kinds = {(*kv.shape[1:-2], kv.shape[-1], kv.dtype) for kv in (*sources, *targets)}
    if len(kinds) > 1:
        raise ValueError(f"blocks differ in more than their heads: {kinds}")
    checked_map(
        source_ids,
        min(len(kv) for kv in sources),
        target_ids,
        min(len(kv) for kv in targets),
    )
    for source, source_heads in _with_heads(sources):
        for target, target_heads in _with_heads(targets):
            first = max(source_heads.start, target_heads.start)
            last = min(source_heads.stop, target_heads.stop)
            if first >= last:
                continue
            part = _as_words(source)[..., first - source_heads.start : last - source_heads.start, :]
            into = _as_words(target)[..., first - target_heads.start : last - target_heads.start, :]
            # One by one: index_copy_ into a strided view is twenty times slower.
            for source_id, target_id in zip(source_ids, target_ids, strict=True):
                into[target_id].copy_(part[source_id])


def _with_heads(ranks: Sequence[Tensor]) -> Iterator[tuple[Tensor, range]]:
    """Each rank's `kv`, with the range of the model's heads that it holds."""
    first = 0
    for kv in ranks:
        yield kv, range(first, first + kv.shape[-2])
        first += kv.shape[-2]


def _as_words(kv: Tensor) -> Tensor:
    """The same memory as integers, of the widest type that evenly divides the last dimension."""
    row_bytes = kv.shape[-1] * kv.element_size()
    return kv.view(next(d for d in _INTEGERS if row_bytes % d.itemsize == 0))
