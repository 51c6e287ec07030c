from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import random
import resource
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Barrier, Event, Thread, current_thread, main_thread
from typing import Any

import numpy as np
import pytest

from app.core.errors import BlockLost, ConfigError
from app.core.types import SequenceHash
from tests.workers.kv.full_disk import no_room_beyond
from workers.kv import disk
from workers.kv.disk import PAGE_BYTES, RECORD_BYTES, DiskBlock, SlotFile

BLOCK_BYTES = 10_000
"""Two pages and part of a third: a slot takes three."""
SLOT_BYTES = 3 * PAGE_BYTES
NUM_SLOTS = 8
A, B, C = SequenceHash(0xA), SequenceHash(0xB), SequenceHash(0xC)


@contextmanager
def opened(folder: Path, **others: int) -> Iterator[SlotFile]:
    options = {"block_bytes": BLOCK_BYTES, "num_slots": NUM_SLOTS, "fingerprint": 7, **others}
    with closing(SlotFile(folder, **options)) as file:
        yield file


def content(block: int, size: int = BLOCK_BYTES) -> memoryview:
    """The content of a block, different for each block."""
    return memoryview(random.Random(block).randbytes(size))


def write_all(
    file: SlotFile, slots: Sequence[int], blocks: Sequence[DiskBlock], data: Sequence[memoryview]
) -> dict[int, OSError]:
    """Write one batch, with the blocks in reverse order in memory."""
    size = data[0].nbytes if data else file.block_bytes
    memory = np.frombuffer(b"".join(data[::-1]), f"V{size}")
    places = np.arange(len(slots))[::-1]
    return file.write(np.array(slots, np.int64), blocks, memory, places)


def read_all(
    file: SlotFile, slots: Sequence[int], generation: int
) -> tuple[list[bytes], dict[int, BlockLost]]:
    """Read one batch, into every second place in memory."""
    memory = np.zeros(2 * len(slots), f"V{file.block_bytes}")
    places = 2 * np.arange(len(slots)) + 1
    lost = file.read(np.array(slots, np.int64), [generation] * len(slots), memory, places)
    assert not any(memory[::2].tobytes()), "other memory was written to"
    return [bytes(row) for row in memory[places].tolist()], lost


def write(
    file: SlotFile,
    slot: int,
    generation: int,
    block: SequenceHash,
    parent: SequenceHash | None,
    data: memoryview,
) -> None:
    for error in write_all(file, [slot], [DiskBlock(generation, block, parent)], [data]).values():
        raise error


def read(file: SlotFile, slot: int, generation: int) -> bytes:
    (into,), lost = read_all(file, [slot], generation)
    for error in lost.values():
        raise error
    return into


def write_roots(file: SlotFile, slots: Sequence[int], generation: int = 1) -> dict[int, OSError]:
    """Write into each slot the block of the same number, in one batch."""
    blocks = [DiskBlock(generation, SequenceHash(slot), None) for slot in slots]
    return write_all(file, slots, blocks, [content(slot, file.block_bytes) for slot in slots])


def read_roots(
    file: SlotFile, slots: Sequence[int], generation: int = 1
) -> tuple[list[bytes], dict[int, str]]:
    """Read slots in one batch; returns their content, and errors by position in the batch."""
    into, lost = read_all(file, slots, generation)
    return into, {n: str(error) for n, error in lost.items()}


def listed(file: SlotFile) -> dict[int, SequenceHash]:
    return {slot: record.block for slot, record in file.records()}


def generations(file: SlotFile) -> dict[int, int]:
    return {slot: record.generation for slot, record in file.records()}


