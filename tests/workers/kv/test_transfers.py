from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from ctypes import memmove
from dataclasses import replace
from enum import IntEnum
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from app.core.errors import BlockLost
from app.core.types import SequenceHash, Tier
from tests.workers.kv.full_disk import no_room_beyond
from workers.kv import copiers, transfers
from workers.kv.copiers import IN_HOST_MEMORY, MOVERS, WITH_DEVICE, Copier, Mover
from workers.kv.disk import PAGE_BYTES, DiskBlock, SlotFile
from workers.kv.fence import FencingBlockManager
from workers.kv.memory import WORD_BYTES, Ids, KVShape, MemoryPool, host_pool
from workers.kv.transfers import CopyStream, Transfers, copy_stream

DEVICE, HOST, DISK = Tier
SMALL = KVShape(num_layers=3, num_kv_heads=2, head_size=4, dtype=torch.float32, block_size=2)
ODD = KVShape(num_layers=5, num_kv_heads=1, head_size=3, dtype=torch.bfloat16, block_size=3)
WIDE = KVShape(num_layers=5, num_kv_heads=4, head_size=64, dtype=torch.float32, block_size=16)
"""32 KiB a layer: two layers make a group, and the last group has one."""
NUM_BLOCKS = 12


def pool_of(shape: KVShape, seed: int, num_blocks: int = NUM_BLOCKS) -> MemoryPool:
    pool = MemoryPool(shape, num_blocks)
    pool.words.random_(generator=torch.Generator().manual_seed(seed))
    return pool


def moved(
    source: Tensor, target: Tensor, source_ids: Sequence[int], target_ids: Sequence[int]
) -> Tensor:
    """What the target should hold afterwards."""
    expected = target.clone()
    for s, t in zip(source_ids, target_ids, strict=True):
        expected[t] = source[s]
    return expected


MAPS = {
    "shuffled": ([7, 2, 9, 4], [0, 3, 5, 11]),
    "packed": ([7, 2, 9, 4], [3, 4, 5, 6]),
    "runs": ([1, 2, 3, 8, 9, 0], [5, 6, 7, 1, 2, 0]),
    "all": (list(range(NUM_BLOCKS)), list(range(NUM_BLOCKS))),
    "one": ([4], [9]),
}
CONTIGUOUS_TARGETS = "packed", "all", "one"


class HostMemoryDriver:
    """The part of cuda.bindings.driver that batched copies need; it copies host memory at once."""

    CUresult = IntEnum("CUresult", {"CUDA_SUCCESS": 0, "CUDA_ERROR_INVALID_VALUE": 1})
    CUmemcpySrcAccessOrder = IntEnum(
        "CUmemcpySrcAccessOrder", {"CU_MEMCPY_SRC_ACCESS_ORDER_STREAM": 1}
    )
    CUmemcpyAttributes = SimpleNamespace
    CUdeviceptr = CUstream = staticmethod(int)

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.result = self.CUresult.CUDA_SUCCESS

    def cuMemcpyBatchAsync(  # noqa: N802
        self,
        dsts: list[int],
        srcs: list[int],
        sizes: list[int],
        count: int,
        attrs: list[SimpleNamespace],
        attrs_idxs: list[int],
        num_attrs: int,
        stream: int,
    ) -> tuple[IntEnum]:
        assert len(dsts) == len(srcs) == len(sizes) == count
        assert [a.srcAccessOrder for a in attrs] == [1]
        assert (attrs_idxs, num_attrs, stream) == ([0], 1, 7)
        if not self.result:
            for args in zip(dsts, srcs, sizes, strict=True):
                memmove(*args)
            self.batches.append(count)
        return (self.result,)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> HostMemoryDriver:
    made = HostMemoryDriver()
    monkeypatch.setattr(copiers, "driver", made)
    stream = SimpleNamespace(cuda_stream=7)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    return made


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("shape", [SMALL, ODD, WIDE], ids=["small", "odd", "wide"])
@pytest.mark.parametrize("layers", [slice(None), slice(0, 2), slice(2, 3)], ids=str)
@pytest.mark.parametrize(
    ("mover", "blocks"),
    [
        pytest.param(mover, MAPS[name], id=f"{way}-{name}")
        for way, mover in MOVERS.items()
        for name in (CONTIGUOUS_TARGETS if way == "selected" else MAPS)
    ],
)
def test_every_mover_copies_only_the_given_layers_of_the_given_blocks(
    mover: Mover, blocks: tuple[list[int], list[int]], layers: slice, shape: KVShape
) -> None:
    source, target = pool_of(shape, 1).words[:, layers], pool_of(shape, 2)
    before = target.words.clone()
    expected = moved(source, target.words[:, layers], *blocks)
    mover(source, target.words[:, layers], *(np.array(ids, dtype=np.int64) for ids in blocks))
    assert torch.equal(target.words[:, layers], expected)
    others = [n for n in range(shape.num_layers) if n not in range(shape.num_layers)[layers]]
    assert torch.equal(target.words[:, others], before[:, others])


