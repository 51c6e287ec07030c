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
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from threading import local
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64, xxh3_64_intdigest

from app.core.errors import BlockLost, ConfigError
from workers.kv.disk_pieces import DiskPieces, DiskThreads
from workers.kv.disk_records import (
    PAGE_BYTES,
    VOID,
    DiskBlock,
    DiskIndex,
    Ids,
    between,
    read_at,
    write_at,
)
from workers.kv.identity import hash_of

log = logging.getLogger(__name__)

PART_BYTES = 1 << 20
"""Copied and hashed in one go, so that whichever comes second finds the data in a core's cache."""
SMALL_BYTES = 64 << 10
"""Blocks up to this size are gathered before they are written. That spares Python work on each of
them, in which threads would wait for each other."""
Blocks = NDArray[np.void]
"""Host memory, as one item for each block."""


class _Part(NamedTuple):
    """What is copied and hashed in one go: blocks of a batch, by their positions in it.

    runs: those of them that lie in the file without a gap, and the offset of each run.
    """

    blocks: slice
    runs: list[tuple[int, slice]]


class SlotFile:
    """`num_slots` blocks of `block_bytes` in a folder that one process at a time may open.

    fingerprint: of whatever makes a block usable, such as model and shape; files with another
    fingerprint, or of another size, are started from scratch.

    Reads and writes may come from several threads, but a slot must not be read or written while it
    is being written. Each call takes any number of blocks, in slot order; blocks in consecutive
    slots are copied at once. `places`: where the blocks are in `memory`.
    """

    def __init__(
        self, folder: Path, *, block_bytes: int, num_slots: int, fingerprint: int = 0
    ) -> None:
        """Raises ConfigError if another process has the files open, OSError if they fail."""
        if block_bytes < 1 or num_slots < 1:
            raise ConfigError(
                "disk tier: needs at least one slot and one byte, "
                f"got {num_slots} slots of {block_bytes} bytes"
            )
        self.block_bytes = block_bytes
        self.num_slots = num_slots
        self._slot_bytes = -(-block_bytes // PAGE_BYTES) * PAGE_BYTES
        self._local = local()
        self._threads = DiskThreads()
        folder.mkdir(parents=True, exist_ok=True)
        self._blocks = os.open(folder / "blocks", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            self._lock(folder)
            self._index = self._open_index(folder, fingerprint)
        except BaseException:
            os.close(self._blocks)
            raise

    def close(self) -> None:
        """Leave the files to another process. Data on its way to the disk still gets there."""
        self._threads.close()
        self._index.close()
        os.close(self._blocks)

    def records(self) -> Iterator[tuple[int, DiskBlock]]:
        """All slots that hold a block, with what they hold."""
        return self._index.blocks()

    def write(
        self, slots: Ids, blocks: Sequence[DiskBlock], memory: Blocks, places: Ids
    ) -> dict[int, OSError]:
        """Write blocks into `slots`, replacing what is there.

        Returns the errors, such as a full disk, of blocks that could not be stored, by their
        position in `slots`. Raises ValueError if `memory` has blocks of another size.
        """
        self._check(slots, memory)
        try:
            self._index.void(slots)
        except OSError as error:
            return dict.fromkeys(range(len(slots)), error)

        def write(part: _Part) -> list[int | OSError]:
            if self.block_bytes <= SMALL_BYTES:
                return self._write_gathered(slots, memory, places, part)
            return self._write_each(slots[part.blocks], _rows(memory, places[part.blocks]))

        done = self._threads.share(write, self._parts(slots))
        failed = {n: came for n, came in enumerate(done) if not isinstance(came, int)}
        checksums = [came for came in done if isinstance(came, int)]
        stored = np.delete(slots, list(failed))
        if failed:
            blocks = [block for n, block in enumerate(blocks) if n not in failed]
        try:
            self._index.put(stored, blocks, checksums)
        except OSError as error:
            return dict.fromkeys(range(len(slots)), error)
        return failed

    def read(
        self, slots: Ids, generations: Sequence[int], memory: Blocks, places: Ids
    ) -> dict[int, BlockLost]:
        """Fill `memory` with the blocks that `slots` were given in those generations.

        Returns what is wrong with blocks, by their position in `slots`: the slot holds another
        block by now, or the block is not what was written and is now forgotten. There `memory` may
        hold anything. Raises ValueError if `memory` has blocks of another size.
        """
        self._check(slots, memory)
        records = self._index.records_of(slots)
        right = (records["state"] != VOID) & (
            records["generation"] == np.array(generations, np.uint64)
        )
        lost = {
            n: BlockLost(f"disk slot {slots[n]} no longer holds generation {generations[n]}")
            for n in np.flatnonzero(~right).tolist()
        }
        there = np.flatnonzero(right)
        slots, places = slots[there], places[there]
        checksums = records["checksum"][there].tolist()
        parts = self._parts(slots)
        rows = _rows(memory, places)
        cached = self._threads.share(lambda part: [self._is_cached(part, checksums, rows)], parts)
        not_cached = [part for part, was in zip(parts, cached, strict=True) if not was]
        # Submit all reads to the disk at once.
        for part in not_cached:
            for offset, run in part.runs:
                size = (run.stop - run.start) * self._slot_bytes
                with suppress(OSError):
                    os.posix_fadvise(self._blocks, offset, size, os.POSIX_FADV_WILLNEED)
        whys = self._threads.share(
            lambda part: list(
                map(
                    self._spoilt,
                    slots[part.blocks].tolist(),
                    checksums[part.blocks],
                    rows[part.blocks],
                )
            ),
            not_cached,
        )
        nths = chain.from_iterable(
            range(part.blocks.start, part.blocks.stop) for part in not_cached
        )
        for nth, why in zip(nths, whys, strict=True):
            if why is not None:
                n, slot = int(there[nth]), int(slots[nth])
                self._index.forget(slot, records[n])
                block = hash_of(records["block"][n].tobytes())
                lost[n] = BlockLost(f"disk slot {slot}, block {block:016x}: {why}")
        return lost

    def pieces(self, slots: Ids, generations: Sequence[int]) -> DiskPieces:
        """The same blocks, to be read piece by piece."""
        return DiskPieces(
            self._blocks, self._index, slots, generations, self._slot_bytes, self._threads.share
        )

    def _lock(self, folder: Path) -> None:
        try:
            fcntl.flock(self._blocks, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
            os.ftruncate(self._blocks, 0)
        size = self.num_slots * self._slot_bytes
        is_short = os.fstat(self._blocks).st_size < size
        os.ftruncate(self._blocks, size)
        if index.is_ours and (index.is_rebooted or is_short):
            self._verify(folder, index)
        index.open()
        if index.num_blocks:
            log.info("disk tier %s: found %d blocks", folder, index.num_blocks)
        return index

    def _verify(self, folder: Path, index: DiskIndex) -> None:
        """Read all blocks; forget those that cannot be proved whole."""
        buffer = memoryview(bytearray(self.block_bytes))
        slots = np.arange(self.num_slots)
        records = index.records_of(slots)
        lost = [
            slot
            for slot in np.flatnonzero(records["state"] != VOID).tolist()
            if self._spoilt(slot, int(records["checksum"][slot]), buffer) is not None
        ]
        index.drop(lost)
        log.info("disk tier %s: all blocks were read, %d of them were lost", folder, len(lost))

    def _check(self, slots: Ids, memory: Blocks) -> None:
        if memory.itemsize != self.block_bytes:
            raise ValueError(f"a block has {self.block_bytes} bytes, not {memory.itemsize}")
        assert (np.diff(slots) > 0).all(), "slots must be in order"

    def _parts(self, slots: Ids) -> list[_Part]:
        """They have at most PART_BYTES each, unless a block has more."""
        size, num = max(1, PART_BYTES // self._slot_bytes), len(slots)
        is_first = np.arange(num) % size == 0
        is_first[1:] |= np.diff(slots) * self._slot_bytes != self.block_bytes
        firsts = np.flatnonzero(is_first)
        offsets = (slots[firsts] * self._slot_bytes).tolist()
        runs = list(zip(offsets, between(firsts, num), strict=True))
        starts = np.arange(0, num, size)
        of_parts = between(np.searchsorted(firsts, starts), len(runs))
        return [
            _Part(blocks, runs[which])
            for blocks, which in zip(between(starts, num), of_parts, strict=True)
        ]

    def _write_gathered(
        self, slots: Ids, memory: Blocks, places: Ids, part: _Part
    ) -> list[int | OSError]:
        """Each block's checksum, or the error it met."""
        gathered, rows = self._buffer(memory)
        first, taken = part.blocks.start, places[part.blocks]
        count = len(taken)
        np.take(memory, taken, out=gathered[:count], mode="clip")  # other modes make a copy
        done: list[int | OSError] = list(map(xxh3_64_intdigest, rows[:count]))
        data, size = gathered.view(np.uint8).data, self.block_bytes
        for offset, run in part.runs:
            begin, end = run.start - first, run.stop - first
            try:
                write_at(self._blocks, data[begin * size : end * size], offset)
            except OSError:
                done[begin:end] = self._write_each(slots[run], rows[begin:end])
        return done

    def _buffer(self, memory: Blocks) -> tuple[Blocks, list[memoryview]]:
        """Room for the blocks of one part, for this thread alone; and where each lies."""
        if not hasattr(self._local, "buffer"):
            num_blocks = max(1, PART_BYTES // self._slot_bytes)
            blocks = np.empty(num_blocks, memory.dtype)
            self._local.buffer = blocks, _rows(blocks, np.arange(num_blocks))
        buffer: tuple[Blocks, list[memoryview]] = self._local.buffer
        return buffer

    def _write_each(self, slots: Ids, rows: Sequence[memoryview]) -> list[int | OSError]:
        """The same, block by block."""
        return list(map(self._write_block, slots.tolist(), rows))

    def _write_block(self, slot: int, data: memoryview) -> int | OSError:
        checksum = xxh3_64()
        for at in range(0, self.block_bytes, PART_BYTES):
            part = data[at : at + PART_BYTES]
            checksum.update(part)
            try:
                write_at(self._blocks, part, slot * self._slot_bytes + at)
            except OSError as error:
                return error
        return checksum.intdigest()

    def _is_cached(self, part: _Part, checksums: Sequence[int], rows: Sequence[memoryview]) -> bool:
        """Read one part, if that needs no wait for the disk.

        Also False if anything is wrong with any of its blocks.
        """
        into = rows[part.blocks]
        first = part.blocks.start
        if self.block_bytes > PART_BYTES:
            slot = part.runs[0][0] // self._slot_bytes
            return self._spoilt(slot, checksums[first], into[0], os.RWF_NOWAIT) is None
        try:
            for offset, run in part.runs:
                these = into[run.start - first : run.stop - first]
                os.preadv(self._blocks, these, offset, os.RWF_NOWAIT)
        except OSError:
            return False
        # After a short read this finds what was in memory before.
        return list(map(xxh3_64_intdigest, into)) == checksums[part.blocks]

    def _spoilt(self, slot: int, checksum: int, into: memoryview, flags: int = 0) -> str | None:
        """Read a block; says what is wrong with it, if anything."""
        digest = xxh3_64()
        for at in range(0, self.block_bytes, PART_BYTES):
            part = into[at : at + PART_BYTES]
            try:
                done = read_at(self._blocks, part, slot * self._slot_bytes + at, flags)
            except OSError as error:
                return str(error)
            if done < len(part):
                return f"only {at + done} of {self.block_bytes} bytes are there"
            digest.update(part)
        return None if digest.intdigest() == checksum else "the checksum is wrong"


def _rows(memory: Blocks, places: Ids) -> list[memoryview]:
    """The bytes of each of these blocks."""
    data, size = memory.view(np.uint8).data, memory.itemsize
    return [data[begin : begin + size] for begin in (places * size).tolist()]
