"""The ids of parts of texts that were tokenized before."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence

OVERHEAD_BYTES = 250
"""What an entry takes besides its text and ids."""


class Parts:
    """Remembers the ids of the texts that were used last. For any number of threads.

    max_bytes: of texts and ids together; when full, those not used for longest are forgotten. What
    would take a quarter of it is not remembered.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._ids: OrderedDict[bytes, bytes] = OrderedDict()
        self._size = 0

    def get(self, texts: Sequence[bytes]) -> list[bytes | None]:
        """The ids of each, as little-endian u32; None: they are not known."""
        with self._lock:
            ids = [self._ids.get(text) for text in texts]
            for text, known in zip(texts, ids, strict=True):
                if known is not None:
                    self._ids.move_to_end(text)
            return ids

    def put(self, parts: Iterable[tuple[bytes, bytes]]) -> None:
        """Remember texts and their ids."""
        with self._lock:
            for text, ids in parts:
                size = _size(text, ids)
                if text not in self._ids and size <= self._max_bytes // 4:
                    self._size += size
                    self._ids[text] = ids
            while self._size > self._max_bytes:
                self._size -= _size(*self._ids.popitem(last=False))

    def check(self) -> None:
        """Raises AssertionError if the size is not that of the entries, or exceeds its bound."""
        with self._lock:
            assert self._size == sum(_size(text, ids) for text, ids in self._ids.items())
            assert self._size <= self._max_bytes


def _size(text: bytes, ids: bytes) -> int:
    return len(text) + len(ids) + OVERHEAD_BYTES