@pytest.mark.parametrize("blocks_at_once", [1, 3])
def test_more_blocks_than_fit_the_staging_buffer_are_copied_in_parts(
    blocks_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copiers, "STAGED_BYTES", blocks_at_once * WIDE.block_bytes)
    source, target = pool_of(WIDE, 1), pool_of(WIDE, 2)
    for source_ids, target_ids in (
        ([7, 2, 9, 4, 0, 1, 11], [3, 11, 0, 5, 6, 7, 8]),
        ([7, 2, 9, 4, 0, 1, 11], [1, 2, 3, 4, 5, 6, 7]),
    ):
        expected = moved(source.words, target.words, source_ids, target_ids)
        MOVERS["gathered"](source.words, target.words, np.array(source_ids), np.array(target_ids))
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
    shape: KVShape, layers: slice, piece: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[torch.Size] = []
    select = torch.index_select

    def recorded(words: Tensor, dim: int, ids: Tensor, *, out: Tensor) -> Tensor:
        rows.append(words.shape[1:])
        return select(words, dim, ids, out=out)

    monkeypatch.setattr(torch, "index_select", recorded)
    source, target = (pool_of(shape, seed).words[:, layers] for seed in (1, 2))
    expected = moved(source, target, *MAPS["packed"])
    MOVERS["selected"](source, target, *map(np.array, MAPS["packed"]))
    assert torch.equal(target, expected)
    assert rows == [source.shape[1:] if piece is None else (piece,)]


