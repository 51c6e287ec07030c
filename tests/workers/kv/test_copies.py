import os
import threading
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch

from app.core.types import Tier
from tests.workers.kv.disk_files import flip
from tests.workers.kv.full_disk import no_room_beyond
from tests.workers.kv.pools import NUM_BLOCKS, ODD, SMALL, WIDE, move_of, pool_of
from tests.workers.kv.words import named
from workers.kv.copiers import PoolCopier
from workers.kv.copies import Copies
from workers.kv.disk import DiskPieces, SlotFile
from workers.kv.disk_records import PAGE_BYTES, DiskBlock
from workers.kv.identity import hash_of
from workers.kv.manager import BlockManager
from workers.kv.memory import MemoryPool

DEVICE, HOST, DISK = Tier


class Tiers:
    """All three tiers, with a block manager."""

    def __init__(self, folder, shape=WIDE, num_slots=NUM_BLOCKS):
        self.folder = folder
        self.pools = {DEVICE: pool_of(shape, 1, num_slots), HOST: pool_of(shape, 2, num_slots)}
        self.disk = SlotFile(folder, block_bytes=shape.block_bytes, num_slots=num_slots)
        self.transfers = Copies(self.pools, self.disk)
        self.manager = BlockManager(dict.fromkeys(Tier, num_slots), now=lambda: 0.0)
        self.content = {}

    def close(self):
        self.disk.close()

    def compute(self, blocks):
        """Fill those of the blocks that are not on the device, and release all of them."""
        table = self.manager.prepare(blocks, len(blocks))
        for block, slot in list(zip(blocks, table.slots, strict=True))[table.num_matched :]:
            self.content[block] = self.pools[DEVICE].words[slot.block_id].random_().clone()
        self.manager.register(table, blocks[table.num_matched :])
        self.manager.release(table)

    def evict(self, tier):
        """All that is in that tier moves down."""
        eviction = self.manager.evict(tier, NUM_BLOCKS)
        self.copy()
        self.manager.withdraw(eviction)
        freed = [slot.block_id for slot in eviction.leaving]
        self.manager.reclaim(eviction)
        if tier in self.pools:  # the slots that blocks come back to may be the same ones
            self.pools[tier].words[freed] = 0

    def put_on_disk(self, blocks):
        self.compute(blocks)
        self.evict(DEVICE)
        self.evict(HOST)

    def copy(self):
        """Carry out the planned moves; returns how many blocks of each were copied."""
        done = []
        for move in self.manager.moves.take_planned():
            done.append(self.transfers.carry_out(move))
            self.manager.finish(move, done[-1])
            self.manager.check()
        return done

    def load(self, blocks):
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

    def lose(self, move):
        """Another move has found the same sources bad."""
        for slot in move.sources:
            self.manager.tiers[move.source].forget(slot)

    def spoil(self, block):
        """Flip a bit of the block on disk."""
        slot = self.manager.tiers[DISK].find(block)
        assert slot is not None
        flip(self.folder / "blocks", slot.block_id * self.disk.slot_bytes + 77)


BLOCKS = [named(100 + n) for n in range(6)]


