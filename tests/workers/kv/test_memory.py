from __future__ import annotations

import logging
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from app.core.errors import ConfigError
from workers.kv import memory
from workers.kv.memory import (
    KVShape,
    Layout,
    MemoryPool,
    checked_ids,
    checked_map,
    empty_layers,
    host_pool,
    layer_views,
    read_layers,
    reshard,
    write_layers,
)

SMALL = KVShape(num_layers=3, num_kv_heads=8, head_size=4, dtype=torch.float32, block_size=2)
ODD = KVShape(num_layers=2, num_kv_heads=1, head_size=3, dtype=torch.bfloat16, block_size=3)
"""36 bytes a layer, which are not a whole number of 8-byte words."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8)


def filled(pool: MemoryPool, seed: int = 0) -> MemoryPool:
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 100, pool.kv.shape, dtype=torch.uint8, generator=generator)
    pool.kv.copy_(bits.to(pool.shape.dtype))
    return pool


def same(one: Tensor, other: Tensor) -> bool:
    """Compares bits, as torch cannot compare every type that it stores."""
    return torch.equal(
        one.contiguous().view(torch.uint8).cpu(), other.contiguous().view(torch.uint8).cpu()
    )


def test_a_block_is_one_row_of_all_layers_keys_before_values() -> None:
    assert SMALL.layer_shape == (2, 2, 8, 4)
    assert SMALL.block_shape == (3, 2, 2, 8, 4)
    assert SMALL.layer_bytes == 2 * 2 * 8 * 4 * 4
    assert SMALL.block_bytes == 3 * SMALL.layer_bytes
    pool = MemoryPool(SMALL, 5)
    assert pool.kv.shape == (5, 3, 2, 2, 8, 4)
    assert pool.words.shape == (5, 3, SMALL.layer_bytes // 8)
    pool.kv[4, 2, 1, 1, 7, 3] = 1.5
    assert pool.words[4, 2, -1] != 0
    assert pool.kv.data_ptr() == pool.words.data_ptr()


def test_ranks_share_the_heads() -> None:
    shape = replace(SMALL, tp_size=4, tp_rank=3)
    assert shape.num_heads == 2
    assert shape.block_bytes * 4 == SMALL.block_bytes


def test_layers_are_padded_to_a_whole_number_of_words() -> None:
    assert ODD.layer_bytes == 36
    assert ODD.layer_words == 5
    assert ODD.block_bytes == 80
    pool = filled(MemoryPool(ODD, 4))
    kept = pool.kv.clone()
    moved = MemoryPool(ODD, 4)
    moved.words.copy_(pool.words)
    assert same(moved.kv, kept)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_layers", 0, "num_layers: needs an integer of at least 1, got 0"),
        ("num_kv_heads", -8, "num_kv_heads: needs an integer of at least 1, got -8"),
        ("head_size", 2.5, "head_size: needs an integer of at least 1, got 2.5"),
        ("block_size", True, "block_size: needs an integer of at least 1, got True"),
        ("tp_size", 3, "tp_size: 3 ranks cannot share 8 KV heads evenly"),
        ("tp_size", 16, "tp_size: 16 ranks cannot share 8 KV heads evenly"),
        ("tp_rank", 1, "tp_rank: needs one of 1 ranks, got 1"),
        ("tp_rank", "0", "tp_rank: needs one of 1 ranks, got '0'"),
        ("dtype", "float16", "dtype: needs a numeric type, got 'float16'"),
        ("dtype", torch.bool, "dtype: needs a numeric type, got torch.bool"),
        ("dtype", torch.complex64, "dtype: needs a numeric type, got torch.complex64"),
    ],
)
def test_an_invalid_shape_is_refused(field: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        replace(SMALL, **{field: value})
    assert str(refused.value) == message


def test_a_pool_that_is_empty_or_too_large_for_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_blocks: needs an integer of at least 1, got 0"):
        MemoryPool(SMALL, 0)
    with pytest.raises(ConfigError, match="num_blocks: cpu has no room for 1000000000000000 bl"):
        MemoryPool(SMALL, 10**15)


def test_pageable_memory_is_advised_to_use_huge_pages() -> None:
    pool = MemoryPool(SMALL, 1000)
    assert not pool.words.any()
    mappings = re.findall(
        r"^([0-9a-f]+)-([0-9a-f]+) .*?^VmFlags:(.*?)$",
        Path("/proc/self/smaps").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    [flags] = [
        flags.split()
        for start, end, flags in mappings
        if int(start, 16) <= pool.words.data_ptr() < int(end, 16)
    ]
    assert "hg" in flags


def test_different_block_shapes_have_different_fingerprints() -> None:
    shapes = [SMALL, ODD, replace(SMALL, tp_size=2), replace(SMALL, tp_size=2, tp_rank=1)]
    assert len({shape.fingerprint for shape in shapes}) == len(shapes)
    assert replace(SMALL).fingerprint == SMALL.fingerprint


def test_whether_host_memory_is_pinned_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    memory._pins_host_memory.cache_clear()
    pools = [host_pool(SMALL, 2) for _ in range(3)]
    assert {pool.words.is_pinned() for pool in pools} == {torch.cuda.is_available()}
    kind = "pinned" if torch.cuda.is_available() else "pageable: no CUDA device"
    assert caplog.messages == [f"host memory for KV blocks is {kind}"]


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


def test_block_ids_must_be_in_range_and_unique() -> None:
    assert checked_ids([2, 0], 3).tolist() == [2, 0]
    with pytest.raises(ValueError, match="block 3 is not in a pool of 3 blocks"):
        checked_ids([0, 3], 3)
    with pytest.raises(ValueError, match="block -1 is not in a pool of 3 blocks"):
        checked_ids([-1], 3)
    with pytest.raises(ValueError, match="block 1 is named twice"):
        checked_ids([1, 0, 1], 3)
    with pytest.raises(ValueError, match="2 blocks for 3 slots"):
        checked_map([0, 1], 4, [0, 1, 2], 4)
    sources, targets = checked_map([0, 3], 4, [1, 0], 2)
    assert (sources.tolist(), targets.tolist()) == ([0, 3], [1, 0])


@pytest.mark.gpu
def test_device_pools_hold_the_content_of_host_pools() -> None:
    host = filled(host_pool(ODD, 4))
    device = MemoryPool(ODD, 4, "cuda")
    assert host.words.is_pinned()
    device.words.copy_(host.words, non_blocking=True)
    assert same(device.kv, host.kv)
    layers = empty_layers(ODD, 4, Layout.KV_FIRST, "cuda")
    write_layers(layers, Layout.KV_FIRST, [3, 1], device.kv[:2])
    assert same(read_layers(layers, Layout.KV_FIRST, [1, 3]), host.kv[[1, 0]])