@pytest.mark.parametrize("shape", [SMALL, WIDE])
def test_long_runs_are_left_to_torch_and_its_threads_and_short_ones_are_not(
    shape: KVShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = pool_of(shape, 1).words, pool_of(shape, 2).words
    source_ids, target_ids = [1, 2, 3, 5, 7, 8], [4, 5, 6, 9, 1, 2]
    expected = moved(source, target, source_ids, target_ids)
    copied: list[int] = []
    copy = Tensor.copy_

    def record(into: Tensor, *args: Any, **how: Any) -> Tensor:
        copied.append(into.nbytes)
        return copy(into, *args, **how)

    monkeypatch.setattr(copiers, "LONG_BYTES", 3 * shape.block_bytes)
    monkeypatch.setattr(Tensor, "copy_", record)
    MOVERS["bytes"](source, target, np.array(source_ids), np.array(target_ids))
    assert torch.equal(target, expected)
    assert copied == [3 * shape.block_bytes]


def test_batched_copies_pass_runs_to_the_driver_and_are_left_out_if_it_refuses(
    driver: HostMemoryDriver, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    source, target = pool_of(SMALL, 1).words, pool_of(SMALL, 2).words
    MOVERS["batched"](source, target, *map(np.array, MAPS["runs"]))
    assert driver.batches == [3]
    assert copiers.movers_with_device(source, target) == WITH_DEVICE
    driver.result = driver.CUresult.CUDA_ERROR_INVALID_VALUE
    assert copiers.movers_with_device(source, target) == ("runs", "gathered")
    for without in (None, SimpleNamespace(cuMemcpyAsync=None)):
        monkeypatch.setattr(copiers, "driver", without)
        assert copiers.movers_with_device(source, target) == ("runs", "gathered")
    assert [message.split(": ")[-1] for message in caplog.messages] == [
        "CUDA_ERROR_INVALID_VALUE",
        *["cuda.bindings is not installed, or older than 12.8"] * 2,
    ]


def test_the_fastest_mover_is_chosen_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    copier = Copier(pool_of(SMALL, 1), pool_of(SMALL, 2))
    assert tuple(copier.rates.packed) == IN_HOST_MEMORY
    assert copier.rates.scattered.keys() == {*IN_HOST_MEMORY} - {"selected"}
    (message,) = caplog.messages
    assert message.startswith(
        "copies from pageable memory to pageable memory, 384 bytes of a block"
    )
    chosen = [
        name
        for name, rate in copier.rates.scattered.items()
        if f"{name} ({rate:.1f} GB/s) into scattered ones" in message
    ]
    assert len(chosen) == 1
    best = max(copier.rates.scattered.values())
    assert copier.rates.scattered[chosen[0]] * copiers.CLEARLY_FASTER >= best


def test_a_mover_that_needs_more_is_chosen_only_if_it_is_clearly_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed = {"bytes": 1.0, "selected": 1.3, "runs": 1.4}
    rates = copiers.Rates(packed, {"bytes": 1.0, "runs": 1.09})
    monkeypatch.setattr(copiers, "_try_movers", lambda *_: rates)
    copier = Copier(pool_of(SMALL, 1), pool_of(SMALL, 2))
    assert (copier._packed, copier._scattered) == ("selected", "bytes")


def test_a_copy_with_an_invalid_block_is_refused_as_a_whole() -> None:
    source, target = pool_of(SMALL, 1), pool_of(SMALL, 2)
    copier = Copier(source, target)
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
    with pytest.raises(ValueError, match="do not fit"):
        Copier(source, pool_of(ODD, 1))


def test_a_failed_copy_waits_for_blocks_still_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = pool_of(SMALL, 1), pool_of(SMALL, 2)
    copier = Copier(source, target)
    waited_for: list[MemoryPool] = []

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory, with some blocks still under way")

    monkeypatch.setattr(copier, "begin", fail)
    monkeypatch.setattr(copiers, "_synchronize", lambda *pools: waited_for.extend(pools))
    with pytest.raises(RuntimeError, match="out of memory"):
        copier.copy([1], [2])
    assert waited_for == [source, target]


@contextmanager
def streaming(source: MemoryPool, target: MemoryPool) -> Iterator[CopyStream]:
    with closing(copy_stream(source, target)) as stream:
        yield stream


def test_layers_are_copied_in_groups_of_at_least_64_kib_a_block() -> None:
    with streaming(pool_of(WIDE, 1), pool_of(WIDE, 2)) as stream:
        assert (stream.layers_per_group, stream.num_groups) == (2, 3)
        assert [stream.group_of(layer) for layer in range(5)] == [0, 0, 1, 1, 2]
    with streaming(pool_of(SMALL, 1), pool_of(SMALL, 2)) as stream:
        assert (stream.layers_per_group, stream.num_groups) == (3, 1)


def test_a_stream_copies_triggered_groups_and_can_be_triggered_again() -> None:
    source, target = pool_of(WIDE, 1), pool_of(WIDE, 2)
    source_ids, target_ids = [7, 2, 9], [3, 11, 0]
    with streaming(source, target) as stream:
        stream.prepare(source_ids, target_ids)
        before = target.words.clone()
        after = moved(source.words, before, source_ids, target_ids)
        stream.trigger_layer(3)
        stream.wait_layer(2)
        assert torch.equal(target.words[:, 2:4], after[:, 2:4])
        assert torch.equal(target.words[:, :2], before[:, :2])
        source.words[:, 2:4].random_()  # already copied, so not copied again below
        stream.trigger_group(0)
        stream.trigger_all()
        for layer in range(5):
            stream.wait_layer(layer)
            assert torch.equal(target.words[:, layer], after[:, layer])
        stream.wait()
        assert torch.equal(target.words, after)

        source.words.random_()
        stream.trigger_all()
        stream.wait()
        assert torch.equal(target.words, moved(source.words, after, source_ids, target_ids))

        stream.prepare([1], [8])
        stream.trigger_all()
        stream.wait()
        assert torch.equal(target.words[8], source.words[1])


def test_a_stream_refuses_invalid_calls() -> None:
    with streaming(pool_of(WIDE, 1), pool_of(WIDE, 2)) as stream:
        with pytest.raises(ValueError, match="block 12 is not in a pool of 12 blocks"):
            stream.prepare([0], [12])
        stream.prepare([0], [1])
        for layer in (-1, 5):
            with pytest.raises(ValueError, match=f"layer {layer} of 5"):
                stream.trigger_layer(layer)
        for group in (-1, 3):
            with pytest.raises(ValueError, match=f"group {group} of 3"):
                stream.trigger_group(group)
        with pytest.raises(ValueError, match="layer 0 was not triggered"):
            stream.wait_layer(0)
        stream.trigger_layer(0)
        with pytest.raises(ValueError, match="were triggered but not waited for"):
            stream.prepare([0], [2])
        stream.wait()
        stream.prepare([0], [2])


def test_waiting_for_a_failed_copy_raises_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: Tensor, target: Tensor, source_ids: Ids, target_ids: Ids) -> None:
        raise OSError("no such memory")

    with streaming(pool_of(WIDE, 1), pool_of(WIDE, 2)) as stream:
        stream.prepare([0], [1])
        with monkeypatch.context() as patched:
            for name in MOVERS:
                patched.setitem(MOVERS, name, fail)
            stream.trigger_all()
            with pytest.raises(OSError, match="no such memory"):
                stream.wait_layer(4)
            with pytest.raises(OSError, match="no such memory"):
                stream.wait()
        stream.trigger_all()
        stream.wait()


def test_a_stream_raises_an_error_only_after_all_its_copies_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Callers that see the error may reuse the blocks."""
    reported, num_ended = threading.Event(), 0

    def fail(*_: Any) -> None:
        nonlocal num_ended
        reported.wait(0.1)
        num_ended += 1
        raise OSError("no such memory")

    stream = copy_stream(pool_of(WIDE, 1), pool_of(WIDE, 2))
    for name in MOVERS:
        monkeypatch.setitem(MOVERS, name, fail)
    stream.prepare([0], [1])
    stream.trigger_all()
    with pytest.raises(OSError, match="no such memory"):
        stream.wait()
    assert num_ended == stream.num_groups
    reported.set()
    stream.trigger_all()
    with pytest.raises(OSError, match="no such memory"):
        stream.close()
    with pytest.raises(RuntimeError, match="after shutdown"):
        stream.trigger_all()


class Tiers:
    """All three tiers, with a block manager."""

    def __init__(self, folder: Path, shape: KVShape = WIDE, num_slots: int = NUM_BLOCKS) -> None:
        self.folder = folder
        self.pools = {DEVICE: pool_of(shape, 1, num_slots), HOST: pool_of(shape, 2, num_slots)}
        self.disk = SlotFile(folder, block_bytes=shape.block_bytes, num_slots=num_slots)
        self.transfers = Transfers(self.pools, self.disk)
        self.manager = FencingBlockManager(dict.fromkeys(Tier, num_slots), now=lambda: 0.0)
        self.content: dict[SequenceHash, Tensor] = {}

    def close(self) -> None:
        self.disk.close()

    def compute(self, blocks: Sequence[SequenceHash]) -> None:
        """Fill those of the blocks that are not on the device, and release all of them."""
        table = self.manager.prepare(blocks, len(blocks))
        for block, slot in list(zip(blocks, table.slots, strict=True))[table.num_matched :]:
            self.content[block] = self.pools[DEVICE].words[slot.block_id].random_().clone()
        self.manager.register(table, blocks[table.num_matched :])
        self.manager.release(table)

    def evict(self, tier: Tier) -> None:
        """All that is in that tier moves down."""
        eviction = self.manager.evict(tier, NUM_BLOCKS)
        self.copy()
        self.manager.withdraw(eviction)
        freed = [slot.block_id for slot in eviction.leaving]
        self.manager.reclaim(eviction)
        if tier in self.pools:  # the slots that blocks come back to may be the same ones
            self.pools[tier].words[freed] = 0

    def copy(self) -> list[int]:
        """Carry out the planned moves; returns how many blocks of each were copied."""
        done = []
        for move in self.manager.take_moves():
            done.append(self.transfers.carry_out(move))
            self.manager.finish(move, done[-1])
            self.manager.check()
        return done

    def load(self, blocks: Sequence[SequenceHash]) -> int:
        """Load a request's blocks and check them; returns how many leading ones arrived."""
        table = self.manager.prepare(blocks, len(blocks))
        self.copy()
        whole = table.num_whole
        for block, slot in zip(blocks[:whole], table.slots, strict=False):
            assert torch.equal(self.pools[DEVICE].words[slot.block_id], self.content[block])
        if whole < table.num_matched:
            self.manager.fall_back(table)
        self.manager.release(table)
        self.manager.check()
        return whole

    def spoil(self, block: SequenceHash) -> None:
        """Flip a bit of the block on disk."""
        slot = self.manager.tiers[DISK].find(block)
        assert slot is not None
        with (self.folder / "blocks").open("r+b") as file:
            file.seek(slot.block_id * -(-self.disk.block_bytes // PAGE_BYTES) * PAGE_BYTES + 77)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 4]))


BLOCKS = [SequenceHash(100 + n) for n in range(6)]


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Tiers]:
    with closing(Tiers(tmp_path)) as tiers:
        yield tiers


@pytest.mark.parametrize("shape", [SMALL, ODD, WIDE], ids=["small", "odd", "wide"])
@pytest.mark.parametrize(("source", "target"), [p for p in product(Tier, Tier) if p[0] is not p[1]])
def test_blocks_are_copied_between_any_two_tiers(
    source: Tier, target: Tier, shape: KVShape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("STAGED_BYTES", "UNSTAGED_BYTES"):
        monkeypatch.setattr(transfers, name, 3 * shape.block_bytes)
    with closing(Tiers(tmp_path, shape)) as tiers:
        copy = tiers.transfers.copy_blocks
        first, between, last = [7, 2, 9, 4, 0], [3, 11, 0, 5, 6], [1, 2, 4, 8, 10]
        on_disk = [DiskBlock(n, SequenceHash(n), None) for n in range(5)]
        memory = HOST if DISK in (source, target) and DEVICE not in (source, target) else DEVICE
        other = HOST if memory is DEVICE else DEVICE
        expected = tiers.pools[memory].words[first].clone()
        if source is DISK:
            assert copy(memory, DISK, first, between, on_disk) == 5
            tiers.pools[memory].words.zero_()
            assert copy(DISK, target, between, last, on_disk) == 5
            assert torch.equal(tiers.pools[target].words[last], expected)
        elif target is DISK:
            assert copy(source, DISK, first, between, on_disk) == 5
            assert copy(DISK, other, between, last, on_disk) == 5
            assert torch.equal(tiers.pools[other].words[last], expected)
        else:
            expected = tiers.pools[source].words[first].clone()
            assert copy(source, target, first, between) == 5
            assert torch.equal(tiers.pools[target].words[between], expected)


def test_tiers_whose_blocks_differ_in_size_are_refused(tmp_path: Path) -> None:
    with (
        closing(SlotFile(tmp_path, block_bytes=WIDE.block_bytes, num_slots=2)) as disk,
        pytest.raises(ValueError, match="of the DEVICE tier do not fit those of"),
    ):
        Transfers({DEVICE: pool_of(SMALL, 1)}, disk)


@pytest.mark.parametrize(
    ("block_ids", "slots", "message"),
    [
        ([0, NUM_BLOCKS], [0, 1], "block 12 is not in a pool of 12 blocks"),
        ([0, 1], [0, NUM_BLOCKS], "block 12 is not in a pool of 12 blocks"),
        ([0, 0], [0, 1], "block 0 is named twice"),
        ([0, 1], [0], "2 blocks for 1 slots"),
    ],
)
def test_invalid_slots_of_a_copy_to_disk_are_refused(
    block_ids: list[int], slots: list[int], message: str, tmp_path: Path
) -> None:
    on_disk = [DiskBlock(0, block, None) for block in BLOCKS[:2]]
    with (
        closing(SlotFile(tmp_path, block_bytes=SMALL.block_bytes, num_slots=NUM_BLOCKS)) as disk,
        pytest.raises(ValueError, match=message),
    ):
        Transfers({HOST: pool_of(SMALL, 1)}, disk).copy_blocks(
            HOST, DISK, block_ids, slots, on_disk
        )


def test_blocks_evicted_down_to_disk_are_loaded_back_unchanged(tiers: Tiers) -> None:
    tiers.compute(BLOCKS)
    tiers.evict(DEVICE)
    tiers.evict(HOST)
    assert tiers.manager.match(BLOCKS) == [DISK] * 6
    tiers.pools[DEVICE].words.random_()
    assert tiers.load(BLOCKS) == 6


def test_reused_slots_hold_their_new_blocks(tmp_path: Path) -> None:
    with closing(Tiers(tmp_path, SMALL, len(BLOCKS))) as tiers:
        for blocks in (BLOCKS, [SequenceHash(200 + n) for n in range(6)]):
            # The disk has no room for the second set, so its slots are reused less often.
            tiers.compute(blocks)
            tiers.evict(DEVICE)
            tiers.evict(HOST)
        tiers.evict(DISK)
        tiers.compute(BLOCKS)
        tiers.evict(DEVICE)
        tiers.evict(HOST)
        assert tiers.manager.match(BLOCKS) == [DISK] * 6
        assert tiers.load(BLOCKS) == 6


def test_blocks_on_disk_outlive_the_process(tmp_path: Path) -> None:
    with closing(Tiers(tmp_path)) as before:
        before.compute(BLOCKS)
        before.evict(DEVICE)
        before.evict(HOST)
    with closing(Tiers(tmp_path)) as after:
        parents = {r.block: r.parent for _, r in after.disk.records()}
        assert parents == dict(zip(BLOCKS, [None, *BLOCKS[:-1]], strict=True))
        after.manager.adopt(
            DISK, [(n, r.generation, r.block, r.parent) for n, r in after.disk.records()]
        )
        after.content = before.content
        assert after.load(BLOCKS) == 6


def test_a_block_evicted_from_disk_and_stored_again_is_found_by_the_next_process(
    tmp_path: Path,
) -> None:
    with closing(Tiers(tmp_path)) as before:
        others = [SequenceHash(200 + n) for n in range(6)]
        for blocks in (BLOCKS, others, BLOCKS):
            before.compute(blocks)
            before.evict(DEVICE)
            before.evict(HOST)
            if blocks is others:
                # More of these go than of the first, so their slots are the next ones used.
                assert before.load(BLOCKS[:3]) == 3
                eviction = before.manager.evict(DISK, 8)
                before.manager.withdraw(eviction)
                before.manager.reclaim(eviction)
        records = [(n, r.generation, r.block, r.parent) for n, r in before.disk.records()]
        assert len(records) > len({block for _, _, block, _ in records})
    with closing(Tiers(tmp_path)) as after:
        after.manager.adopt(DISK, records)
        after.manager.check()
        assert after.manager.match(BLOCKS) == [DISK] * 6


def test_a_load_ends_before_a_block_with_a_flipped_bit_on_disk(
    tiers: Tiers, caplog: pytest.LogCaptureFixture
) -> None:
    tiers.compute(BLOCKS)
    tiers.evict(DEVICE)
    tiers.evict(HOST)
    tiers.spoil(BLOCKS[3])
    assert tiers.load(BLOCKS) == 3
    assert "the checksum is wrong" in caplog.text
    assert tiers.manager.match(BLOCKS) == [DEVICE] * 3
    assert (tiers.manager.counts.fallbacks, tiers.manager.counts.recomputed) == (1, 3)
    tiers.compute(BLOCKS[:4])
    assert tiers.manager.match(BLOCKS) == [DEVICE] * 4 + [DISK] * 2
    assert tiers.load(BLOCKS) == 6


def test_a_load_ends_before_a_block_beyond_the_end_of_a_truncated_file(tiers: Tiers) -> None:
    tiers.compute(BLOCKS)
    tiers.evict(DEVICE)
    tiers.evict(HOST)
    at = {slot.block: slot.block_id for slot in tiers.manager.tiers[DISK].registered()}
    size = WIDE.block_bytes
    os.truncate(tiers.folder / "blocks", max(at.values()) * size + 5_000)
    good = next(n for n, block in enumerate(BLOCKS) if at[block] == max(at.values()))
    assert tiers.load(BLOCKS) == good


def test_a_full_disk_stores_the_blocks_that_fit_and_holds_no_others(
    tiers: Tiers, caplog: pytest.LogCaptureFixture
) -> None:
    tiers.compute(BLOCKS)
    tiers.evict(DEVICE)
    with no_room_beyond(4 * WIDE.block_bytes + 100):
        tiers.evict(HOST)
    assert "was not stored in disk slot 4: [Errno 27] File too large" in caplog.text
    stored = [block for block in BLOCKS if tiers.manager.tiers[DISK].find(block)]
    assert len(stored) == 4
    assert tiers.manager.counts.failed == 2
    tiers.content = {block: tiers.content[block] for block in stored}
    tiers.load(BLOCKS)


@pytest.mark.parametrize(
    ("shape", "bytes_at_once"), [(SMALL, 1), (WIDE, 32 << 20)], ids=["small", "wide"]
)
def test_blocks_count_as_copied_up_to_the_first_bad_one_in_request_order(
    shape: KVShape, bytes_at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("STAGED_BYTES", "UNSTAGED_BYTES"):
        monkeypatch.setattr(transfers, name, bytes_at_once)
    with closing(Tiers(tmp_path, shape)) as tiers:
        copy = tiers.transfers.copy_blocks
        on_disk = [DiskBlock(n, SequenceHash(n), None) for n in range(5)]
        slot_bytes = -(-shape.block_bytes // PAGE_BYTES) * PAGE_BYTES
        with no_room_beyond(7 * slot_bytes):
            assert copy(HOST, DISK, [4, 3, 2, 1, 0], [6, 2, 9, 1, 0], on_disk) == 2
        assert copy(HOST, DISK, [4, 3, 2, 1, 0], [6, 2, 9, 1, 0], on_disk) == 5
        held = {slot: record.block for slot, record in tiers.disk.records()}
        assert held == {6: 0, 2: 1, 9: 2, 1: 3, 0: 4}
        with (tmp_path / "blocks").open("r+b") as file:
            file.seek(slot_bytes)
            byte = file.read(1)[0]
            file.seek(slot_bytes)
            file.write(bytes([byte ^ 4]))
        assert copy(DISK, DEVICE, [6, 2, 9, 1, 0], [0, 1, 2, 3, 4], on_disk) == 3
        assert torch.equal(tiers.pools[DEVICE].words[:3], tiers.pools[HOST].words[[4, 3, 2]])


def test_loads_from_host_memory_do_not_wait_for_a_slow_disk(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers.compute(BLOCKS)
    tiers.evict(DEVICE)
    store = tiers.manager.evict(HOST, 3).store
    assert store is not None
    tiers.manager.take_moves()
    asked, may_go_on = threading.Event(), threading.Event()
    write = SlotFile.write

    def slow_write(file: SlotFile, *args: Any) -> dict[int, OSError]:
        asked.set()
        assert may_go_on.wait(60)
        return write(file, *args)

    monkeypatch.setattr(SlotFile, "write", slow_write)
    thread = threading.Thread(
        target=lambda: tiers.manager.finish(store, tiers.transfers.carry_out(store))
    )
    thread.start()
    assert asked.wait(60)
    assert tiers.load(BLOCKS) == 6
    may_go_on.set()
    thread.join()
    tiers.manager.check()
    assert tiers.manager.counts.stored == 6 + 3


def test_a_request_cancelled_in_mid_transfer_leaves_its_slots_intact(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers.compute(BLOCKS)
    tiers.evict(DEVICE)
    tiers.evict(HOST)
    asked, may_go_on = threading.Event(), threading.Event()
    read = SlotFile.read

    def slow_read(file: SlotFile, *args: Any) -> dict[int, BlockLost]:
        asked.set()
        assert may_go_on.wait(60)
        return read(file, *args)

    monkeypatch.setattr(SlotFile, "read", slow_read)
    table = tiers.manager.prepare(BLOCKS, 8)
    (load,) = tiers.manager.take_moves()
    done: list[int] = []
    thread = threading.Thread(target=lambda: done.append(tiers.transfers.carry_out(load)))
    thread.start()
    assert asked.wait(60)
    tiers.manager.release(table)
    tiers.manager.check()
    # No other request gets the slots that are being filled.
    others = tiers.manager.prepare([], tiers.manager.tiers[DEVICE].num_free)
    assert set(others.block_ids).isdisjoint(slot.block_id for slot in load.targets)
    may_go_on.set()
    thread.join()
    tiers.manager.finish(load, done[0])
    tiers.manager.release(others)
    assert tiers.manager.match(BLOCKS) == [DEVICE] * 6
    assert tiers.load(BLOCKS) == 6


def test_a_slot_reused_before_it_is_read_is_not_taken_for_its_earlier_block(tiers: Tiers) -> None:
    tiers.compute(BLOCKS)
    tiers.evict(DEVICE)
    tiers.evict(HOST)
    table = tiers.manager.prepare(BLOCKS, 6)
    (load,) = tiers.manager.take_moves()
    # Only a bug elsewhere can do this: the manager holds sources while they are read.
    victim = load.sources[2]
    memory = np.zeros(1, f"V{WIDE.block_bytes}")
    other = DiskBlock(victim.generation + 1, SequenceHash(7), None)
    assert tiers.disk.write(np.array([victim.block_id]), [other], memory, np.zeros(1, int)) == {}
    done = tiers.transfers.carry_out(load)
    assert done == 2
    tiers.manager.finish(load, done)
    assert table.num_whole == 2
    assert {r.block for _, r in tiers.disk.records()} >= {7}


@pytest.mark.parametrize("is_copied", [False, True])
def test_blocks_fenced_off_before_a_transfer_ends_do_not_count_as_copied(
    is_copied: bool, tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers.compute(BLOCKS)
    tiers.evict(DEVICE)
    tiers.manager.prepare(BLOCKS, 6)
    (load,) = tiers.manager.take_moves()
    copy = tiers.transfers.copy_blocks

    def copy_then_fence(*args: Any) -> int:
        done = copy(*args)
        tiers.manager.fence()
        return done

    if is_copied:
        monkeypatch.setattr(tiers.transfers, "copy_blocks", copy_then_fence)
    else:
        tiers.manager.fence()
    assert tiers.transfers.carry_out(load) == 0


def test_fenced_off_blocks_are_not_stored_for_the_next_process(tiers: Tiers) -> None:
    tiers.compute(BLOCKS)
    tiers.evict(DEVICE)
    tiers.manager.evict(HOST, 6)
    (store,) = tiers.manager.take_moves()
    tiers.manager.fence()
    assert tiers.transfers.carry_out(store) == 0
    assert not list(tiers.disk.records())


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", MAPS.values(), ids=MAPS)
@pytest.mark.parametrize("layers", [slice(None), slice(1, 3)], ids=str)
@pytest.mark.parametrize("name", WITH_DEVICE)
@pytest.mark.parametrize("upwards", [True, False])
def test_every_mover_copies_between_host_and_device(
    upwards: bool, name: str, layers: slice, blocks: tuple[list[int], list[int]]
) -> None:
    pools = host_pool(WIDE, NUM_BLOCKS), MemoryPool(WIDE, NUM_BLOCKS, "cuda")
    for pool in pools:
        pool.words.random_()
    source, target = (pool.words for pool in (pools if upwards else pools[::-1]))
    with copiers.on_stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        if name not in copiers.movers_with_device(source, target):
            pytest.skip("not with this driver")
        torch.cuda.synchronize()  # the first block was copied to find that out
        expected = target.cpu().clone()
        expected[:, layers] = moved(source[:, layers].cpu(), expected[:, layers], *blocks)
        ids = (np.array(ids, dtype=np.int64) for ids in blocks)
        MOVERS[name](source[:, layers], target[:, layers], *ids)
    torch.cuda.synchronize()
    assert torch.equal(target.cpu(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("upwards", [True, False])
def test_on_cuda_each_layer_can_be_used_while_later_ones_are_copied(upwards: bool) -> None:
    pools = host_pool(WIDE, NUM_BLOCKS), MemoryPool(WIDE, NUM_BLOCKS, "cuda")
    source, target = pools if upwards else pools[::-1]
    source.words.random_()
    with streaming(source, target) as stream:
        stream.prepare([7, 2, 9], [3, 11, 0])
        stream.trigger_all()
        for layer in range(WIDE.num_layers):
            stream.wait_layer(layer)
            torch.cuda.current_stream().synchronize()
            assert torch.equal(
                target.words[[3, 11, 0], layer].cpu(), source.words[[7, 2, 9], layer].cpu()
            )
        stream.wait()


ON_THE_SECOND_GPU = """
from threading import Thread

import torch

from tests.workers.kv.test_transfers import WIDE, NUM_BLOCKS, Copier, MemoryPool, host_pool

device = MemoryPool(WIDE, NUM_BLOCKS, "cuda:1")
thread = Thread(target=lambda: Copier(host_pool(WIDE, NUM_BLOCKS), device).copy([1, 2], [5, 3]))
thread.start()
thread.join()
print([n for n in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(n)])
"""


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_copies_to_the_second_gpu_create_no_context_on_the_first() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", ON_THE_SECOND_GPU],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout == "[1]\n"


@pytest.mark.gpu
def test_device_blocks_are_stored_on_disk_and_loaded_back(tmp_path: Path) -> None:
    device = MemoryPool(replace(WIDE, dtype=torch.bfloat16), NUM_BLOCKS, "cuda")
    device.words.random_()
    size = device.shape.block_bytes
    with closing(SlotFile(tmp_path, block_bytes=size, num_slots=NUM_BLOCKS)) as disk:
        copies = Transfers({DEVICE: device}, disk)
        on_disk = [DiskBlock(0, SequenceHash(n), None) for n in range(3)]
        assert copies.copy_blocks(DEVICE, DISK, [5, 1, 2], [0, 7, 3], on_disk) == 3
        assert copies.copy_blocks(DISK, DEVICE, [0, 7, 3], [8, 9, 10], on_disk) == 3
        assert torch.equal(device.words[[8, 9, 10]], device.words[[5, 1, 2]])
