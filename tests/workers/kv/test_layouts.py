from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.workers.kv.pools import DTYPES, filled, same
from workers.kv.layouts import Layout, empty_layers, layer_views, read_layers, reshard, write_layers
from workers.kv.memory import KVShape, MemoryPool, host_pool

SMALL = KVShape(num_layers=3, num_kv_heads=8, head_size=4, dtype=torch.float32, block_size=2)
ODD = KVShape(num_layers=2, num_kv_heads=1, head_size=3, dtype=torch.bfloat16, block_size=3)
"""36 bytes a layer, which are not a whole number of 8-byte words."""


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_are_views_of_the_pool(layout: Layout, dtype: torch.dtype) -> None:
    shape = replace(SMALL, dtype=dtype)
    pool = filled(MemoryPool(shape, 5))
    views = layer_views(pool.kv, layout)
    own = empty_layers(shape, 5, layout)
    assert [view.shape for view in views] == [layer.shape for layer in own]
    for n, view in enumerate(views):
        assert view.data_ptr() == pool.kv[:, n].data_ptr()
        for block, is_value in product(range(5), range(2)):
            at = (block, is_value) if layout is Layout.BLOCK_FIRST else (is_value, block)
            assert same(view[at], pool.kv[block, n, is_value])


@pytest.mark.parametrize("shape", [SMALL, ODD], ids=["words", "odd"])
@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_are_written_into_an_engines_layers_and_read_back(
    layout: Layout, dtype: torch.dtype, shape: KVShape
) -> None:
    shape = replace(shape, dtype=dtype)
    pool = filled(MemoryPool(shape, 6))
    layers = empty_layers(shape, 9, layout)
    slots = [7, 0, 3]
    write_layers(layers, layout, slots, pool.kv[[1, 5, 2]])
    for n, layer in enumerate(layers):
        by_block = layer if layout is Layout.BLOCK_FIRST else layer.transpose(0, 1)
        for slot, block in zip(slots, (1, 5, 2), strict=True):
            assert same(by_block[slot], pool.kv[block, n])
        untouched = [b for b in range(9) if b not in slots]
        assert not by_block[untouched].view(torch.uint8).any()
    assert same(read_layers(layers, layout, [3, 7]), pool.kv[[2, 1]])


def test_blocks_must_match_the_slots_in_number_and_be_in_range() -> None:
    pool = MemoryPool(SMALL, 4)
    layers = empty_layers(SMALL, 4, Layout.KV_FIRST)
    with pytest.raises(ValueError, match="2 blocks for 1 slots"):
        write_layers(layers, Layout.KV_FIRST, [0], pool.kv[:2])
    with pytest.raises(ValueError, match="block 4 is not in a pool of 4 blocks"):
        read_layers(layers, Layout.KV_FIRST, [4])


def naive_reshard(
    sources: Sequence[Tensor],
    source_ids: Sequence[int],
    targets: Sequence[Tensor],
    target_ids: Sequence[int],
) -> None:
    """Copies head by head through the unsharded block."""
    for a, b in zip(source_ids, target_ids, strict=True):
        whole = torch.cat([source[a] for source in sources], dim=-2)
        per_rank = whole.shape[-2] // len(targets)
        for head in range(whole.shape[-2]):
            targets[head // per_rank][b][..., head % per_rank, :] = whole[..., head, :]


def ranks(shape: KVShape, tp_size: int, num_blocks: int, seed: int) -> list[Tensor]:
    return [
        filled(MemoryPool(replace(shape, tp_size=tp_size, tp_rank=n), num_blocks), seed + n).kv
        for n in range(tp_size)
    ]


@pytest.mark.parametrize("head_size", [4, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("source_tp", "target_tp"), [*product([1, 2, 4, 8], repeat=2)])
def test_resharding_equals_a_naive_copy_and_is_reversible(
    source_tp: int, target_tp: int, dtype: torch.dtype, head_size: int
) -> None:
    shape = replace(SMALL, dtype=dtype, head_size=head_size)
    rng = random.Random(source_tp * 8 + target_tp)
    sources = ranks(shape, source_tp, 7, seed=100)
    targets = ranks(shape, target_tp, 9, seed=200)
    expected = [kv.clone() for kv in targets]
    source_ids, target_ids = rng.sample(range(7), 4), rng.sample(range(9), 4)

    reshard(sources, source_ids, targets, target_ids)
    naive_reshard(sources, source_ids, expected, target_ids)
    for found, wanted in zip(targets, expected, strict=True):
        assert same(found, wanted)

    back = ranks(shape, source_tp, 7, seed=300)
    others = [kv.clone() for kv in back]
    reshard(targets, target_ids, back, source_ids)
    untouched = [n for n in range(7) if n not in source_ids]
    for found, wanted, before in zip(back, sources, others, strict=True):
        assert same(found[source_ids], wanted[source_ids])
        assert same(found[untouched], before[untouched])


def test_ranks_of_different_models_cannot_be_resharded() -> None:
    sources, targets = ranks(SMALL, 2, 3, seed=0), ranks(SMALL, 4, 3, seed=0)
    with pytest.raises(ValueError, match="8 heads are not 6"):
        reshard(sources, [0], targets[:3], [0])
    with pytest.raises(ValueError, match="2 blocks for 1 slots"):
        reshard(sources, [0, 1], targets, [0])
    others: list[dict[str, Any]] = [
        {"num_layers": 1},
        {"block_size": 1},
        {"head_size": 2},
        {"dtype": torch.bfloat16},
    ]
    for other in others:
        with pytest.raises(ValueError, match="blocks differ in more than their heads"):
            reshard(ranks(replace(SMALL, **other), 2, 3, seed=0), [0], targets, [0])


@pytest.mark.gpu
def test_blocks_are_written_into_layers_on_a_device_and_read_back() -> None:
    host = filled(host_pool(ODD, 4))
    layers = empty_layers(ODD, 4, Layout.KV_FIRST, "cuda")
    write_layers(layers, Layout.KV_FIRST, [3, 1], host.kv[:2].cuda())
    assert same(read_layers(layers, Layout.KV_FIRST, [1, 3]), host.kv[[1, 0]])