def spoil(path: Path, offset: int) -> None:
    """Flip one bit."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 0x10
    path.write_bytes(content)


def replace_write(
    monkeypatch: pytest.MonkeyPatch, write: Callable[[Callable[..., int]], Callable[..., int]]
) -> None:
    """Replace what writes blocks, but not what writes records."""
    pwrite = os.pwrite
    replaced = write(pwrite)

    def either(file: int, *args: Any) -> int:
        is_blocks = os.readlink(f"/proc/self/fd/{file}").endswith("/blocks")
        return (replaced if is_blocks else pwrite)(file, *args)

    monkeypatch.setattr(os, "pwrite", either)


def reboot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_boot_id", lambda: b"another run of the machine")


def test_blocks_are_read_as_they_were_written_and_outlive_the_process(tmp_path: Path) -> None:
    folder, zero = tmp_path / "of" / "a worker", SequenceHash(0)
    with opened(folder) as file:
        write(file, 3, 1, A, None, content(A))
        write(file, 5, 1, B, A, content(B))
        write(file, 6, 1, C, zero, content(C))
        assert read(file, 5, 1) == content(B)
    assert (folder / "blocks").stat().st_mode & 0o077 == 0  # prompts may be confidential
    with opened(folder) as file:
        records = dict(file.records())
        assert listed(file) == {3: A, 5: B, 6: C}
        assert [records[slot].parent for slot in (3, 5, 6)] == [None, A, zero]
        assert read(file, 3, 1) == content(A)
        assert read(file, 5, 1) == content(B)


def test_an_overwritten_slot_is_not_read_as_its_earlier_block(tmp_path: Path) -> None:
    with opened(tmp_path) as file:
        write(file, 0, 1, A, None, content(A))
        write(file, 0, 2, B, None, content(B))
        with pytest.raises(BlockLost, match="slot 0 no longer holds generation 1"):
            read(file, 0, 1)
        assert read(file, 0, 2) == content(B)
        with pytest.raises(BlockLost, match="slot 1 no longer holds generation 0"):
            read(file, 1, 0)
    with opened(tmp_path) as file:
        assert [record.generation for _, record in file.records()] == [2]


def test_only_one_process_at_a_time_can_open_the_files(tmp_path: Path) -> None:
    num_open = len(os.listdir("/proc/self/fd"))
    with opened(tmp_path), pytest.raises(ConfigError, match="in use by another process"):
        SlotFile(tmp_path, block_bytes=BLOCK_BYTES, num_slots=NUM_SLOTS)
    with opened(tmp_path):
        pass
    assert len(os.listdir("/proc/self/fd")) == num_open


@pytest.mark.parametrize(
    "others", [{"fingerprint": 8}, {"num_slots": NUM_SLOTS + 1}, {"block_bytes": BLOCK_BYTES - 1}]
)
def test_files_of_another_model_or_size_are_recreated(
    others: dict[str, int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as file:
        write(file, 1, 1, A, None, content(A))
    with opened(tmp_path, **others) as file:
        assert listed(file) == {}
        assert "of another model or size" in caplog.text
        assert (tmp_path / "blocks").stat().st_blocks == 0
    with opened(tmp_path) as file:
        assert listed(file) == {}


def test_an_index_in_another_format_is_recreated(tmp_path: Path) -> None:
    with opened(tmp_path) as file:
        write(file, 1, 1, A, None, content(A))
    spoil(tmp_path / "index", 5)
    with opened(tmp_path) as file:
        assert listed(file) == {}


def test_files_whose_recreation_failed_hold_no_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as file:
        write(file, 1, 1, A, None, content(A))

    def fails(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no room")

    with monkeypatch.context() as patch:
        patch.setattr(disk, "_replace", fails)
        with pytest.raises(OSError, match="no room"), opened(tmp_path, fingerprint=8):
            pass
    with opened(tmp_path) as file:
        assert listed(file) == {}


def test_a_new_index_is_synced_before_it_replaces_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, synced = tmp_path / "index", []

    def record_fsync(file: int) -> None:
        synced.append((os.readlink(f"/proc/self/fd/{file}"), index.exists()))

    monkeypatch.setattr(os, "fsync", record_fsync)
    with opened(tmp_path):
        assert synced == [(f"{index}.new", False), (str(tmp_path), True)]


@pytest.mark.parametrize(("num_slots", "block_bytes"), [(0, 16), (1, 0)])
def test_a_file_without_slots_or_with_empty_blocks_is_refused(
    num_slots: int, block_bytes: int, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"{num_slots} slots of {block_bytes} bytes"):
        SlotFile(tmp_path, block_bytes=block_bytes, num_slots=num_slots)


def test_a_buffer_of_another_size_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as file:
        with pytest.raises(ValueError, match="a block has 10000 bytes, not 9999"):
            write(file, 0, 1, A, None, content(A, 9_999))
        write(file, 0, 1, A, None, content(A))
        with pytest.raises(ValueError, match="a block has 10000 bytes, not 10001"):
            file.read(np.arange(1), [1], np.zeros(1, "V10001"), np.arange(1))


def test_a_flipped_bit_is_detected(tmp_path: Path) -> None:
    with opened(tmp_path) as file:
        write(file, 2, 1, A, None, content(A))
        write(file, 3, 1, B, A, content(B))
        spoil(tmp_path / "blocks", 2 * SLOT_BYTES + 1234)
        for room in (PAGE_BYTES, resource.RLIM_INFINITY):
            with (
                no_room_beyond(room),
                pytest.raises(BlockLost, match="slot 2, block 000000000000000a: the checksum"),
            ):
                read(file, 2, 1)
        assert read(file, 3, 1) == content(B)
        assert listed(file) == {3: B}
    with opened(tmp_path) as file:
        assert listed(file) == {3: B}


def test_detecting_a_bad_block_spares_the_block_just_written_over_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as file:
        write(file, 2, 1, A, None, content(A))
        spoil(tmp_path / "blocks", 2 * SLOT_BYTES)
        spoilt = file._spoilt

        def overtaken(*args: Any) -> str | None:
            why = spoilt(*args)
            write(file, 2, 2, B, None, content(B))
            return why

        monkeypatch.setattr(file, "_spoilt", overtaken)
        with pytest.raises(BlockLost, match="the checksum is wrong"):
            read(file, 2, 1)
        assert read(file, 2, 2) == content(B)


@pytest.mark.parametrize("part_bytes", [4_000, 1 << 20])
def test_a_block_overwritten_while_it_is_read_is_lost_and_its_successor_kept(
    part_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv, generation = os.preadv, 1

    def torn(file: int, rows: Sequence[memoryview], at: int, flags: int) -> int:
        """Before its second half is read, the slot is given another block."""
        nonlocal generation
        row, half = rows[0], len(rows[0]) // 2
        done = preadv(file, [row[:half]], at, flags)
        generation += 1
        write(disk_file, 2, generation, B, None, content(generation))
        return done + preadv(file, [row[half:]], at + half, flags)

    monkeypatch.setattr(disk, "PART_BYTES", part_bytes)
    with opened(tmp_path) as disk_file:
        write(disk_file, 2, 1, A, None, content(1))
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", torn)
            with pytest.raises(BlockLost, match="the checksum is wrong"):
                read(disk_file, 2, 1)
        assert read(disk_file, 2, generation) == content(generation)


def test_truncating_the_file_loses_only_the_blocks_beyond_its_new_end(tmp_path: Path) -> None:
    with opened(tmp_path) as file:
        write(file, 2, 1, A, None, content(A))
        write(file, 3, 1, B, A, content(B))
        os.truncate(tmp_path / "blocks", 3 * SLOT_BYTES + 5_000)
        with pytest.raises(BlockLost, match="only 5000 of 10000 bytes are there"):
            read(file, 3, 1)
    with opened(tmp_path) as file:
        assert listed(file) == {2: A}
        assert read(file, 2, 1) == content(A)
    os.truncate(tmp_path / "blocks", 2 * SLOT_BYTES + 5_000)
    with opened(tmp_path) as file:
        assert listed(file) == {}


@pytest.mark.parametrize("offset", range(0, RECORD_BYTES, 7))
def test_a_corrupt_record_loses_only_its_block(offset: int, tmp_path: Path) -> None:
    with opened(tmp_path) as file:
        write(file, 2, 1, A, None, content(A))
        write(file, 3, 1, B, A, content(B))
    spoil(tmp_path / "index", PAGE_BYTES + 2 * RECORD_BYTES + offset)
    with opened(tmp_path) as file:
        assert listed(file) == {3: B}
        assert read(file, 3, 1) == content(B)


@pytest.mark.parametrize("size", [0, 10, PAGE_BYTES, PAGE_BYTES + 3 * RECORD_BYTES + 1])
def test_a_truncated_index_still_lists_its_remaining_records(size: int, tmp_path: Path) -> None:
    with opened(tmp_path) as file:
        for slot in range(NUM_SLOTS):
            write(file, slot, 1, SequenceHash(slot), None, content(slot))
    os.truncate(tmp_path / "index", size)
    with opened(tmp_path) as file:
        whole = max(0, size - PAGE_BYTES) // RECORD_BYTES
        assert listed(file) == {slot: SequenceHash(slot) for slot in range(whole)}


def test_a_record_that_is_not_its_slots_own_is_ignored(tmp_path: Path) -> None:
    with opened(tmp_path) as file:
        write(file, 2, 1, A, None, content(A))
    index = bytearray((tmp_path / "index").read_bytes())
    at = PAGE_BYTES + 2 * RECORD_BYTES
    index[at + RECORD_BYTES : at + 2 * RECORD_BYTES] = index[at : at + RECORD_BYTES]
    index += disk._packed(
        np.array([NUM_SLOTS]), [DiskBlock(1, B, None)], [0]
    ).tobytes()  # there is none
    (tmp_path / "index").write_bytes(index)
    with opened(tmp_path) as file:
        assert listed(file) == {2: A}


def test_after_a_reboot_only_blocks_that_match_their_checksums_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with opened(tmp_path) as file:
        for slot, block in enumerate((A, B, C)):
            write(file, slot, 1, block, None, content(block))
    spoil(tmp_path / "blocks", SLOT_BYTES)
    reboot(monkeypatch)
    with opened(tmp_path) as file:
        assert listed(file) == {0: A, 2: C}
        assert "all blocks were read, 1 of them were lost" in caplog.text
    caplog.clear()
    with opened(tmp_path) as file:
        assert listed(file) == {0: A, 2: C}
        assert "all blocks were read" not in caplog.text


def test_without_a_boot_id_blocks_are_verified_on_each_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_BOOT_ID", tmp_path / "none")
    with opened(tmp_path) as file:
        write_roots(file, [0, 1])
    spoil(tmp_path / "blocks", SLOT_BYTES)
    with opened(tmp_path) as file:
        assert listed(file) == {0: 0}


def test_a_read_that_arrives_in_pieces_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda f, rows, *how: preadv(f, [rows[0][:999]], *how))
    with opened(tmp_path) as file:
        write(file, 1, 1, A, None, content(A))
        assert read(file, 1, 1) == content(A)


@pytest.mark.parametrize("part_bytes", [4_000, 1 << 20])
def test_blocks_that_the_kernel_has_not_cached_are_read_from_the_disk(
    part_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv, asked = os.preadv, set()
    told: list[int] = []

    def told_of(file: int, at: int, size: int, advice: int) -> None:
        told.extend(range(at // SLOT_BYTES, (at + size) // SLOT_BYTES))

    def from_disk(file: int, rows: Sequence[memoryview], at: int, flags: int) -> int:
        asked.add(flags)
        if flags & os.RWF_NOWAIT:
            raise BlockingIOError
        assert told == [1, 2, 3], "the kernel was not told of all blocks before the first wait"
        if at // SLOT_BYTES == 2:
            raise OSError(errno.EIO, "Input/output error")
        return preadv(file, rows, at, flags)

    monkeypatch.setattr(disk, "PART_BYTES", part_bytes)
    monkeypatch.setattr(os, "posix_fadvise", told_of)
    monkeypatch.setattr(os, "preadv", from_disk)
    with opened(tmp_path) as file:
        write_roots(file, [1, 2, 3])
        into, lost = read_roots(file, [1, 2, 3])
        assert lost == {
            1: "disk slot 2, block 0000000000000002: [Errno 5] Input/output error",
        }
        assert [into[0], into[2]] == [content(1), content(3)]
        assert listed(file) == {1: 1, 3: 3}
        assert asked == {os.RWF_NOWAIT, 0}


def test_a_block_that_does_not_fit_on_a_full_disk_is_not_listed(tmp_path: Path) -> None:
    with opened(tmp_path) as file:
        write(file, 1, 1, A, None, content(A))
        write(file, 4, 1, B, None, content(B))
        with no_room_beyond(4 * SLOT_BYTES + 100):
            with pytest.raises(OSError, match="File too large"):
                write(file, 4, 1, C, None, content(C))
            write(file, 0, 1, C, None, content(C))
        assert listed(file) == {0: C, 1: A}
    with opened(tmp_path) as file:
        assert listed(file) == {0: C, 1: A}
        assert read(file, 1, 1) == content(A)


@pytest.mark.parametrize("block_bytes", [BLOCK_BYTES, SLOT_BYTES])
def test_a_full_disk_stores_the_blocks_of_a_batch_that_fit(
    block_bytes: int, tmp_path: Path
) -> None:
    with opened(tmp_path, block_bytes=block_bytes) as file:
        write_roots(file, [2, 4, 6, 7])
        with no_room_beyond(4 * SLOT_BYTES + 100):
            failed = write_roots(file, [1, 2, 3, 4, 5, 7], generation=2)
        assert {n: error.errno for n, error in failed.items()} == {
            3: errno.EFBIG,
            4: errno.EFBIG,
            5: errno.EFBIG,
        }
        # The earlier blocks of slots 4 and 7 were given up for ones that could not be written.
        assert listed(file) == {1: 1, 2: 2, 3: 3, 6: 6}
    with opened(tmp_path, block_bytes=block_bytes) as file:
        assert listed(file) == {1: 1, 2: 2, 3: 3, 6: 6}
        assert read_roots(file, [1, 2, 3], generation=2) == (
            [content(n, block_bytes) for n in (1, 2, 3)],
            {},
        )
        assert read(file, 6, 1) == content(6, block_bytes)


@pytest.mark.parametrize("small_bytes", [0, 1 << 20])
@pytest.mark.parametrize("block_bytes", [BLOCK_BYTES, SLOT_BYTES])
def test_an_error_in_mid_batch_affects_only_its_block(
    block_bytes: int, small_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bad_third_slot(write: Callable[..., int]) -> Callable[..., int]:
        def writes(file: int, data: memoryview, at: int) -> int:
            if at <= 3 * SLOT_BYTES < at + len(data):
                raise OSError(errno.EIO, "Input/output error")
            return write(file, data, at)

        return writes

    monkeypatch.setattr(disk, "SMALL_BYTES", small_bytes)
    replace_write(monkeypatch, bad_third_slot)
    with opened(tmp_path, block_bytes=block_bytes) as file:
        failed = write_roots(file, [1, 2, 3, 4, 5])
        assert {n: error.errno for n, error in failed.items()} == {2: errno.EIO}
        assert listed(file) == {1: 1, 2: 2, 4: 4, 5: 5}
        held = [1, 2, 4, 5]
        assert read_roots(file, held) == ([content(slot, block_bytes) for slot in held], {})


def test_slots_keep_their_blocks_if_the_index_cannot_be_written(tmp_path: Path) -> None:
    with opened(tmp_path) as file:
        write_roots(file, [1, 2])
        with no_room_beyond(PAGE_BYTES):
            assert write_roots(file, [1, 2, 3], generation=2).keys() == {0, 1, 2}
        assert read_roots(file, [1, 2]) == ([content(1), content(2)], {})
    with opened(tmp_path) as file:
        assert listed(file) == {1: 1, 2: 2}


def test_a_slot_keeps_its_block_if_its_record_cannot_be_written(tmp_path: Path) -> None:
    size = PAGE_BYTES  # there is room for the block itself
    with closing(SlotFile(tmp_path, block_bytes=size, num_slots=1)) as file:
        with no_room_beyond(size), pytest.raises(OSError, match="File too large"):
            write(file, 0, 1, A, None, content(A, size))
        assert listed(file) == {}
        write(file, 0, 1, A, None, content(A, size))
        with no_room_beyond(size), pytest.raises(OSError, match="File too large"):
            write(file, 0, 2, B, None, content(B, size))
        assert read(file, 0, 1) == content(A, size)


def test_a_batch_without_room_for_a_block_or_for_the_records_stores_nothing(
    tmp_path: Path,
) -> None:
    size = PAGE_BYTES
    blocks, rows = [DiskBlock(1, b, None) for b in (A, B)], [content(b, size) for b in (A, B)]
    with closing(SlotFile(tmp_path, block_bytes=size, num_slots=2)) as file:
        assert (tmp_path / "blocks").stat().st_size == 2 * size
        with no_room_beyond(size):
            assert write_all(file, [0, 1], blocks, rows).keys() == {0, 1}
        assert listed(file) == {}


@pytest.mark.parametrize("slots", [[], [3], [0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 4, 6, 7]], ids=len)
@pytest.mark.parametrize("part_bytes", [4_000, 3 * SLOT_BYTES, 1 << 20])
@pytest.mark.parametrize("small_bytes", [0, 1 << 20])
@pytest.mark.parametrize("block_bytes", [BLOCK_BYTES, SLOT_BYTES])
def test_a_batch_is_read_as_it_was_written_and_other_slots_keep_their_blocks(
    block_bytes: int,
    small_bytes: int,
    part_bytes: int,
    slots: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(disk, "THREADS", 3)
    monkeypatch.setattr(disk, "PART_BYTES", part_bytes)
    monkeypatch.setattr(disk, "SMALL_BYTES", small_bytes)
    others = [slot for slot in range(NUM_SLOTS) if slot not in slots]
    contents = [content(slot, block_bytes) for slot in range(NUM_SLOTS)]
    with opened(tmp_path, block_bytes=block_bytes) as file:
        assert write_roots(file, others, generation=1) == {}
        assert write_roots(file, slots, generation=2) == {}
    with opened(tmp_path, block_bytes=block_bytes) as file:
        assert generations(file) == dict.fromkeys(others, 1) | dict.fromkeys(slots, 2)
        assert read_roots(file, slots, generation=2) == ([contents[slot] for slot in slots], {})
        assert read_roots(file, others, generation=1) == ([contents[slot] for slot in others], {})


@pytest.mark.parametrize(
    ("part_bytes", "runs"),
    [
        (1 << 20, [(0, 2), (3, 2), (6, 2)]),
        (3 * SLOT_BYTES, [(0, 2), (3, 1), (4, 1), (6, 2)]),
        (SLOT_BYTES - 1, [(slot, 1) for slot in (0, 1, 3, 4, 6, 7)]),
    ],
)
def test_consecutive_slots_of_a_part_take_one_system_call(
    part_bytes: int, runs: list[tuple[int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: dict[str, list[tuple[int, int]]] = {"pwrite": [], "preadv": []}

    def count(name: str) -> None:
        call = getattr(os, name)

        def counted(fd: int, data: Any, at: int, *flags: int) -> int:
            done = int(call(fd, data, at))  # without flags: not every file system knows them
            if fd == file._blocks and at % SLOT_BYTES == 0:
                calls[name].append((at // SLOT_BYTES, -(-done // SLOT_BYTES)))
            return done

        monkeypatch.setattr(os, name, counted)

    monkeypatch.setattr(disk, "THREADS", 1)
    monkeypatch.setattr(disk, "PART_BYTES", part_bytes)
    with opened(tmp_path, block_bytes=SLOT_BYTES) as file:
        for name in calls:
            count(name)
        assert write_roots(file, [0, 1, 3, 4, 6, 7]) == {}
        assert read_roots(file, [0, 1, 3, 4, 6, 7])[1] == {}
    assert calls == {"pwrite": runs, "preadv": runs}


@pytest.mark.parametrize(("part_bytes", "num_threads"), [(SLOT_BYTES, 3), (1 << 20, 1)])
def test_threads_share_a_batch_of_several_parts(
    part_bytes: int, num_threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "THREADS", 3)
    monkeypatch.setattr(disk, "PART_BYTES", part_bytes)
    all_writing, threads = Barrier(num_threads), set()

    def once_all_are_writing(write: Callable[..., int]) -> Callable[..., int]:
        def waits(*args: Any) -> int:
            threads.add(current_thread())
            all_writing.wait(60)
            return write(*args)

        return waits

    replace_write(monkeypatch, once_all_are_writing)
    with opened(tmp_path) as file:
        assert write_roots(file, [1, 2, 3]) == {}
        assert len(threads) == num_threads
        assert read_roots(file, [1, 2, 3]) == ([content(slot) for slot in (1, 2, 3)], {})


def test_a_copy_does_not_wait_for_threads_that_are_busy_with_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "PART_BYTES", SLOT_BYTES)
    done = Event()
    with opened(tmp_path) as file:
        busy = [file._threads.submit(done.wait, 60) for _ in range(disk.THREADS)]
        assert write_roots(file, [1, 2, 3]) == {}
        assert read_roots(file, [1, 2, 3]) == ([content(slot) for slot in (1, 2, 3)], {})
        assert not any(other.done() for other in busy)
        done.set()


@pytest.mark.parametrize("main_fails", [True, False])
def test_an_error_in_one_part_of_a_batch_is_raised_only_after_the_others_have_ended(
    main_fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Callers that see the error may reuse the slots and the memory."""
    monkeypatch.setattr(disk, "THREADS", 3)
    monkeypatch.setattr(disk, "PART_BYTES", SLOT_BYTES)
    reported, num_late = Event(), 0

    def some_fail(write: Callable[..., int]) -> Callable[..., int]:
        def fails(*args: Any) -> int:
            nonlocal num_late
            if (current_thread() is main_thread()) is main_fails:
                raise MemoryError
            reported.wait(0.2)
            num_late += reported.is_set()
            return write(*args)

        return fails

    replace_write(monkeypatch, some_fail)
    with opened(tmp_path) as file:
        with pytest.raises(MemoryError):
            write_roots(file, [1, 2, 3])
        reported.set()
    assert not num_late


