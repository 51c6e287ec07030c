import errno
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest

from app.core.errors import ConfigError
from tests.workers.kv.disk_files import (
    BLOCK_BYTES,
    NUM_SLOTS,
    SLOT_BYTES,
    A,
    B,
    C,
    content,
    flip,
    generations,
    listed,
    opened,
    read,
    read_roots,
    reboot,
    write,
    write_all,
    write_roots,
)
from tests.workers.kv.full_disk import no_room_beyond
from tests.workers.kv.words import named
from workers.kv import disk_records
from workers.kv.disk import SlotFile
from workers.kv.disk_records import PAGE_BYTES, RECORD_BYTES, DiskBlock


def test_only_one_process_at_a_time_can_open_the_files(tmp_path):
    num_open = len(os.listdir("/proc/self/fd"))
    with opened(tmp_path), pytest.raises(ConfigError, match="in use by another process"):
        SlotFile(tmp_path, block_bytes=BLOCK_BYTES, num_slots=NUM_SLOTS)
    with opened(tmp_path):
        pass
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_blocks_of_the_format_before_are_not_served(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(disk_records, "_MAGIC", b"kvroute disk tier 1\n")
        with opened(tmp_path) as file:
            write(file, 1, 1, A, None, content(A))
    with opened(tmp_path) as file:
        assert listed(file) == {}


@pytest.mark.parametrize(
    "others", [{"fingerprint": 8}, {"num_slots": NUM_SLOTS + 1}, {"block_bytes": BLOCK_BYTES - 1}]
)
def test_files_of_another_model_or_size_are_recreated(others, tmp_path, caplog):
    with opened(tmp_path) as file:
        write(file, 1, 1, A, None, content(A))
    with opened(tmp_path, **others) as file:
        assert listed(file) == {}
        assert "of another model, size or version" in caplog.text
        assert (tmp_path / "blocks").stat().st_blocks == 0
    with opened(tmp_path) as file:
        assert listed(file) == {}


def test_an_index_in_another_format_is_recreated(tmp_path):
    with opened(tmp_path) as file:
        write(file, 1, 1, A, None, content(A))
    flip(tmp_path / "index", 5)
    with opened(tmp_path) as file:
        assert listed(file) == {}


def test_files_whose_recreation_failed_hold_no_blocks(tmp_path, monkeypatch):
    with opened(tmp_path) as file:
        write(file, 1, 1, A, None, content(A))

    def fails(*_):
        raise OSError(errno.ENOSPC, "no room")

    with monkeypatch.context() as patch:
        patch.setattr(disk_records, "_replace", fails)
        with pytest.raises(OSError, match="no room"), opened(tmp_path, fingerprint=8):
            pass
    with opened(tmp_path) as file:
        assert listed(file) == {}


def test_a_new_index_is_synced_before_it_replaces_the_old_one(tmp_path, monkeypatch):
    index, synced = tmp_path / "index", []

    def record_fsync(file):
        synced.append((os.readlink(f"/proc/self/fd/{file}"), index.exists()))

    monkeypatch.setattr(os, "fsync", record_fsync)
    with opened(tmp_path):
        assert synced == [(f"{index}.new", False), (str(tmp_path), True)]


@pytest.mark.parametrize("offset", range(0, RECORD_BYTES, 7))
def test_a_corrupt_record_loses_only_its_block(offset, tmp_path):
    with opened(tmp_path) as file:
        write(file, 2, 1, A, None, content(A))
        write(file, 3, 1, B, A, content(B))
    flip(tmp_path / "index", PAGE_BYTES + 2 * RECORD_BYTES + offset)
    with opened(tmp_path) as file:
        assert listed(file) == {3: B}
        assert read(file, 3, 1) == content(B)


@pytest.mark.parametrize("size", [0, 10, PAGE_BYTES, PAGE_BYTES + 3 * RECORD_BYTES + 1])
def test_a_truncated_index_still_lists_its_remaining_records(size, tmp_path):
    with opened(tmp_path) as file:
        for slot in range(NUM_SLOTS):
            write(file, slot, 1, slot, None, content(slot))
    os.truncate(tmp_path / "index", size)
    with opened(tmp_path) as file:
        whole = max(0, size - PAGE_BYTES) // RECORD_BYTES
        assert listed(file) == {slot: slot for slot in range(whole)}


def test_a_record_that_is_not_its_slots_own_is_ignored(tmp_path):
    with opened(tmp_path) as file:
        write(file, 2, 1, A, None, content(A))
    index = bytearray((tmp_path / "index").read_bytes())
    at = PAGE_BYTES + 2 * RECORD_BYTES
    index[at + RECORD_BYTES : at + 2 * RECORD_BYTES] = index[at : at + RECORD_BYTES]
    index += disk_records._packed(
        np.array([NUM_SLOTS]), [DiskBlock(1, named(B), None)], [0]
    ).tobytes()  # there is none
    (tmp_path / "index").write_bytes(index)
    with opened(tmp_path) as file:
        assert listed(file) == {2: A}


def test_after_a_reboot_only_blocks_that_match_their_checksums_are_kept(
    tmp_path, monkeypatch, caplog
):
    caplog.set_level(logging.INFO)
    with opened(tmp_path) as file:
        for slot, block in enumerate((A, B, C)):
            write(file, slot, 1, block, None, content(block))
    flip(tmp_path / "blocks", SLOT_BYTES)
    reboot(monkeypatch)
    with opened(tmp_path) as file:
        assert listed(file) == {0: A, 2: C}
        assert "all blocks were read, 1 of them were lost" in caplog.text
    caplog.clear()
    with opened(tmp_path) as file:
        assert listed(file) == {0: A, 2: C}
        assert "all blocks were read" not in caplog.text


def test_without_a_boot_id_blocks_are_verified_on_each_opening(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_records, "_BOOT_ID", tmp_path / "none")
    with opened(tmp_path) as file:
        write_roots(file, [0, 1])
    flip(tmp_path / "blocks", SLOT_BYTES)
    with opened(tmp_path) as file:
        assert listed(file) == {0: 0}


def test_slots_keep_their_blocks_if_the_index_cannot_be_written(tmp_path):
    with opened(tmp_path) as file:
        write_roots(file, [1, 2])
        with no_room_beyond(PAGE_BYTES):
            assert write_roots(file, [1, 2, 3], generation=2).keys() == {0, 1, 2}
        assert read_roots(file, [1, 2]) == ([content(1), content(2)], {})
    with opened(tmp_path) as file:
        assert listed(file) == {1: 1, 2: 2}


def test_a_slot_keeps_its_block_if_its_record_cannot_be_written(tmp_path):
    size = PAGE_BYTES  # there is room for the block itself
    with closing(SlotFile(tmp_path, block_bytes=size, num_slots=1)) as file:
        with no_room_beyond(size), pytest.raises(OSError, match="File too large"):
            write(file, 0, 1, A, None, content(A, size))
        assert listed(file) == {}
        write(file, 0, 1, A, None, content(A, size))
        with no_room_beyond(size), pytest.raises(OSError, match="File too large"):
            write(file, 0, 2, B, None, content(B, size))
        assert read(file, 0, 1) == content(A, size)


def test_a_batch_without_room_for_a_block_or_for_the_records_stores_nothing(tmp_path):
    size = PAGE_BYTES
    blocks = [DiskBlock(1, named(b), None) for b in (A, B)]
    rows = [content(b, size) for b in (A, B)]
    with closing(SlotFile(tmp_path, block_bytes=size, num_slots=2)) as file:
        assert (tmp_path / "blocks").stat().st_size == 2 * size
        with no_room_beyond(size):
            assert write_all(file, [0, 1], blocks, rows).keys() == {0, 1}
        assert listed(file) == {}


def test_concurrently_written_batches_leave_each_others_records_alone(tmp_path):
    with opened(tmp_path) as file, ThreadPoolExecutor(2) as threads:
        even, odd = range(0, NUM_SLOTS, 2), range(1, NUM_SLOTS, 2)
        for generation in range(1, 100):
            both = [threads.submit(write_roots, file, slots, generation) for slots in (even, odd)]
            assert [batch.result() for batch in both] == [{}, {}]
            assert generations(file) == dict.fromkeys(range(NUM_SLOTS), generation)
    with opened(tmp_path) as file:
        assert generations(file) == dict.fromkeys(range(NUM_SLOTS), 99)
