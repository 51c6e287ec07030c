import errno
import multiprocessing
import os
import random
from contextlib import closing, nullcontext, suppress
from threading import Barrier, Event, Thread, current_thread, main_thread

import numpy as np
import pytest

from app.core.errors import BlockLost
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
    replace_write,
    write,
    write_all,
    write_roots,
)
from tests.workers.kv.full_disk import no_room_beyond
from tests.workers.kv.words import named
from workers.kv import disk
from workers.kv.disk import DiskPieces, SlotFile
from workers.kv.disk_records import PAGE_BYTES, DiskBlock
from workers.kv.identity import hash_of


def test_blocks_are_read_as_they_were_written_and_outlive_the_process(tmp_path):
    folder, zero = tmp_path / "of" / "a worker", 0
    with opened(folder) as file:
        write(file, 3, 1, A, None, content(A))
        write(file, 5, 1, B, A, content(B))
        write(file, 6, 1, C, zero, content(C))
        assert read(file, 5, 1) == content(B)
    assert (folder / "blocks").stat().st_mode & 0o077 == 0  # prompts may be confidential
    with opened(folder) as file:
        records = dict(file.records())
        assert listed(file) == {3: A, 5: B, 6: C}
        assert [records[slot].parent for slot in (3, 5, 6)] == [None, named(A), named(zero)]
        assert read(file, 3, 1) == content(A)
        assert read(file, 5, 1) == content(B)


def test_an_overwritten_slot_is_not_read_as_its_earlier_block(tmp_path):
    with opened(tmp_path) as file:
        write(file, 0, 1, A, None, content(A))
        write(file, 0, 2, B, None, content(B))
        with pytest.raises(BlockLost, match="slot 0: no longer holds generation 1"):
            read(file, 0, 1)
        assert read(file, 0, 2) == content(B)
        with pytest.raises(BlockLost, match="slot 1: no longer holds generation 0"):
            read(file, 1, 0)
    with opened(tmp_path) as file:
        assert [record.generation for _, record in file.records()] == [2]


def test_a_flipped_bit_is_detected(tmp_path):
    with opened(tmp_path) as file:
        write(file, 2, 1, A, None, content(A))
        write(file, 3, 1, B, A, content(B))
        flip(tmp_path / "blocks", 2 * SLOT_BYTES + 1234)
        with (
            no_room_beyond(PAGE_BYTES),  # so that the index cannot say yet that it is lost
            pytest.raises(BlockLost, match="slot 2: block 000000000000000a: the checksum"),
        ):
            read(file, 2, 1)
        with pytest.raises(BlockLost, match="slot 2: block 000000000000000a: the checksum"):
            read(file, 2, 1)
        assert read(file, 3, 1) == content(B)
        assert listed(file) == {3: B}
    with opened(tmp_path) as file:
        assert listed(file) == {3: B}


def test_a_block_overwritten_while_it_is_read_is_lost_and_its_successor_kept(tmp_path):
    with opened(tmp_path) as file:
        write(file, 2, 1, A, None, content(A))
        pieces, half = DiskPieces(file, np.array([2]), [1]), BLOCK_BYTES // 2
        pieces.read([memoryview(bytearray(half))], half)
        write(file, 2, 2, B, None, content(B))
        pieces.read([memoryview(bytearray(half))], 0)
        assert "the checksum is wrong" in str(pieces.finish()[0])
        assert read(file, 2, 2) == content(B)


def test_truncating_the_file_loses_only_the_blocks_beyond_its_new_end(tmp_path):
    with opened(tmp_path) as file:
        write(file, 2, 1, A, None, content(A))
        write(file, 3, 1, B, A, content(B))
        os.truncate(tmp_path / "blocks", 3 * SLOT_BYTES + 5_000)
        with pytest.raises(BlockLost, match="only 0 of 5000 bytes at 41864 are there"):
            read(file, 3, 1)
    with opened(tmp_path) as file:
        assert listed(file) == {2: A}
        assert read(file, 2, 1) == content(A)
    os.truncate(tmp_path / "blocks", 2 * SLOT_BYTES + 5_000)
    with opened(tmp_path) as file:
        assert listed(file) == {}


def test_a_read_that_arrives_in_pieces_is_completed(tmp_path, monkeypatch):
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda f, rows, at: preadv(f, [rows[0][:999]], at))
    with opened(tmp_path) as file:
        write(file, 1, 1, A, None, content(A))
        assert read(file, 1, 1) == content(A)