@pytest.mark.parametrize("fails", [False, True])
def test_parts_for_which_no_thread_can_be_started_are_not_carried_out_late(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "THREADS", 3)
    monkeypatch.setattr(disk, "PART_BYTES", SLOT_BYTES)
    writing = []

    def no_more(thread: Thread) -> None:
        raise RuntimeError("can't start new thread")

    def recorded(write: Callable[..., int]) -> Callable[..., int]:
        def records(*args: Any) -> int:
            writing.append(current_thread())
            if fails:
                raise MemoryError
            return write(*args)

        return records

    replace_write(monkeypatch, recorded)
    with opened(tmp_path) as file:
        with monkeypatch.context() as patch:
            patch.setattr(Thread, "start", no_more)
            with pytest.raises(MemoryError) if fails else nullcontext():
                assert write_roots(file, [1, 2, 3]) == {}
        file._threads.submit(int).result()  # now there is a thread
        assert listed(file) == ({} if fails else {1: 1, 2: 2, 3: 3})
    assert writing == [main_thread()] * (1 if fails else 3)


@pytest.mark.parametrize("part_bytes", [4_000, 3 * SLOT_BYTES, 1 << 20])
@pytest.mark.parametrize("block_bytes", [BLOCK_BYTES, SLOT_BYTES])
def test_bad_blocks_of_a_batch_are_reported_and_affect_no_others(
    block_bytes: int, part_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "THREADS", 3)
    monkeypatch.setattr(disk, "PART_BYTES", part_bytes)
    with opened(tmp_path, block_bytes=block_bytes) as file:
        write_roots(file, [1, 2, 3, 4, 5, 6])
        write_roots(file, [2], generation=2)
        spoil(tmp_path / "blocks", 4 * SLOT_BYTES + 9_999)
        os.truncate(tmp_path / "blocks", 6 * SLOT_BYTES + 5_000)
        into, lost = read_roots(file, [1, 2, 3, 4, 5, 6, 7])
        assert lost == {
            1: "disk slot 2 no longer holds generation 1",
            3: "disk slot 4, block 0000000000000004: the checksum is wrong",
            5: f"disk slot 6, block 0000000000000006: only 5000 of {block_bytes} bytes are there",
            6: "disk slot 7 no longer holds generation 1",
        }
        assert [into[n] for n in (0, 2, 4)] == [content(slot, block_bytes) for slot in (1, 3, 5)]
        assert listed(file) == {slot: slot for slot in (1, 2, 3, 5)}


