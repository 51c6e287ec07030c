"""The disk tier: blocks in the slots of a file, which outlive the process.

A folder holds two files. `blocks` has a slot for each block, at a multiple of 4096 bytes. `index`
starts with a page that says what the files are for, followed by a 64-byte record for each slot,
each with a hash of its own. Writing blocks means voiding the records of their slots, writing the
blocks, then writing records with the blocks' checksums: at any moment each record names a whole
block, or nothing. So a process that is killed loses the blocks it was writing, and no others.

A machine that crashes may lose any of the last writes, in any order. Whichever process opens the
files after a reboot therefore reads all blocks once, and keeps those that match their checksums.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from itertools import chain
from pathlib import Path
from threading import RLock, local
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64, xxh3_64_intdigest

from app.core.errors import BlockLost, ConfigError
from app.core.types import SequenceHash

T = TypeVar("T")
log = logging.getLogger(__name__)

PAGE_BYTES = 4096
"""Slots begin at multiples of it, as direct I/O would require."""
PART_BYTES = 1 << 20
"""Copied and hashed in one go, so that whichever comes second finds the data in a core's cache."""
THREADS = min(4, os.cpu_count() or 1)
"""They take the parts of a batch in turn, so that some are hashed while others are copied."""
SMALL_BYTES = 64 << 10
"""Blocks up to this size are gathered before they are written. That spares Python work on each of
them, in which threads would wait for each other."""
_MAGIC = b"kvroute disk tier 1\n"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# magic, block size in bytes, number of slots, fingerprint, boot id
_HEADER = struct.Struct("<32sQQQ64s")
_RECORD = np.dtype(
    [
        ("state", "<u8"),
        ("block", "<u8"),
        ("parent", "<u8"),
        ("generation", "<u8"),
        ("checksum", "<u8"),
        ("unused", "<u8", 2),
        ("seal", "<u8"),
    ]
)
"""checksum: of the block. seal: a hash of all before it; in a void record it is 0 like the rest."""
RECORD_BYTES = _RECORD.itemsize
_WHOLE = np.dtype(f"V{RECORD_BYTES}")
"""With this type numpy copies records ten times as fast as field by field."""
_SEALED = np.dtype(
    {"names": ["sealed"], "formats": [f"V{RECORD_BYTES - 8}"], "itemsize": RECORD_BYTES}
)
"""What the seal of a record covers."""
_VOID, _ROOT, _CHILD = range(3)

Ids = NDArray[np.int64]
Blocks = NDArray[np.void]
"""Host memory, as one item for each block."""
Records = NDArray[Any]
"""Arrays of _RECORD."""


class _Part(NamedTuple):
    """What is copied and hashed in one go: blocks of a batch, by their positions in it.

    runs: those of them that lie in the file without a gap, and the offset of each run.
    """

    blocks: slice
    runs: list[tuple[int, slice]]