def test_the_kernel_is_told_what_is_read_next_and_a_read_that_fails_loses_one_block(
    tmp_path, monkeypatch
):
    preadv, told, asked = os.preadv, set(), set()

    def advised(file, at, size, advice):
        told.update(range(at, at + size))

    def fails(file, rows, at):
        assert {*range(at, at + len(rows[0]))} <= told
        asked.add(at)
        if at // SLOT_BYTES == 2:
            raise OSError(errno.EIO, "Input/output error")
        return preadv(file, rows, at)

    monkeypatch.setattr(os, "posix_fadvise", advised)
    with opened(tmp_path) as file:
        write_roots(file, [1, 2, 3])
        monkeypatch.setattr(os, "preadv", fails)
        into, lost = read_roots(file, [1, 2, 3])
        assert lost == {1: "disk slot 2: [Errno 5] Input/output error"}
        assert [into[0], into[2]] == [content(1), content(3)]
        assert listed(file) == {1: 1, 3: 3}
        assert len(asked) == 5, "what is lost is not read on"


def test_a_block_that_does_not_fit_on_a_full_disk_is_not_listed(tmp_path):
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
def test_a_full_disk_stores_the_blocks_of_a_batch_that_fit(block_bytes, tmp_path):
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


@pytest.mark.parametrize("block_bytes", [BLOCK_BYTES, SLOT_BYTES])
def test_an_error_in_mid_batch_affects_only_its_block(block_bytes, tmp_path, monkeypatch):
    def bad_third_slot(write):
        def writes(file, data, at):
            if at <= 3 * SLOT_BYTES < at + len(data):
                raise OSError(errno.EIO, "Input/output error")
            return write(file, data, at)

        return writes

    replace_write(monkeypatch, bad_third_slot)
    with opened(tmp_path, block_bytes=block_bytes) as file:
        failed = write_roots(file, [1, 2, 3, 4, 5])
        assert {n: error.errno for n, error in failed.items()} == {2: errno.EIO}
        assert listed(file) == {1: 1, 2: 2, 4: 4, 5: 5}
        held = [1, 2, 4, 5]
        assert read_roots(file, held) == ([content(slot, block_bytes) for slot in held], {})


@pytest.mark.parametrize("slots", [[], [3], [0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 4, 6, 7]], ids=len)
@pytest.mark.parametrize("part_bytes", [4_000, 3 * SLOT_BYTES, 1 << 20])
@pytest.mark.parametrize("block_bytes", [BLOCK_BYTES, SLOT_BYTES])
def test_a_batch_is_read_as_it_was_written_and_other_slots_keep_their_blocks(
    block_bytes, part_bytes, slots, tmp_path, monkeypatch
):
    monkeypatch.setattr(disk, "THREADS", 3)
    monkeypatch.setattr(disk, "PART_BYTES", part_bytes)
    others = [slot for slot in range(NUM_SLOTS) if slot not in slots]
    contents = [content(slot, block_bytes) for slot in range(NUM_SLOTS)]
    with opened(tmp_path, block_bytes=block_bytes) as file:
        assert write_roots(file, others, generation=1) == {}
        assert write_roots(file, slots, generation=2) == {}
    with opened(tmp_path, block_bytes=block_bytes) as file:
        assert generations(file) == dict.fromkeys(others, 1) | dict.fromkeys(slots, 2)
        assert read_roots(file, slots, generation=2) == ([contents[slot] for slot in slots], {})
        assert read_roots(file, others, generation=1) == ([contents[slot] for slot in others], {})


@pytest.mark.parametrize(("part_bytes", "num_threads"), [(SLOT_BYTES, 3), (1 << 20, 1)])
def test_threads_share_a_batch_of_several_parts(part_bytes, num_threads, tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "THREADS", 3)
    monkeypatch.setattr(disk, "PART_BYTES", part_bytes)
    all_writing, threads = Barrier(num_threads), set()

    def once_all_are_writing(write):
        def waits(*args):
            threads.add(current_thread())
            all_writing.wait(60)
            return write(*args)

        return waits

    replace_write(monkeypatch, once_all_are_writing)
    with opened(tmp_path) as file:
        assert write_roots(file, [1, 2, 3]) == {}
        assert len(threads) == num_threads
        assert read_roots(file, [1, 2, 3]) == ([content(slot) for slot in (1, 2, 3)], {})


def test_a_copy_does_not_wait_for_threads_that_are_busy_with_others(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "PART_BYTES", SLOT_BYTES)
    done = Event()
    with opened(tmp_path) as file:
        busy = [file.threads._threads.submit(done.wait, 60) for _ in range(disk.THREADS)]
        assert write_roots(file, [1, 2, 3]) == {}
        assert read_roots(file, [1, 2, 3]) == ([content(slot) for slot in (1, 2, 3)], {})
        assert not any(other.done() for other in busy)
        done.set()