def test_concurrently_written_batches_leave_each_others_records_alone(tmp_path: Path) -> None:
    with opened(tmp_path) as file, ThreadPoolExecutor(2) as threads:
        even, odd = range(0, NUM_SLOTS, 2), range(1, NUM_SLOTS, 2)
        for generation in range(1, 100):
            both = [threads.submit(write_roots, file, slots, generation) for slots in (even, odd)]
            assert [batch.result() for batch in both] == [{}, {}]
            assert generations(file) == dict.fromkeys(range(NUM_SLOTS), generation)
    with opened(tmp_path) as file:
        assert generations(file) == dict.fromkeys(range(NUM_SLOTS), 99)


KILLED_BLOCK_BYTES = 1 << 17
KILLED_SLOTS = 64
FORKS = multiprocessing.get_context("forkserver")
"""Starts a process in milliseconds, and without the threads of this one."""
FORKS.set_forkserver_preload([__name__])


def keep_writing(folder: Path, seed: int, reports: Connection) -> None:
    """Write batches of blocks until killed, reporting the begin and the end of each."""
    rng = random.Random(seed)
    file = SlotFile(folder, block_bytes=KILLED_BLOCK_BYTES, num_slots=KILLED_SLOTS)
    while True:
        slots = sorted(rng.sample(range(KILLED_SLOTS), rng.randrange(1, KILLED_SLOTS)))
        blocks = [DiskBlock(1, SequenceHash(rng.getrandbits(64)), None) for _ in slots]
        data = [memoryview(killed_content(what.block)) for what in blocks]
        batch = {slot: int(what.block) for slot, what in zip(slots, blocks, strict=True)}
        reports.send(("begin", batch))
        write_all(file, slots, blocks, data)
        reports.send(("done", batch))


