import logging
import subprocess
import sys
from ctypes import memmove
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.workers.kv.pools import MAPS, NUM_BLOCKS, ODD, SMALL, WIDE, moved, pool_of
from workers.kv import copiers
from workers.kv.copiers import COPIERS, IN_HOST_MEMORY, WITH_DEVICE, PoolCopier
from workers.kv.memory import WORD_BYTES, CudaStream, HostStream, MemoryPool, host_pool, new_stream

CONTIGUOUS_TARGETS = "packed", "all", "one"


class HostMemoryDriver:
    """The part of cuda.bindings.driver that batched copies need; it copies host memory at once."""

    CUresult = IntEnum("CUresult", {"CUDA_SUCCESS": 0, "CUDA_ERROR_INVALID_VALUE": 1})
    CUmemcpySrcAccessOrder = IntEnum(
        "CUmemcpySrcAccessOrder", {"CU_MEMCPY_SRC_ACCESS_ORDER_STREAM": 1}
    )
    CUmemcpyAttributes = SimpleNamespace
    CUdeviceptr = CUstream = staticmethod(int)

    def __init__(self):
        self.batches = []
        self.result = self.CUresult.CUDA_SUCCESS

    def cuMemcpyBatchAsync(  # noqa: N802
        self, dsts, srcs, sizes, count, attrs, attrs_idxs, num_attrs, stream
    ):
        assert len(dsts) == len(srcs) == len(sizes) == count
        assert [a.srcAccessOrder for a in attrs] == [1]
        assert (attrs_idxs, num_attrs, stream) == ([0], 1, 7)
        if not self.result:
            for args in zip(dsts, srcs, sizes, strict=True):
                memmove(*args)
            self.batches.append(count)
        return (self.result,)


@pytest.fixture
def driver(monkeypatch):
    made = HostMemoryDriver()
    monkeypatch.setattr(copiers, "driver", made)
    stream = SimpleNamespace(cuda_stream=7)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    return made


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("shape", [SMALL, ODD, WIDE], ids=["small", "odd", "wide"])
@pytest.mark.parametrize("layers", [slice(None), slice(0, 2), slice(2, 3)], ids=str)
@pytest.mark.parametrize(
    ("copier", "blocks"),
    [
        pytest.param(copier, MAPS[name], id=f"{way}-{name}")
        for way, copier in COPIERS.items()
        for name in (CONTIGUOUS_TARGETS if way == "selected" else MAPS)
    ],
)
def test_every_copier_copies_only_the_given_layers_of_the_given_blocks(
    copier, blocks, layers, shape
):
    source, target = pool_of(shape, 1).words[:, layers], pool_of(shape, 2)
    before = target.words.clone()
    expected = moved(source, target.words[:, layers], *blocks)
    copier(source, target.words[:, layers], *(np.array(ids, dtype=np.int64) for ids in blocks))
    assert torch.equal(target.words[:, layers], expected)
    others = [n for n in range(shape.num_layers) if n not in range(shape.num_layers)[layers]]
    assert torch.equal(target.words[:, others], before[:, others])


@pytest.mark.parametrize("blocks_at_once", [1, 3])
def test_more_blocks_than_fit_the_staging_buffer_are_copied_in_parts(blocks_at_once, monkeypatch):
    monkeypatch.setattr(copiers, "STAGED_BYTES", blocks_at_once * WIDE.block_bytes)
    source, target = pool_of(WIDE, 1), pool_of(WIDE, 2)
    for source_ids, target_ids in (
        ([7, 2, 9, 4, 0, 1, 11], [3, 11, 0, 5, 6, 7, 8]),
        ([7, 2, 9, 4, 0, 1, 11], [1, 2, 3, 4, 5, 6, 7]),
    ):
        expected = moved(source.words, target.words, source_ids, target_ids)
        COPIERS["gathered"](source.words, target.words, np.array(source_ids), np.array(target_ids))
        assert torch.equal(target.words, expected)


