import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from app.core.errors import ConfigError
from tests.workers.kv.pools import filled, same
from workers.kv import memory
from workers.kv.memory import KVShape, MemoryPool, checked_ids, checked_map, host_pool

SMALL = KVShape(num_layers=3, num_kv_heads=8, head_size=4, dtype=torch.float32, block_size=2)
ODD = KVShape(num_layers=2, num_kv_heads=1, head_size=3, dtype=torch.bfloat16, block_size=3)
"""36 bytes a layer, which are not a whole number of 8-byte words."""


def test_a_block_is_one_row_of_all_layers_keys_before_values():
    assert SMALL.layer_shape == (2, 2, 8, 4)
    assert SMALL.layer_bytes == 2 * 2 * 8 * 4 * 4
    assert SMALL.block_bytes == 3 * SMALL.layer_bytes
    pool = MemoryPool(SMALL, 5)
    assert pool.kv.shape == (5, 3, 2, 2, 8, 4)
    assert pool.words.shape == (5, 3, SMALL.layer_bytes // 8)
    pool.kv[4, 2, 1, 1, 7, 3] = 1.5
    assert pool.words[4, 2, -1] != 0
    assert pool.kv.data_ptr() == pool.words.data_ptr()


def test_ranks_share_the_heads():
    shape = replace(SMALL, tp_size=4, tp_rank=3)
    assert shape.num_heads == 2
    assert shape.block_bytes * 4 == SMALL.block_bytes


def test_layers_are_padded_to_a_whole_number_of_words():
    assert ODD.layer_bytes == 36
    assert ODD.layer_words == 5
    assert ODD.block_bytes == 80
    pool = filled(MemoryPool(ODD, 4))
    kept = pool.kv.clone()
    moved = MemoryPool(ODD, 4)
    moved.words.copy_(pool.words)
    assert same(moved.kv, kept)


@pytest.mark.parametrize("tp_size", [3, 16])
def test_ranks_that_cannot_share_the_heads_evenly_are_refused(tp_size):
    with pytest.raises(ConfigError) as refused:
        replace(SMALL, num_kv_heads=8, tp_size=tp_size)
    assert str(refused.value) == f"tp_size: {tp_size} ranks cannot share 8 KV heads evenly"


def test_a_pool_that_is_too_large_for_memory_is_refused():
    with pytest.raises(ConfigError, match="num_blocks: cpu has no room for 1000000000000000 bl"):
        MemoryPool(SMALL, 10**15)


def test_pageable_memory_is_advised_to_use_huge_pages():
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


def test_different_block_shapes_have_different_fingerprints():
    shapes = [SMALL, ODD, replace(SMALL, tp_size=2), replace(SMALL, tp_size=2, tp_rank=1)]
    assert len({shape.fingerprint for shape in shapes}) == len(shapes)
    assert replace(SMALL).fingerprint == SMALL.fingerprint


def test_whether_host_memory_is_pinned_is_logged_once(caplog):
    caplog.set_level(logging.INFO)
    memory._pins_host_memory.cache_clear()
    pools = [host_pool(SMALL, 2) for _ in range(3)]
    assert {pool.words.is_pinned() for pool in pools} == {torch.cuda.is_available()}
    kind = "pinned" if torch.cuda.is_available() else "pageable: no CUDA device"
    assert caplog.messages == [f"host memory for KV blocks is {kind}"]


def test_block_ids_must_be_in_range_and_unique():
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
def test_device_pools_hold_the_content_of_host_pools():
    host = filled(host_pool(ODD, 4))
    device = MemoryPool(ODD, 4, "cuda")
    assert host.words.is_pinned()
    device.words.copy_(host.words, non_blocking=True)
    assert same(device.kv, host.kv)