class DiskBlock(NamedTuple):
    """What a slot holds, or is to hold. generation: the slot's then; see workers/kv/slots.py."""

    generation: int
    block: SequenceHash
    parent: SequenceHash | None


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
        self._records: Records = np.zeros(num_slots, _RECORD)
        """As they are in the file."""
        self._changing = RLock()
        self._local = local()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="disk-tier")
        folder.mkdir(parents=True, exist_ok=True)
        self._blocks = os.open(folder / "blocks", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            self._lock(folder)
            header = _HEADER.pack(_MAGIC, block_bytes, num_slots, fingerprint, _boot_id())
            self._index = self._open_index(folder, header)
        except BaseException:
            os.close(self._blocks)
            raise

    def close(self) -> None:
        """Leave the files to another process. Data on its way to the disk still gets there."""
        self._threads.shutdown()
        os.close(self._index)
        os.close(self._blocks)

    def records(self) -> Iterator[tuple[int, DiskBlock]]:
        """All slots that hold a block, with what they hold."""
        slots = self._held(np.arange(self.num_slots))
        of_slots = self._records[slots]
        states, blocks, parents, generations = (
            of_slots[name].tolist() for name in ("state", "block", "parent", "generation")
        )
        for slot, state, block, parent, generation in zip(
            slots.tolist(), states, blocks, parents, generations, strict=True
        ):
            yield slot, DiskBlock(generation, block, parent if state == _CHILD else None)

    def write(
        self, slots: Ids, blocks: Sequence[DiskBlock], memory: Blocks, places: Ids
    ) -> dict[int, OSError]:
        """Write blocks into `slots`, replacing what is there.

        Returns the errors, such as a full disk, of blocks that could not be stored, by their
        position in `slots`. Raises ValueError if `memory` has blocks of another size.
        """
        self._check(slots, memory)
        try:
            held = self._held(slots)
            self._put(held, np.zeros(len(held), _RECORD))
        except OSError as error:
            return dict.fromkeys(range(len(slots)), error)

        def write(part: _Part) -> list[int | OSError]:
            if self.block_bytes <= SMALL_BYTES:
                return self._write_gathered(slots, memory, places, part)
            return self._write_each(slots[part.blocks], _rows(memory, places[part.blocks]))

        done = self._shared(write, self._parts(slots))
        failed = {n: came for n, came in enumerate(done) if not isinstance(came, int)}
        checksums = [came for came in done if isinstance(came, int)]
        stored = np.delete(slots, list(failed))
        if failed:
            blocks = [block for n, block in enumerate(blocks) if n not in failed]
        try:
            self._put(stored, _packed(stored, blocks, checksums))
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
        with self._changing:
            records = self._records.view(_WHOLE)[slots].view(_RECORD)
        right = (records["state"] != _VOID) & (
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
        cached = self._shared(lambda part: [self._is_cached(part, checksums, rows)], parts)
        not_cached = [part for part, was in zip(parts, cached, strict=True) if not was]
        # Submit all reads to the disk at once.
        for part in not_cached:
            for offset, run in part.runs:
                size = (run.stop - run.start) * self._slot_bytes
                with suppress(OSError):
                    os.posix_fadvise(self._blocks, offset, size, os.POSIX_FADV_WILLNEED)
        whys = self._shared(
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
                self._forget(slot, records[n])
                block = int(records["block"][n])
                lost[n] = BlockLost(f"disk slot {slot}, block {block:016x}: {why}")
        return lost

    def _lock(self, folder: Path) -> None:
        try:
            fcntl.flock(self._blocks, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"disk tier {folder}: in use by another process") from None

    def _open_index(self, folder: Path, header: bytes) -> int:
        path = folder / "index"
        found = path.read_bytes() if path.exists() else b""
        fits, rebooted = _compare(found[: len(header)], header)
        if found and not fits:
            log.warning(
                "disk tier %s: the files are of another model or size; starting empty", folder
            )
            path.unlink()
            os.ftruncate(self._blocks, 0)
        size = self.num_slots * self._slot_bytes
        cut = os.fstat(self._blocks).st_size < size
        os.ftruncate(self._blocks, size)
        if fits:
            self._take_records(found[PAGE_BYTES:])
            if rebooted or cut:
                self._verify(folder)
        _replace(path, header.ljust(PAGE_BYTES, b"\0") + self._records.tobytes())
        num_held = np.count_nonzero(self._records["state"])
        if num_held:
            log.info("disk tier %s: found %d blocks", folder, num_held)
        return os.open(path, os.O_RDWR)

    def _take_records(self, packed: bytes) -> None:
        count = min(self.num_slots, len(packed) // RECORD_BYTES)
        found = np.frombuffer(packed, _RECORD, count)
        slots = np.flatnonzero(found["state"] != _VOID)
        found = found[slots]
        right = found["seal"] == _seals(slots, found)
        self._records[slots[right]] = found[right]

    def _verify(self, folder: Path) -> None:
        """Read all blocks; forget those that cannot be proved whole."""
        buffer = memoryview(bytearray(self.block_bytes))
        lost = [
            slot
            for slot in self._held(np.arange(self.num_slots)).tolist()
            if self._spoilt(slot, int(self._records["checksum"][slot]), buffer) is not None
        ]
        self._records[lost] = np.zeros(1, _RECORD)
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
        runs = list(zip(offsets, _between(firsts, num), strict=True))
        starts = np.arange(0, num, size)
        of_parts = _between(np.searchsorted(firsts, starts), len(runs))
        return [
            _Part(blocks, runs[which])
            for blocks, which in zip(_between(starts, num), of_parts, strict=True)
        ]

    def _shared(self, act: Callable[[_Part], list[T]], parts: Sequence[_Part]) -> list[T]:
        """The results of `act` for all parts, in order. Threads share the work."""
        untaken = iter(enumerate(parts))
        found: dict[int, list[T]] = {}

        def take_parts() -> None:
            for n, part in untaken:
                found[n] = act(part)

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
            # Those whose turn has not come wait behind other copies.
            running = [other for other in begun if not other.cancel()]
            wait(running)
        for other in running:
            other.result()
        return list(chain.from_iterable(found[n] for n in range(len(parts))))

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
                _write(self._blocks, data[begin * size : end * size], offset)
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
                _write(self._blocks, part, slot * self._slot_bytes + at)
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
        found = xxh3_64()
        for at in range(0, self.block_bytes, PART_BYTES):
            part = into[at : at + PART_BYTES]
            try:
                done = _read(self._blocks, part, slot * self._slot_bytes + at, flags)
            except OSError as error:
                return str(error)
            if done < len(part):
                return f"only {at + done} of {self.block_bytes} bytes are there"
            found.update(part)
        return None if found.intdigest() == checksum else "the checksum is wrong"

    def _held(self, slots: Ids) -> Ids:
        """Those of `slots` that hold a block."""
        with self._changing:
            held: Ids = slots[self._records["state"][slots] != _VOID]
        return held

    def _forget(self, slot: int, record: Any) -> None:
        """Void the slot's record, unless the slot holds something else by now."""
        with self._changing, suppress(OSError):
            if self._records["seal"][slot] == record["seal"]:
                self._put(np.array([slot]), np.zeros(1, _RECORD))

    def _put(self, slots: Ids, records: Records) -> None:
        """Write records; those close to each other in one piece, along with what lies between them.

        Raises OSError; then some of them are unchanged.
        """
        for near in _cut(slots, np.diff(slots) > PAGE_BYTES // RECORD_BYTES):
            first, last = int(slots[near][0]), int(slots[near][-1])
            with self._changing:
                there = self._records[first : last + 1].view(_WHOLE)
                piece = there.copy()
                piece[slots[near] - first] = records[near].view(_WHOLE)
                _write(self._index, memoryview(piece.tobytes()), PAGE_BYTES + first * RECORD_BYTES)
                there[:] = piece


def _cut(slots: Ids, apart: NDArray[np.bool_]) -> list[slice]:
    """Ranges of positions in `slots`, cut wherever `apart` is true of a slot and the next one."""
    return _between(np.flatnonzero(np.r_[True, apart][: len(slots)]), len(slots))


def _between(starts: Ids, end: int) -> list[slice]:
    """From each of `starts` to the next one, or to `end`."""
    bounds = [*starts.tolist(), end]
    return list(map(slice, bounds, bounds[1:]))


def _rows(memory: Blocks, places: Ids) -> list[memoryview]:
    """The bytes of each of these blocks."""
    data, size = memory.view(np.uint8).data, memory.itemsize
    return [data[begin : begin + size] for begin in (places * size).tolist()]


def _packed(slots: Ids, blocks: Sequence[DiskBlock], checksums: Sequence[int]) -> Records:
    records = np.zeros(len(slots), _RECORD)
    generations, hashes, parents = zip(*blocks, strict=True) if blocks else ((), (), ())
    records["state"] = [_ROOT if parent is None else _CHILD for parent in parents]
    records["block"] = hashes
    records["parent"] = [parent or 0 for parent in parents]
    records["generation"] = generations
    records["checksum"] = checksums
    records["seal"] = _seals(slots, records)
    return records


def _seals(slots: Ids, records: Records) -> NDArray[np.uint64]:
    """A hash of each record and its slot: in another slot's place the record is invalid."""
    sealed = records.view(_SEALED)["sealed"].tolist()
    return np.array(list(map(xxh3_64_intdigest, sealed, slots.tolist())), np.uint64)


def _boot_id() -> bytes:
    """Identifies this boot of the machine; if it cannot be read, an id that no other boot has."""
    try:
        return _BOOT_ID.read_bytes().strip()
    except OSError:
        return os.urandom(16).hex().encode()


def _compare(found: bytes, header: bytes) -> tuple[bool, bool]:
    """Whether `found` is the header of files like `header`'s, and whether they predate a reboot."""
    if len(found) != len(header):
        return False, False
    *what, boot_id = _HEADER.unpack(found)
    *what_now, boot_id_now = _HEADER.unpack(header)
    return what == what_now, boot_id != boot_id_now


def _write(file: int, data: memoryview, offset: int) -> None:
    data = data.cast("B")
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written


def _read(file: int, into: memoryview, offset: int, flags: int) -> int:
    """Bytes read: fewer than asked for only at the end of the file."""
    into = into.cast("B")
    done = 0
    while done < into.nbytes:
        count = os.preadv(file, [into[done:]], offset + done, flags)
        if not count:
            break
        done += count
    return done


def _replace(path: Path, content: bytes) -> None:
    """Give `path` this content atomically and durably: a crash of the machine does not undo it."""
    beside = path.with_suffix(".new")
    with beside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
