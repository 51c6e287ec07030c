"""The disk tier: blocks in the slots of a file, which outlive the process.

A folder holds two files. `blocks` has a slot for each block, at a multiple of 4096 bytes. `index`
has a page that says what the files are for, then a record for each slot, of 64 bytes, checked by a
hash of its own. To write a block is to void the slot's record, write the block, then write a record
with the block's checksum: at any moment each record names a block that is whole, or nothing. So a
process that is killed loses the block that it was writing, and no other.

A machine that stops may lose any of the last writes, in any order. Whoever opens the files after a
reboot therefore reads all blocks once, and keeps those that fit their checksums.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_64_intdigest

from app.core.errors import BlockLost, ConfigError
from app.core.types import SequenceHash

log = logging.getLogger(__name__)

PAGE_BYTES = 4096
"""Slots begin at multiples of it, as direct I/O would need them to."""
RECORD_BYTES = 64
_MAGIC = b"kvroute disk tier 1\n"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# magic, bytes of a block, slots, fingerprint, boot id; then, as in a record, a hash of all before.
_HEADER = struct.Struct("<32sQQQ64s")
# state, sequence hash, parent, generation, checksum of the block.
_RECORD = struct.Struct("<B7xQQQQ16x")
_HASH = struct.Struct("<Q")
_VOID, _ROOT, _CHILD = range(3)


@dataclass(frozen=True, slots=True)
class Record:
    """What a slot holds. generation: of the slot when it was written; see workers/slots.py."""

    block: SequenceHash
    parent: SequenceHash | None
    generation: int
    checksum: int


class SlotFile:
    """`num_slots` blocks of `block_bytes` in a folder that one process at a time may open.

    fingerprint: of whatever makes a block usable, such as model and shape; files of another one,
    or of another size, are begun anew.

    Reads and writes may run in several threads, but not while their slot is being written.
    """

    def __init__(
        self, folder: Path, *, block_bytes: int, num_slots: int, fingerprint: int = 0
    ) -> None:
        """Raises ConfigError where another process has the files, OSError where they fail."""
        if block_bytes < 1 or num_slots < 1:
            raise ConfigError(f"disk tier: {num_slots} slots of {block_bytes} bytes")
        self.block_bytes = block_bytes
        self.num_slots = num_slots
        self._slot_bytes = -(-block_bytes // PAGE_BYTES) * PAGE_BYTES
        self._records: dict[int, Record] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self._blocks = os.open(folder / "blocks", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._lock(folder)
            header = _sealed(
                _HEADER.pack(_MAGIC, block_bytes, num_slots, fingerprint, _boot_id()), seed=0
            )
            self._index = self._open_index(folder, header)
        except BaseException:
            os.close(self._blocks)
            raise

    def close(self) -> None:
        """Leave the files to another process. What is on its way to the disk still gets there."""
        os.close(self._index)
        os.close(self._blocks)

    def records(self) -> Iterator[tuple[int, Record]]:
        """All slots that hold a block."""
        yield from list(self._records.items())

    def write(
        self,
        slot: int,
        generation: int,
        block: SequenceHash,
        parent: SequenceHash | None,
        data: memoryview,
    ) -> None:
        """Put a block into `slot`, in the place of what is there.

        Raises OSError, the disk being full for instance: the new block is then not there.
        """
        if data.nbytes != self.block_bytes:
            raise ValueError(f"a block has {self.block_bytes} bytes, not {data.nbytes}")
        self.drop(slot)
        record = Record(block, parent, generation, xxh3_64_intdigest(data))
        _write(self._blocks, data, slot * self._slot_bytes)
        self._write_record(slot, record)
        self._records[slot] = record

    def read(self, slot: int, generation: int, into: memoryview) -> None:
        """Fill `into` with the block that `slot` was given in that generation.

        Raises BlockLost if the slot holds another by now, or if the block is not what was written,
        which is then forgotten; `into` may hold anything.
        """
        if into.nbytes != self.block_bytes:
            raise ValueError(f"a block has {self.block_bytes} bytes, not {into.nbytes}")
        record = self._records.get(slot)
        if record is None or record.generation != generation:
            raise BlockLost(f"disk slot {slot} does not hold generation {generation} any more")
        why = self._spoilt(slot, record, into)
        if why is not None:
            if self._records.get(slot) is record:
                with suppress(OSError):
                    self.drop(slot)
            raise BlockLost(f"disk slot {slot}, block {record.block:016x}: {why}")

    def drop(self, slot: int) -> None:
        """Forget what `slot` holds. Raises OSError, and it holds that still."""
        if slot in self._records:
            self._write_record(slot, None)
            del self._records[slot]

    def _lock(self, folder: Path) -> None:
        try:
            fcntl.flock(self._blocks, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"disk tier {folder}: another process uses it") from None

    def _open_index(self, folder: Path, header: bytes) -> int:
        path = folder / "index"
        found = path.read_bytes() if path.exists() else b""
        fits, rebooted = _compare(found[: len(header)], header)
        if found and not fits:
            log.warning("disk tier %s: was of another model or size; begun anew", folder)
            path.unlink()
            os.ftruncate(self._blocks, 0)
        size = self.num_slots * self._slot_bytes
        cut = os.fstat(self._blocks).st_size < size
        os.ftruncate(self._blocks, size)
        if fits:
            self._take_records(found[PAGE_BYTES:])
            if rebooted or cut:
                self._verify(folder)
        records = b"".join(_pack(slot, self._records.get(slot)) for slot in range(self.num_slots))
        _replace(path, header.ljust(PAGE_BYTES, b"\0") + records)
        if self._records:
            log.info("disk tier %s: %d blocks are there", folder, len(self._records))
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def _take_records(self, packed: bytes) -> None:
        for slot in range(min(self.num_slots, len(packed) // RECORD_BYTES)):
            body = _unsealed(packed[slot * RECORD_BYTES :][:RECORD_BYTES], seed=slot)
            if body is None:
                continue
            state, block, parent, generation, checksum = _RECORD.unpack(body)
            if state in (_ROOT, _CHILD):
                above = SequenceHash(parent) if state == _CHILD else None
                self._records[slot] = Record(SequenceHash(block), above, generation, checksum)

    def _verify(self, folder: Path) -> None:
        """Read all blocks; forget those that cannot be proved whole."""
        buffer = memoryview(bytearray(self.block_bytes))
        lost = 0
        for slot, record in self.records():
            if self._spoilt(slot, record, buffer) is not None:
                del self._records[slot]
                lost += 1
        log.info("disk tier %s: all blocks were read, %d of them are lost", folder, lost)

    def _spoilt(self, slot: int, record: Record, into: memoryview) -> str | None:
        """Read it; what is wrong with it, if anything is."""
        try:
            done = _read(self._blocks, into, slot * self._slot_bytes)
        except OSError as error:
            return str(error)
        if done < self.block_bytes:
            return f"{done} of {self.block_bytes} bytes are there"
        if xxh3_64_intdigest(into) != record.checksum:
            return "the checksum is wrong"
        return None

    def _write_record(self, slot: int, record: Record | None) -> None:
        packed = _pack(slot, record)
        _write(self._index, memoryview(packed), PAGE_BYTES + slot * RECORD_BYTES)


def _pack(slot: int, record: Record | None) -> bytes:
    if record is None:
        body = _RECORD.pack(_VOID, 0, 0, 0, 0)
    else:
        state = _ROOT if record.parent is None else _CHILD
        body = _RECORD.pack(
            state, record.block, record.parent or 0, record.generation, record.checksum
        )
    # A record that got to another slot's place is none.
    return _sealed(body, seed=slot)


def _boot_id() -> bytes:
    """Of this run of the machine; where that is not told, one that no other run has."""
    try:
        return _BOOT_ID.read_bytes().strip()
    except OSError:
        return os.urandom(16).hex().encode()


def _compare(found: bytes, header: bytes) -> tuple[bool, bool]:
    """Whether `found` heads files like `header`'s, and whether they are from before a reboot."""
    body = _unsealed(found, seed=0)
    if body is None or len(found) != len(header):
        return False, False
    *what, boot_id = _HEADER.unpack(body)
    *what_now, boot_id_now = _HEADER.unpack(header[: _HEADER.size])
    return what == what_now, boot_id != boot_id_now


def _sealed(body: bytes, seed: int) -> bytes:
    return body + _HASH.pack(xxh3_64_intdigest(body, seed))


def _unsealed(packed: bytes, seed: int) -> bytes | None:
    """None unless it is what `_sealed` made."""
    body = packed[: -_HASH.size]
    return body if packed == _sealed(body, seed) else None


def _write(file: int, data: memoryview, offset: int) -> None:
    data = data.cast("B")
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written


def _read(file: int, into: memoryview, offset: int) -> int:
    """Bytes read: fewer than asked for only at the end of the file."""
    into = into.cast("B")
    done = 0
    while done < into.nbytes:
        count = os.preadv(file, [into[done:]], offset + done)
        if not count:
            break
        done += count
    return done


def _replace(path: Path, content: bytes) -> None:
    """Give `path` this content in one step, which a machine that stops does not undo."""
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
