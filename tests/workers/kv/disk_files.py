"""Files of the disk tier, and blocks written to and read from them."""

import os
import random
from contextlib import closing, contextmanager

import numpy as np

from tests.workers.kv.words import named
from workers.kv import disk_records
from workers.kv.disk import DiskPieces, SlotFile
from workers.kv.disk_records import PAGE_BYTES, DiskBlock
from workers.kv.identity import hash_of

BLOCK_BYTES = 10_000
"""Two pages and part of a third: a slot takes three."""
SLOT_BYTES = 3 * PAGE_BYTES
NUM_SLOTS = 8
A, B, C = 0xA, 0xB, 0xC
"""Numbers of blocks; see `named`."""


@contextmanager
def opened(folder, **others):
    options = {"block_bytes": BLOCK_BYTES, "num_slots": NUM_SLOTS, "fingerprint": 7, **others}
    with closing(SlotFile(folder, **options)) as file:
        yield file


def content(block, size=BLOCK_BYTES):
    """The content of a block, different for each block."""
    return memoryview(random.Random(block).randbytes(size))


def write_all(file, slots, blocks, data):
    """Write one batch."""
    return file.write(np.array(slots, np.int64), blocks, [*map(memoryview, data)])


def read_all(file, slots, generation):
    """Read one batch, in two pieces."""
    if not slots:
        return [], {}
    half = file.block_bytes // 2
    memory = [bytearray(file.block_bytes) for _ in slots]
    pieces = DiskPieces(file, np.array(slots, np.int64), [generation] * len(slots))
    for part, later in (slice(half), file.block_bytes - half), (slice(half, None), 0):
        pieces.read([memoryview(row)[part] for row in memory], later)
    return [*map(bytes, memory)], pieces.finish()


def write(file, slot, generation, block, parent, data):
    held = DiskBlock(generation, named(block), None if parent is None else named(parent))
    for error in write_all(file, [slot], [held], [data]).values():
        raise error


def read(file, slot, generation):
    (into,), lost = read_all(file, [slot], generation)
    for error in lost.values():
        raise error
    return into


def write_roots(file, slots, generation=1):
    """Write into each slot the block of the same number, in one batch."""
    blocks = [DiskBlock(generation, named(slot), None) for slot in slots]
    return write_all(file, slots, blocks, [content(slot, file.block_bytes) for slot in slots])


def read_roots(file, slots, generation=1):
    """Read slots in one batch; returns their content, and errors by position in the batch."""
    into, lost = read_all(file, slots, generation)
    return into, {n: str(error) for n, error in lost.items()}


def listed(file):
    return {slot: hash_of(record.block) for slot, record in file.records()}


def generations(file):
    return {slot: record.generation for slot, record in file.records()}


def flip(path, offset):
    """Change all bits of one byte."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0xFF]))


def replace_write(monkeypatch, write):
    """Replace what writes blocks, but not what writes records."""
    pwrite = os.pwrite
    replaced = write(pwrite)

    def either(file, *args):
        is_blocks = os.readlink(f"/proc/self/fd/{file}").endswith("/blocks")
        return (replaced if is_blocks else pwrite)(file, *args)

    monkeypatch.setattr(os, "pwrite", either)


def reboot(monkeypatch):
    monkeypatch.setattr(disk_records, "_boot_id", lambda: b"another run of the machine")
