"""Reads blocks of the disk tier layer by layer: the first bytes of all of them come first."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeVar

import numpy as np
from xxhash import xxh3_64

from app.core.errors import BlockLost
from workers.kv.disk_records import VOID, DiskIndex, Ids, Records, read_at
from workers.kv.identity import hash_of

P = TypeVar("P")
T = TypeVar("T")

THREADS = min(4, os.cpu_count() or 1)


class DiskThreads:
    """Whoever calls `share` works along."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="disk-tier")

    def close(self) -> None:
        self._threads.shutdown()

    def share(self, act: Callable[[P], list[T]], parts: Sequence[P]) -> list[T]:
        """The results of `act` for all parts, in order."""
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


Share = Callable[[Callable[[range], list[None]], Sequence[range]], list[None]]
"""Has threads call the function with each of the ranges."""
BLOCKS_AT_ONCE = 8
"""Pieces that a thread reads before it looks for others."""


@dataclass(slots=True)
class DiskPieces:
    """The blocks of distinct slots, read together piece by piece, from front to back.

    A block's checksum is of all of it, so what was read is known to be right only at the end.

    records: of the slots. generations: that they are read in. Each slot has `slot_bytes`.
    """

    file: int
    index: DiskIndex
    slots: Ids
    generations: Sequence[int]
    slot_bytes: int
    share: Share
    _records: Records = field(init=False)
    _lost: dict[int, str] = field(init=False)
    _stale: frozenset[int] = field(init=False)
    """Those whose slots hold other blocks by now."""
    _hashes: list[xxh3_64] = field(init=False)
    _at: int = 0

    def __post_init__(self) -> None:
        self._hashes = [xxh3_64() for _ in self.slots]
        self._records = records = self.index.records_of(self.slots)
        wanted = np.array(self.generations, np.uint64)
        wrong = (records["state"] == VOID) | (records["generation"] != wanted)
        self._lost = {
            n: f"no longer holds generation {self.generations[n]}"
            for n in np.flatnonzero(wrong).tolist()
        }
        self._stale = frozenset(self._lost)

    def read(self, rows: Sequence[memoryview], next_bytes: int) -> None:
        """The next piece of each block, into memory of its own for each; they are of one size.

        next_bytes: of the piece after that, of which the kernel is told before this one is read.
        """
        size = rows[0].nbytes
        starts = (self.slots * self.slot_bytes + self._at).tolist()
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
        self.share(read, [range(at, min(at + BLOCKS_AT_ONCE, count)) for at in firsts])
        self._at += size

    def finish(self) -> dict[int, BlockLost]:
        """All pieces were read: what is wrong with blocks, by their position in `slots`.

        Those that cannot be read, or are not what was written, are forgotten.
        """
        checksums = self._records["checksum"].tolist()
        for n, content in enumerate(self._hashes):
            if n not in self._lost and content.intdigest() != checksums[n]:
                block = hash_of(self._records["block"][n].tobytes())
                self._lost[n] = f"block {block:016x}: the checksum is wrong"
        for n in self._lost.keys() - self._stale:
            self.index.forget(int(self.slots[n]), self._records[n])
        return {n: BlockLost(f"disk slot {self.slots[n]}: {why}") for n, why in self._lost.items()}

    def _read(self, n: int, into: memoryview, offset: int) -> None:
        try:
            done = read_at(self.file, into, offset, 0)
        except OSError as error:
            self._lost[n] = str(error)
            return
        if done < into.nbytes:
            self._lost[n] = f"only {done} of {into.nbytes} bytes at {offset} are there"
        self._hashes[n].update(into)

    def _advise(self, starts: Sequence[int], size: int) -> None:
        for start in starts:
            with suppress(OSError):
                os.posix_fadvise(self.file, start, size, os.POSIX_FADV_WILLNEED)