@pytest.fixture
def tiers(tmp_path):
    with closing(Tiers(tmp_path)) as tiers:
        yield tiers


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(SMALL, id="small"),
        pytest.param(ODD, id="odd"),
        pytest.param(WIDE, id="wide", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("way", [(HOST,), (HOST, DISK), (DISK,)])
def test_blocks_come_back_from_other_tiers_as_they_were(way, shape, tmp_path):
    stops = [DEVICE, *way, DEVICE]
    slots = [[7, 2, 9, 4, 0], *[[3, 11, 0, 5, 6], [10, 9, 8, 7, 6]][: len(way)], [1, 2, 4, 8, 10]]
    with closing(Tiers(tmp_path, shape)) as tiers:
        expected = tiers.pools[DEVICE].words[slots[0]].clone()
        for n in range(len(way) + 1):
            move = move_of(*stops[n : n + 2], *slots[n : n + 2])
            assert tiers.transfers.carry_out(move) == 5
            if move.source is DEVICE:
                tiers.pools[DEVICE].words.zero_()
        assert torch.equal(tiers.pools[DEVICE].words[slots[-1]], expected)


@pytest.mark.parametrize(
    ("block_ids", "slots", "message"),
    [
        ([0, NUM_BLOCKS], [0, 1], "block 12 is not in a pool of 12 blocks"),
        ([0, 1], [0, NUM_BLOCKS], "block 12 is not in a pool of 12 blocks"),
        ([0, 0], [0, 1], "block 0 is named twice"),
    ],
)
def test_invalid_slots_of_a_copy_to_disk_are_refused(block_ids, slots, message, tiers):
    with pytest.raises(ValueError, match=message):
        tiers.transfers.carry_out(move_of(HOST, DISK, block_ids, slots))


def test_blocks_evicted_down_to_disk_are_loaded_back_unchanged(tiers):
    tiers.put_on_disk(BLOCKS)
    assert tiers.manager.match(BLOCKS) == [DISK] * 6
    tiers.pools[DEVICE].words.random_()
    assert tiers.load(BLOCKS) == 6


def test_reused_slots_hold_their_new_blocks(tmp_path):
    with closing(Tiers(tmp_path, SMALL, len(BLOCKS))) as tiers:
        for blocks in (BLOCKS, [named(200 + n) for n in range(6)]):
            # The disk has no room for the second set, so its slots are reused less often.
            tiers.put_on_disk(blocks)
        tiers.evict(DISK)
        tiers.put_on_disk(BLOCKS)
        assert tiers.manager.match(BLOCKS) == [DISK] * 6
        assert tiers.load(BLOCKS) == 6


def test_blocks_on_disk_outlive_the_process(tmp_path):
    with closing(Tiers(tmp_path)) as before:
        before.put_on_disk(BLOCKS)
    with closing(Tiers(tmp_path)) as after:
        parents = {r.block: r.parent for _, r in after.disk.records()}
        assert parents == dict(zip(BLOCKS, [None, *BLOCKS[:-1]], strict=True))
        after.manager.adopt(
            DISK, [(n, r.generation, r.block, r.parent) for n, r in after.disk.records()]
        )
        after.content = before.content
        assert after.load(BLOCKS) == 6


def test_a_block_evicted_from_disk_and_stored_again_is_found_by_the_next_process(tmp_path):
    with closing(Tiers(tmp_path)) as before:
        others = [named(200 + n) for n in range(6)]
        for blocks in (BLOCKS, others, BLOCKS):
            before.put_on_disk(blocks)
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


def test_a_load_ends_before_a_block_with_a_flipped_bit_on_disk(tiers, caplog):
    tiers.put_on_disk(BLOCKS)
    tiers.spoil(BLOCKS[3])
    assert tiers.load(BLOCKS) == 3
    assert "the checksum is wrong" in caplog.text
    assert tiers.manager.match(BLOCKS) == [DEVICE] * 3
    assert (tiers.manager.counts.fallbacks, tiers.manager.counts.recomputed) == (1, 3)
    tiers.compute(BLOCKS[:4])
    assert tiers.manager.match(BLOCKS) == [DEVICE] * 4 + [DISK] * 2
    assert tiers.load(BLOCKS) == 6


def test_slots_of_a_load_that_lost_blocks_are_cleared(tiers):
    tiers.put_on_disk(BLOCKS)
    tiers.spoil(BLOCKS[3])
    table = tiers.manager.prepare(BLOCKS, 6)
    lost = [slot.block_id for slot in table.slots[3:]]
    assert tiers.copy() == [3]
    # Whoever gets them multiplies even what it masks.
    assert not tiers.pools[DEVICE].words[lost].any()


def test_a_load_ends_before_a_block_beyond_the_end_of_a_truncated_file(tiers):
    tiers.put_on_disk(BLOCKS)
    at = {slot.block: slot.block_id for slot in tiers.manager.tiers[DISK].registered()}
    size = WIDE.block_bytes
    os.truncate(tiers.folder / "blocks", max(at.values()) * size + 5_000)
    good = next(n for n, block in enumerate(BLOCKS) if at[block] == max(at.values()))
    assert tiers.load(BLOCKS) == good
    # Nor does the next process find it.
    assert max(at.values()) not in dict(tiers.disk.records())


def test_a_full_disk_stores_the_blocks_that_fit_and_holds_no_others(tiers, caplog):
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


@pytest.mark.parametrize("shape", [SMALL, WIDE], ids=["small", "wide"])
def test_blocks_count_as_copied_up_to_the_first_bad_one_in_request_order(shape, tmp_path):
    with closing(Tiers(tmp_path, shape)) as tiers:
        carry_out, host, disk = tiers.transfers.carry_out, [4, 3, 2, 1, 0], [6, 2, 9, 1, 0]
        slot_bytes = -(-shape.block_bytes // PAGE_BYTES) * PAGE_BYTES
        with no_room_beyond(7 * slot_bytes):
            assert carry_out(move_of(HOST, DISK, host, disk)) == 2
        assert carry_out(move_of(HOST, DISK, host, disk)) == 5
        held = {slot: hash_of(record.block) for slot, record in tiers.disk.records()}
        assert held == {6: 0, 2: 1, 9: 2, 1: 3, 0: 4}
        flip(tmp_path / "blocks", slot_bytes)
        assert carry_out(move_of(DISK, DEVICE, disk, [0, 1, 2, 3, 4])) == 3
        assert torch.equal(tiers.pools[DEVICE].words[:3], tiers.pools[HOST].words[host[:3]])


def test_loads_from_host_memory_do_not_wait_for_a_slow_disk(tiers, monkeypatch):
    tiers.compute(BLOCKS)
    tiers.evict(DEVICE)
    store = tiers.manager.evict(HOST, 3).store
    assert store is not None
    tiers.manager.moves.take_planned()
    asked, may_go_on = threading.Event(), threading.Event()
    write = SlotFile.write

    def slow_write(file, *args):
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


def test_a_request_cancelled_in_mid_transfer_leaves_its_slots_intact(tiers, monkeypatch):
    tiers.put_on_disk(BLOCKS)
    asked, may_go_on = threading.Event(), threading.Event()
    read = DiskPieces.read

    def slow_read(pieces, *args):
        asked.set()
        assert may_go_on.wait(60)
        read(pieces, *args)

    monkeypatch.setattr(DiskPieces, "read", slow_read)
    table = tiers.manager.prepare(BLOCKS, 8)
    (load,) = tiers.manager.moves.take_planned()
    done = []
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


def test_a_slot_reused_before_it_is_read_is_not_taken_for_its_earlier_block(tiers):
    tiers.put_on_disk(BLOCKS)
    table = tiers.manager.prepare(BLOCKS, 6)
    (load,) = tiers.manager.moves.take_planned()
    # Only a bug elsewhere can do this: the manager holds sources while they are read.
    victim = load.sources[2]
    other, data = DiskBlock(victim.generation + 1, named(7), None), bytes(WIDE.block_bytes)
    assert tiers.disk.write(np.array([victim.block_id]), [other], [memoryview(data)]) == {}
    done = tiers.transfers.carry_out(load)
    assert done == 2
    tiers.manager.finish(load, done)
    assert table.num_whole == 2
    assert named(7) in {r.block for _, r in tiers.disk.records()}


@pytest.mark.parametrize("is_copied", [False, True])
def test_blocks_found_bad_before_a_transfer_ends_do_not_count_as_copied(
    is_copied, tiers, monkeypatch
):
    tiers.compute(BLOCKS)
    tiers.evict(DEVICE)
    tiers.manager.prepare(BLOCKS, 6)
    (load,) = tiers.manager.moves.take_planned()
    begin = PoolCopier.begin

    def copy_then_lose(*args):
        event = begin(*args)
        if args[-1].stop == WIDE.num_layers:
            tiers.lose(load)
        return event

    if is_copied:
        monkeypatch.setattr(PoolCopier, "begin", copy_then_lose)
    else:
        tiers.lose(load)
    assert tiers.transfers.carry_out(load) == 0


def test_blocks_found_bad_are_not_stored_for_the_next_process(tiers):
    tiers.compute(BLOCKS)
    tiers.evict(DEVICE)
    tiers.manager.evict(HOST, 6)
    (store,) = tiers.manager.moves.take_planned()
    tiers.lose(store)
    assert tiers.transfers.carry_out(store) == 0
    assert not list(tiers.disk.records())


@pytest.mark.gpu
def test_device_blocks_are_stored_on_disk_and_loaded_back(tmp_path):
    device = MemoryPool(replace(WIDE, dtype=torch.bfloat16), NUM_BLOCKS, "cuda")
    device.words.random_()
    size = device.shape.block_bytes
    with closing(SlotFile(tmp_path, block_bytes=size, num_slots=NUM_BLOCKS)) as disk:
        copies = Copies({DEVICE: device}, disk)
        torch.cuda.synchronize()
        assert copies.carry_out(move_of(DEVICE, DISK, [5, 1, 2], [0, 7, 3])) == 3
        assert copies.carry_out(move_of(DISK, DEVICE, [0, 7, 3], [8, 9, 10])) == 3
        assert torch.equal(device.words[[8, 9, 10]], device.words[[5, 1, 2]])


def test_blocks_that_were_read_from_disk_are_not_written_there_again(tiers, monkeypatch):
    tiers.put_on_disk(BLOCKS)
    assert tiers.load(BLOCKS) == 6
    monkeypatch.delattr(SlotFile, "write")
    tiers.evict(DEVICE)
    tiers.evict(HOST)
    assert tiers.load(BLOCKS) == 6