def killed_content(block: SequenceHash) -> bytes:
    return block.to_bytes(8, "little") * (KILLED_BLOCK_BYTES // 8)


def killed_writer(folder: Path, turn: int) -> Iterator[tuple[str, dict[int, int]]]:
    """What a process reported that wrote batches of blocks until it was killed.

    In odd turns it is killed just after it has voided or written records.
    """
    index = folder / "index"
    reports, reporting = FORKS.Pipe(duplex=False)
    writer = FORKS.Process(target=keep_writing, args=(folder, turn, reporting))
    writer.start()
    reporting.close()
    for _ in range(random.Random(turn).randrange(1, 24)):
        yield reports.recv()
    before = index.read_bytes()
    while turn % 2 and index.read_bytes() == before and writer.is_alive():
        pass
    writer.kill()
    with reports, suppress(EOFError):
        while True:
            yield reports.recv()
    writer.join()


def test_a_process_killed_in_mid_write_loses_no_blocks_outside_its_current_batch(
    tmp_path: Path,
) -> None:
    torn = 0
    held: dict[int, int] = {}
    for turn in range(40):
        begun: dict[int, int] = {}
        for event, batch in killed_writer(tmp_path, turn):
            if event == "begin":
                begun = batch
            else:
                held, begun = held | batch, {}
        with closing(
            SlotFile(tmp_path, block_bytes=KILLED_BLOCK_BYTES, num_slots=KILLED_SLOTS)
        ) as file:
            found = {slot: int(block) for slot, block in listed(file).items()}
            for slot, record in file.records():
                assert read(file, slot, record.generation) == killed_content(record.block)
        for slot, block in begun.items():
            # The old block, none, or the new block, depending on how far the write got.
            assert found.get(slot) in (held.get(slot), None, block)
        torn += any(slot not in found for slot in begun)
        held = {slot: block for slot, block in held.items() if slot not in begun}
        held |= {slot: found[slot] for slot in begun if slot in found}
        assert found == held
    assert torn, "no write was cut short"