@pytest.mark.parametrize("main_fails", [True, False])
def test_an_error_in_one_part_of_a_batch_is_raised_only_after_the_others_have_ended(
    main_fails, tmp_path, monkeypatch
):
    """Callers that see the error may reuse the slots and the memory."""
    monkeypatch.setattr(disk, "THREADS", 3)
    monkeypatch.setattr(disk, "PART_BYTES", SLOT_BYTES)
    reported, num_late = Event(), 0

    def some_fail(write):
        def fails(*args):
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
    fails, tmp_path, monkeypatch
):
    monkeypatch.setattr(disk, "THREADS", 3)
    monkeypatch.setattr(disk, "PART_BYTES", SLOT_BYTES)
    writing = []

    def no_more(thread):
        raise RuntimeError("can't start new thread")

    def recorded(write):
        def records(*args):
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
        file.threads._threads.submit(int).result()  # now there is a thread
        assert listed(file) == ({} if fails else {1: 1, 2: 2, 3: 3})
    assert writing == [main_thread()] * (1 if fails else 3)


@pytest.mark.parametrize("part_bytes", [4_000, 3 * SLOT_BYTES, 1 << 20])
@pytest.mark.parametrize("block_bytes", [BLOCK_BYTES, SLOT_BYTES])
def test_bad_blocks_of_a_batch_are_reported_and_affect_no_others(
    block_bytes, part_bytes, tmp_path, monkeypatch
):
    monkeypatch.setattr(disk, "THREADS", 3)
    monkeypatch.setattr(disk, "PART_BYTES", part_bytes)
    with opened(tmp_path, block_bytes=block_bytes) as file:
        write_roots(file, [1, 2, 3, 4, 5, 6])
        write_roots(file, [2], generation=2)
        flip(tmp_path / "blocks", 4 * SLOT_BYTES + 9_999)
        os.truncate(tmp_path / "blocks", 6 * SLOT_BYTES + 4_000)
        (into, lost), half = read_roots(file, [1, 2, 3, 4, 5, 6, 7]), block_bytes // 2
        assert lost == {
            1: "disk slot 2: no longer holds generation 1",
            3: "disk slot 4: block 0000000000000004: the checksum is wrong",
            5: f"disk slot 6: only 4000 of {half} bytes at {6 * SLOT_BYTES} are there",
            6: "disk slot 7: no longer holds generation 1",
        }
        assert [into[n] for n in (0, 2, 4)] == [content(slot, block_bytes) for slot in (1, 3, 5)]
        assert listed(file) == {slot: slot for slot in (1, 2, 3, 5)}


KILLED_BLOCK_BYTES = 1 << 17
KILLED_SLOTS = 64
FORKS = multiprocessing.get_context("forkserver")
"""Starts a process in milliseconds, and without the threads of this one."""
FORKS.set_forkserver_preload([__name__])


def keep_writing(folder, seed, reports):
    """Write batches of blocks until killed, reporting the begin and the end of each."""
    rng = random.Random(seed)
    file = SlotFile(folder, block_bytes=KILLED_BLOCK_BYTES, num_slots=KILLED_SLOTS)
    while True:
        slots = sorted(rng.sample(range(KILLED_SLOTS), rng.randrange(1, KILLED_SLOTS)))
        blocks = [DiskBlock(1, named(rng.getrandbits(64)), None) for _ in slots]
        data = [memoryview(killed_content(what.block)) for what in blocks]
        batch = {slot: hash_of(what.block) for slot, what in zip(slots, blocks, strict=True)}
        reports.send(("begin", batch))
        write_all(file, slots, blocks, data)
        reports.send(("done", batch))


def killed_content(block):
    return block[-8:] * (KILLED_BLOCK_BYTES // 8)


def killed_writer(folder, turn):
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


def test_a_process_killed_in_mid_write_loses_no_blocks_outside_its_current_batch(tmp_path):
    torn = 0
    held = {}
    for turn in range(40):
        begun = {}
        for event, batch in killed_writer(tmp_path, turn):
            if event == "begin":
                begun = batch
            else:
                held, begun = held | batch, {}
        with closing(
            SlotFile(tmp_path, block_bytes=KILLED_BLOCK_BYTES, num_slots=KILLED_SLOTS)
        ) as file:
            found = listed(file)
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
