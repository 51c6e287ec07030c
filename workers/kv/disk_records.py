"""Records of the disk tier, in memory and in a file: which block each slot holds.

The file starts with a page that says what the tier is for, followed by a 128-byte record for each
slot, each with a hash of its own.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from workers.kv.identity import IDENTITY_BYTES, BlockIdentity

PAGE_BYTES = 4096
"""Bytes of a page: slots begin at multiples, as direct I/O would require."""
_MAGIC = b"kvroute disk tier 2\n"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# magic, block size in bytes, number of slots, fingerprint, boot id
_HEADER = struct.Struct("<32sQQQ64s")
_IDENTITY = f"V{IDENTITY_BYTES}"
_RECORD = np.dtype(
    [
        ("state", "<u8"),
        ("block", _IDENTITY),
        ("parent", _IDENTITY),
        ("generation", "<u8"),
        ("checksum", "<u8"),
        ("unused", "<u8", 2),
        ("seal", "<u8"),
    ]
)
"""Layout of a record. checksum: of the block. seal: a hash of all fields before it; in a void
record it is 0 like the rest."""
RECORD_BYTES = _RECORD.itemsize
_WHOLE = np.dtype(f"V{RECORD_BYTES}")
"""Type of a record with which numpy copies ten times as fast as field by field."""
_SEALED = np.dtype(
    {"names": ["sealed"], "formats": [f"V{RECORD_BYTES - 8}"], "itemsize": RECORD_BYTES}
)
"""Type of the part of a record that its seal covers."""
VOID, _ROOT, _CHILD = range(3)


Ids = NDArray[np.int64]
Records = NDArray[Any]
"""Arrays of _RECORD."""


class DiskBlock(NamedTuple):
    """The block of a slot. generation: how many times the slot had been freed before."""

    generation: int
    block: BlockIdentity
    parent: BlockIdentity | None


class DiskIndex:
    """The records of `num_slots` slots. Nothing is written before `open`.

    Calls may come from several threads. fingerprint: of whatever makes a block usable.
    """

    def __init__(self, path: Path, *, block_bytes: int, num_slots: int, fingerprint: int) -> None:
        self.path = path
        self._header = _HEADER.pack(_MAGIC, block_bytes, num_slots, fingerprint, _boot_id())
        self._records: Records = np.zeros(num_slots, _RECORD)
        self._changing = RLock()
        content = path.read_bytes() if path.exists() else b""
        self.is_ours, self.is_rebooted = _compare(content[: len(self._header)], self._header)
        """Whether the file was written for these blocks, and whether before the last reboot."""
        self.is_foreign = bool(content) and not self.is_ours
        if self.is_ours:
            self._take_records(content[PAGE_BYTES:])

    def open(self) -> None:
        _replace(self.path, self._header.ljust(PAGE_BYTES, b"\0") + self._records.tobytes())
        self._file = os.open(self.path, os.O_RDWR)

    def close(self) -> None:
        os.close(self._file)

    @property
    def num_blocks(self) -> int:
        return int(np.count_nonzero(self._records["state"]))

    def blocks(self) -> Iterator[tuple[int, DiskBlock]]:
        """Yields each slot that holds a block, and the block."""
        slots = self._occupied(np.arange(len(self._records)))
        of_slots = self._records[slots]
        states, blocks, parents, generations = (
            of_slots[name].tolist() for name in ("state", "block", "parent", "generation")
        )
        for slot, state, block, parent, generation in zip(
            slots.tolist(), states, blocks, parents, generations, strict=True
        ):
            yield slot, DiskBlock(generation, block, parent if state == _CHILD else None)

    def records_of(self, slots: Ids) -> Records:
        with self._changing:
            records: Records = self._records.view(_WHOLE)[slots].view(_RECORD)
        return records

    def put(self, slots: Ids, blocks: Sequence[DiskBlock], checksums: Sequence[int]) -> None:
        """Records that `slots`, in order, hold these blocks. Raises OSError: some are unchanged."""
        self._put(slots, _packed(slots, blocks, checksums))

    def void(self, slots: Ids) -> None:
        """Records that `slots`, in order, hold no block. Raises OSError: some are unchanged."""
        occupied = self._occupied(slots)
        self._put(occupied, np.zeros(len(occupied), _RECORD))

    def forget(self, slot: int, record: Any) -> None:
        """Voids the slot's record, unless the slot holds something else by now."""
        with self._changing, suppress(OSError):
            if self._records["seal"][slot] == record["seal"]:
                self._put(np.array([slot]), np.zeros(1, _RECORD))

    def drop(self, slots: Sequence[int]) -> None:
        """Voids the records of these slots; call before `open`."""
        self._records[slots] = np.zeros(1, _RECORD)

    def _take_records(self, packed: bytes) -> None:
        count = min(len(self._records), len(packed) // RECORD_BYTES)
        read = np.frombuffer(packed, _RECORD, count)
        slots = np.flatnonzero(read["state"] != VOID)
        read = read[slots]
        right = read["seal"] == _seals(slots, read)
        self._records[slots[right]] = read[right]

    def _occupied(self, slots: Ids) -> Ids:
        """Returns those of `slots` that hold a block."""
        with self._changing:
            occupied: Ids = slots[self._records["state"][slots] != VOID]
        return occupied

    def _put(self, slots: Ids, records: Records) -> None:
        """Writes records; those close to each other in one piece, along with what lies between
        them.

        Raises OSError; then some of them are unchanged.
        """
        for near in _cut(slots, np.diff(slots) > PAGE_BYTES // RECORD_BYTES):
            first, last = int(slots[near][0]), int(slots[near][-1])
            with self._changing:
                there = self._records[first : last + 1].view(_WHOLE)
                piece = there.copy()
                piece[slots[near] - first] = records[near].view(_WHOLE)
                write_at(self._file, memoryview(piece.tobytes()), PAGE_BYTES + first * RECORD_BYTES)
                there[:] = piece


def between(starts: Ids, end: int) -> list[slice]:
    """Returns the range from each of `starts` to the next one, or to `end`."""
    bounds = [*starts.tolist(), end]
    return list(map(slice, bounds, bounds[1:]))


def write_at(file: int, data: memoryview, offset: int) -> None:
    data = data.cast("B")
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written


def read_at(file: int, into: memoryview, offset: int) -> int:
    """Returns the number of bytes read: fewer than asked for only at the end of the file."""
    into = into.cast("B")
    done = 0
    while done < into.nbytes:
        count = os.preadv(file, [into[done:]], offset + done)
        if not count:
            break
        done += count
    return done


def _cut(slots: Ids, apart: NDArray[np.bool_]) -> list[slice]:
    """Returns ranges of positions in `slots`, cut behind each slot where `apart` is true."""
    return between(np.flatnonzero(np.r_[True, apart][: len(slots)]), len(slots))


def _packed(slots: Ids, blocks: Sequence[DiskBlock], checksums: Sequence[int]) -> Records:
    records = np.zeros(len(slots), _RECORD)
    generations, identities, parents = zip(*blocks, strict=True) if blocks else ((), (), ())
    records["state"] = [_ROOT if parent is None else _CHILD for parent in parents]
    records["block"] = np.array(identities, _IDENTITY)
    records["parent"] = np.array([parent or b"" for parent in parents], _IDENTITY)
    records["generation"] = generations
    records["checksum"] = checksums
    records["seal"] = _seals(slots, records)
    return records


def _seals(slots: Ids, records: Records) -> NDArray[np.uint64]:
    """Returns a hash of each record and its slot: in another slot's place the record is invalid."""
    sealed = records.view(_SEALED)["sealed"].tolist()
    return np.array(list(map(xxh3_64_intdigest, sealed, slots.tolist())), np.uint64)


def _boot_id() -> bytes:
    """Returns an id of this boot of the machine; if there is none, one that no other boot has."""
    try:
        return _BOOT_ID.read_bytes().strip()
    except OSError:
        return os.urandom(16).hex().encode()


def _compare(written: bytes, header: bytes) -> tuple[bool, bool]:
    """Whether both headers are of the same blocks, and whether a reboot lies between them."""
    if len(written) != len(header):
        return False, False
    *what, boot_id = _HEADER.unpack(written)
    *what_now, boot_id_now = _HEADER.unpack(header)
    return what == what_now, boot_id != boot_id_now


def _replace(path: Path, content: bytes) -> None:
    """Gives `path` this content atomically and durably: a crash of the machine does not undo it."""
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