def test_blocks_that_lie_together_at_the_source_are_not_gathered(monkeypatch):
    source, target = pool_of(WIDE, 1), pool_of(WIDE, 2)
    expected = moved(source.words, target.words, [3, 4, 5], [7, 1, 9])
    monkeypatch.delattr(torch, "index_select")
    COPIERS["gathered"](source.words, target.words, np.array([3, 4, 5]), np.array([7, 1, 9]))
    assert torch.equal(target.words, expected)


@pytest.mark.parametrize(
    ("shape", "layers", "piece"),
    [
        (WIDE, slice(None), (32 << 10) // WORD_BYTES),
        (WIDE, slice(0, 2), None),
        (SMALL, slice(None), None),
    ],
    ids=["wide", "wide, two layers", "small"],
)
def test_large_blocks_are_gathered_in_pieces_of_a_size_that_divides_them(
    shape, layers, piece, monkeypatch
):
    rows = []
    select = torch.index_select

    def recorded(words, dim, ids, *, out):
        rows.append(words.shape[1:])
        return select(words, dim, ids, out=out)

    monkeypatch.setattr(torch, "index_select", recorded)
    source, target = (pool_of(shape, seed).words[:, layers] for seed in (1, 2))
    expected = moved(source, target, *MAPS["packed"])
    COPIERS["selected"](source, target, *map(np.array, MAPS["packed"]))
    assert torch.equal(target, expected)
    assert rows == [source.shape[1:] if piece is None else (piece,)]


@pytest.mark.parametrize("shape", [SMALL, WIDE])
def test_long_runs_are_left_to_torch_and_its_threads_and_short_ones_are_not(shape, monkeypatch):
    source, target = pool_of(shape, 1).words, pool_of(shape, 2).words
    source_ids, target_ids = [1, 2, 3, 5, 7, 8], [4, 5, 6, 9, 1, 2]
    expected = moved(source, target, source_ids, target_ids)
    copied = []
    copy = Tensor.copy_

    def record(into, *args, **how):
        copied.append(into.nbytes)
        return copy(into, *args, **how)

    monkeypatch.setattr(copiers, "LONG_BYTES", 3 * shape.block_bytes)
    monkeypatch.setattr(Tensor, "copy_", record)
    COPIERS["bytes"](source, target, np.array(source_ids), np.array(target_ids))
    assert torch.equal(target, expected)
    assert copied == [3 * shape.block_bytes]


def test_batched_copies_pass_runs_to_the_driver_and_are_left_out_if_it_refuses(
    driver, caplog, monkeypatch
):
    caplog.set_level(logging.INFO)
    source, target = pool_of(SMALL, 1).words, pool_of(SMALL, 2).words
    COPIERS["batched"](source, target, *map(np.array, MAPS["runs"]))
    assert driver.batches == [3]
    assert copiers.copiers_with_device(source, target, HostStream()) == WITH_DEVICE
    driver.result = driver.CUresult.CUDA_ERROR_INVALID_VALUE
    assert copiers.copiers_with_device(source, target, HostStream()) == ("runs", "gathered")
    for without in (None, SimpleNamespace(cuMemcpyAsync=None)):
        monkeypatch.setattr(copiers, "driver", without)
        assert copiers.copiers_with_device(source, target, HostStream()) == ("runs", "gathered")
    assert [message.split(": ")[-1] for message in caplog.messages] == [
        "CUDA_ERROR_INVALID_VALUE",
        *["cuda.bindings is not installed, or older than 12.8"] * 2,
    ]


def test_the_fastest_copier_is_chosen_and_logged(caplog):
    caplog.set_level(logging.INFO)
    copier = PoolCopier(pool_of(SMALL, 1), pool_of(SMALL, 2))
    assert tuple(copier.rates.packed) == IN_HOST_MEMORY
    assert copier.rates.scattered.keys() == {*IN_HOST_MEMORY} - {"selected"}
    (message,) = caplog.messages
    assert message.startswith("copies from pageable memory to pageable memory, blocks of 384 bytes")
    chosen = [
        name
        for name, rate in copier.rates.scattered.items()
        if f"{name} ({rate:.1f} GB/s) into scattered ones" in message
    ]
    assert len(chosen) == 1
    best = max(copier.rates.scattered.values())
    assert copier.rates.scattered[chosen[0]] * copiers.CLEARLY_FASTER >= best


def test_a_copier_that_needs_more_is_chosen_only_if_it_is_clearly_faster(monkeypatch):
    packed = {"bytes": 1.0, "selected": 1.3, "runs": 1.4}
    rates = copiers.Rates(packed, {"bytes": 1.0, "runs": 1.09})
    monkeypatch.setattr(copiers, "_try_copiers", lambda *_: rates)
    copier = PoolCopier(pool_of(SMALL, 1), pool_of(SMALL, 2))
    assert (copier._packed, copier._scattered) == ("selected", "bytes")


def test_a_copy_with_an_invalid_block_is_refused_as_a_whole():
    source, target = pool_of(SMALL, 1), pool_of(SMALL, 2)
    copier = PoolCopier(source, target)
    before = target.words.clone()
    for source_ids, target_ids, message in (
        ([0, 1], [0], "2 blocks for 1 slots"),
        ([NUM_BLOCKS], [0], "block 12 is not in a pool of 12 blocks"),
        ([0, 1], [-1, 0], "block -1 is not in a pool of 12 blocks"),
        ([3, 3], [0, 1], "block 3 is named twice"),
        ([0, 1], [5, 5], "block 5 is named twice"),
    ):
        with pytest.raises(ValueError, match=message):
            copier.copy(source_ids, target_ids)
    copier.copy([], [])
    assert torch.equal(target.words, before)


@pytest.mark.gpu
def test_a_failed_copy_waits_for_blocks_still_under_way():
    source, target = host_pool(WIDE, NUM_BLOCKS), MemoryPool(WIDE, NUM_BLOCKS, "cuda")
    source.words.fill_(7)

    def fail():
        for _ in range(100):
            target.words.copy_(source.words, non_blocking=True)
        raise RuntimeError("out of memory, with some blocks still under way")

    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="out of memory"):
        CudaStream(target.device).submit(fail)
    source.words.zero_()
    assert (target.words.cpu() == 7).all()


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", MAPS.values(), ids=MAPS)
@pytest.mark.parametrize("layers", [slice(None), slice(1, 3)], ids=str)
@pytest.mark.parametrize("name", WITH_DEVICE)
@pytest.mark.parametrize("upwards", [True, False])
def test_every_copier_copies_between_host_and_device(upwards, name, layers, blocks):
    pools = host_pool(WIDE, NUM_BLOCKS), MemoryPool(WIDE, NUM_BLOCKS, "cuda")
    for pool in pools:
        pool.words.random_()
    source, target = (pool.words for pool in (pools if upwards else pools[::-1]))
    torch.cuda.synchronize()
    stream = new_stream(*pools)
    if name not in copiers.copiers_with_device(source, target, stream):
        pytest.skip("not with this driver")
    expected = target.cpu().clone()  # the first block was copied to find that out
    expected[:, layers] = moved(source[:, layers].cpu(), expected[:, layers], *blocks)
    words = source[:, layers], target[:, layers]
    ids = [np.array(ids, dtype=np.int64) for ids in blocks]
    stream.submit(lambda: COPIERS[name](*words, *ids)).synchronize()
    assert torch.equal(target.cpu(), expected)


ON_THE_SECOND_GPU = """
from threading import Thread

import torch

from tests.workers.kv.pools import NUM_BLOCKS, WIDE
from workers.kv.copiers import PoolCopier
from workers.kv.memory import MemoryPool, host_pool

device = MemoryPool(WIDE, NUM_BLOCKS, "cuda:1")
thread = Thread(target=lambda: PoolCopier(host_pool(WIDE, NUM_BLOCKS), device).copy([1, 2], [5, 3]))
thread.start()
thread.join()
print([n for n in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(n)])
"""


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_copies_to_the_second_gpu_create_no_context_on_the_first():
    ran = subprocess.run(
        [sys.executable, "-c", ON_THE_SECOND_GPU],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout == "[1]\n"
