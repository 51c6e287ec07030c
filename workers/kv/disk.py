"""The disk tier: blocks in the slots of a file, which outlive the process.

A folder holds two files. `blocks` has a slot for each block, at a multiple of 4096 bytes. `index`
has a record for each slot; see `disk_records.py`. Writing blocks means voiding the records of their
slots, writing the blocks, then writing records with the blocks' checksums: at any moment each
record names a whole block, or nothing. So a process that is killed loses the blocks it was writing,
and no others.

A machine that crashes may lose any of the last writes, in any order. Whichever process opens the
files after a reboot therefore reads all blocks once, and keeps those that match their checksums.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TypeVar

import numpy as np
from xxhash import xxh3_64

from app.core.errors import BlockLost, ConfigError
from workers.kv.disk_records import PAGE_BYTES, VOID, DiskBlock, DiskIndex, Ids, read_at, write_at
from workers.kv.identity import hash_of

log = logging.getLogger(__name__)

PART_BYTES = 1 << 20
"""Bytes that are copied and hashed in one go, so that the second finds them in a core's cache."""
THREADS = min(4, os.cpu_count() or 1)
BLOCKS_AT_ONCE = 8
"""Pieces that a thread reads before it looks for others."""
P = TypeVar("P")
T = TypeVar("T")


class DiskThreads:
    """Threads that copy parts of a batch, together with whoever calls `share`."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="disk-tier")

    def close(self) -> None:
        self._threads.shutdown()

    def share(self, act: Callable[[P], list[T]], parts: Sequence[P]) -> list[T]:
        """Returns the results of `act` for all parts, in order."""
        untaken = iter(enumerate(parts))
        results: dict[int, list[T]] = {}

        def take_parts() -> None:
            for n, part in untaken:
                results[n] = act(part)

        begun = []
        try:
            with suppress(RuntimeError):  # no thread can be started: those there are do more
                for _ in parts[1:THREADS]:
                    begun.append(self._threads.submit(take_parts))
            take_parts()
        finally:
            # Even if it failed: once this ends, slots and memory may go to other blocks. A task for
            # which no thread could be started runs all the same, after others: it finds nothing.
            deque(untaken, maxlen=0)
            # Those that have not begun wait behind other copies.
            running = [other for other in begun if not other.cancel()]
            wait(running)
        for other in running:
            other.result()
        return list(chain.from_iterable(results[n] for n in range(len(parts))))


class SlotFile:
    """`num_slots` blocks of `block_bytes` in a folder that one process at a time may open.

    fingerprint: of whatever makes a block usable, such as model and shape; files with another
    fingerprint, or of another size, are started from scratch.

    Reads and writes may come from several threads, but a slot must not be read or written while it
    is being written. Each call takes any number of blocks, in slot order.
    """

    def __init__(
        self, folder: Path, *, block_bytes: int, num_slots: int, fingerprint: int = 0
    ) -> None:
        """Raises ConfigError if another process has the files open, OSError if they fail."""
        self.block_bytes = block_bytes
        self.num_slots = num_slots
        self.slot_bytes = -(-block_bytes // PAGE_BYTES) * PAGE_BYTES
        self.threads = DiskThreads()
        folder.mkdir(parents=True, exist_ok=True)
        self.fd = os.open(folder / "blocks", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            self._lock(folder)
            self.index = self._open_index(folder, fingerprint)
        except BaseException:
            os.close(self.fd)
            raise

    def close(self) -> None:
        """Leaves the files to another process. Data on its way to the disk still gets there."""
        self.threads.close()
        self.index.close()
        os.close(self.fd)

    def records(self) -> Iterator[tuple[int, DiskBlock]]:
        return self.index.blocks()

    def write(
        self, slots: Ids, blocks: Sequence[DiskBlock], rows: Sequence[memoryview]
    ) -> dict[int, OSError]:
        """Writes the bytes of blocks into `slots`, replacing what is there.

        Returns the errors, such as a full disk, of blocks that could not be stored, by their
        position in `slots`.
        """
        assert (np.diff(slots) > 0).all(), "slots must be in order"
        try:
            self.index.void(slots)
        except OSError as error:
            return dict.fromkeys(range(len(slots)), error)
        size = max(1, PART_BYTES // self.slot_bytes)
        done = self.threads.share(
            lambda part: list(map(self._write_block, slots[part].tolist(), rows[part])),
            [slice(at, at + size) for at in range(0, len(slots), size)],
        )
        failed = {n: came for n, came in enumerate(done) if not isinstance(came, int)}
        checksums = [came for came in done if isinstance(came, int)]
        stored = np.delete(slots, list(failed))
        if failed:
            blocks = [block for n, block in enumerate(blocks) if n not in failed]
        try:
            self.index.put(stored, blocks, checksums)
        except OSError as error:
            return dict.fromkeys(range(len(slots)), error)
        return failed

    def _lock(self, folder: Path) -> None:
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"disk tier {folder}: in use by another process") from None

    def _open_index(self, folder: Path, fingerprint: int) -> DiskIndex:
        index = DiskIndex(
            folder / "index",
            block_bytes=self.block_bytes,
            num_slots=self.num_slots,
            fingerprint=fingerprint,
        )
        if index.is_foreign:
            log.warning(
                "disk tier %s: the files are of another model, size or version; starting empty",
                folder,
            )
            index.path.unlink()
            os.ftruncate(self.fd, 0)
        size = self.num_slots * self.slot_bytes
        is_short = os.fstat(self.fd).st_size < size
        os.ftruncate(self.fd, size)
        if index.is_ours and (index.is_rebooted or is_short):
            self._verify(folder, index)
        index.open()
        if index.num_blocks:
            log.info("disk tier %s: found %d blocks", folder, index.num_blocks)
        return index

    def _verify(self, folder: Path, index: DiskIndex) -> None:
        """Reads all blocks, and forgets those that cannot be proved whole."""
        buffer = memoryview(bytearray(self.block_bytes))
        slots = np.arange(self.num_slots)
        records = index.records_of(slots)
        lost = [
            slot
            for slot in np.flatnonzero(records["state"] != VOID).tolist()
            if not self._is_whole(slot, int(records["checksum"][slot]), buffer)
        ]
        index.drop(lost)
        log.info("disk tier %s: all blocks were read, %d of them were lost", folder, len(lost))

    def _write_block(self, slot: int, data: memoryview) -> int | OSError:
        checksum = xxh3_64()
        for at in range(0, self.block_bytes, PART_BYTES):
            part = data[at : at + PART_BYTES]
            checksum.update(part)
            try:
                write_at(self.fd, part, slot * self.slot_bytes + at)
            except OSError as error:
                return error
        return checksum.intdigest()

    def _is_whole(self, slot: int, checksum: int, into: memoryview) -> bool:
        """Whether a block can be read, into that memory, and has its checksum."""
        digest = xxh3_64()
        for at in range(0, self.block_bytes, PART_BYTES):
            part = into[at : at + PART_BYTES]
            try:
                read_at(self.fd, part, slot * self.slot_bytes + at)
            except OSError:
                return False
            digest.update(part)
        return digest.intdigest() == checksum


class DiskPieces:
    """The blocks of distinct slots, read together piece by piece, from front to back.

    A block's checksum is of all of it, so what was read is known to be right only at the end.
    """

    def __init__(self, file: SlotFile, slots: Ids, generations: Sequence[int]) -> None:
        self._file = file
        self._slots = slots
        self._records = records = file.index.records_of(slots)
        wrong = (records["state"] == VOID) | (
            records["generation"] != np.array(generations, np.uint64)
        )
        self._lost = {
            n: f"no longer holds generation {generations[n]}"
            for n in np.flatnonzero(wrong).tolist()
        }
        self._stale = frozenset(self._lost)
        """Positions of slots that hold other blocks by now."""
        self._hashes = [xxh3_64() for _ in slots]
        self._at = 0

    def read(self, rows: Sequence[memoryview], next_bytes: int) -> None:
        """Reads the next piece of each block, into memory of its own; pieces are of one size.

        next_bytes: of the piece after that, of which the kernel is told before this one is read.
        """
        size = rows[0].nbytes
        starts = (self._slots * self._file.slot_bytes + self._at).tolist()
        if not self._at:
            self._advise(starts, size)
        if next_bytes:
            self._advise([start + size for start in starts], next_bytes)

        def read(some: range) -> list[None]:
            for n in some:
                if n not in self._lost:
                    self._read(n, rows[n], starts[n])
            return []

        count = len(rows)
        firsts = range(0, count, BLOCKS_AT_ONCE)
        parts = [range(at, min(at + BLOCKS_AT_ONCE, count)) for at in firsts]
        self._file.threads.share(read, parts)
        self._at += size

    def finish(self) -> dict[int, BlockLost]:
        """Returns what is wrong with blocks, by their position in `slots`, once all are read.

        Those that cannot be read, or are not what was written, are forgotten.
        """
        checksums = self._records["checksum"].tolist()
        for n, content in enumerate(self._hashes):
            if n not in self._lost and content.intdigest() != checksums[n]:
                block = hash_of(self._records["block"][n].tobytes())
                self._lost[n] = f"block {block:016x}: the checksum is wrong"
        for n in self._lost.keys() - self._stale:
            self._file.index.forget(int(self._slots[n]), self._records[n])
        return {n: BlockLost(f"disk slot {self._slots[n]}: {why}") for n, why in self._lost.items()}

    def _read(self, n: int, into: memoryview, offset: int) -> None:
        try:
            done = read_at(self._file.fd, into, offset)
        except OSError as error:
            self._lost[n] = str(error)
            return
        if done < into.nbytes:
            self._lost[n] = f"only {done} of {into.nbytes} bytes at {offset} are there"
        self._hashes[n].update(into)

    def _advise(self, starts: Sequence[int], size: int) -> None:
        for start in starts:
            with suppress(OSError):
                os.posix_fadvise(self._file.fd, start, size, os.POSIX_FADV_WILLNEED)
