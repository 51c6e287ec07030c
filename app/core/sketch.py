"""Memory of the chains of blocks added in about the last hour, in a fixed amount of memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from app.core.types import SequenceHash

PERIOD_S = 1200.0
GENERATIONS = 4
"""Filters in use. The newest takes what is added for PERIOD_S, so a block is known for 60 to 80
minutes."""
WORDS = 1 << 19
"""Words of 64 bits in one generation: 4 MiB."""
CAPACITY = 2 * WORDS
"""Blocks of one generation. Faster prompts make generations shorter, not less exact."""
ERROR = 0.005
"""Most blocks of a chain, as a fraction, that wrongly look added once all generations are full. No
block that was added looks as if it were not."""
FEW = 8
_PAIRS = [1 << (n & 63) | 1 << (n >> 6) for n in range(4096)]
_PAIRS_ARRAY = np.array(_PAIRS, dtype=np.uint64)
"""Two bits of a word for each twelve of a hash, whose last bits say which word."""


class ChainSketch:
    """Bloom filter in generations; all bits of a block are in one word. Times: monotonic seconds. A
    caller adds a chain with all of its beginnings, so what is known of a chain ends in one place.
    """

    def __init__(self) -> None:
        self._generations: deque[memoryview] = deque(maxlen=GENERATIONS)
        self._words: NDArray[np.uint64]
        self._began_s = 0.0
        self._left = 0

    def leading(self, chain: Sequence[SequenceHash], now_s: float) -> int:
        self._age(now_s)
        newest, *older = self._generations
        return _further(chain, _known(chain, 0, newest), older)

    def add(self, chain: Sequence[SequenceHash], now_s: float) -> int:
        """Adds a chain; returns how many leading blocks of it were added before."""
        self._age(now_s)
        newest, *older = self._generations
        known = _known(chain, 0, newest)
        if known == len(chain):
            return known
        before = _further(chain, known, older)
        self._add(chain[known:], newest)
        return before

    def _add(self, new: Sequence[SequenceHash], words: memoryview) -> None:
        self._left -= len(new)
        if len(new) <= FEW:
            for block in new:
                words[block & (WORDS - 1)] |= _bits(block)
            return
        hashes = np.array(new, dtype=np.uint64)
        bits = _PAIRS_ARRAY[hashes >> 20 & 4095] | _PAIRS_ARRAY[hashes >> 32 & 4095]
        bits |= _PAIRS_ARRAY[hashes >> 44 & 4095]
        np.bitwise_or.at(self._words, hashes & (WORDS - 1), bits)

    def _age(self, now_s: float) -> None:
        if not self._generations:
            self._begin(now_s)
        while now_s - self._began_s >= PERIOD_S:
            if now_s - self._began_s >= GENERATIONS * PERIOD_S:
                self._generations.clear()
                self._began_s = now_s
            self._begin(min(now_s, self._began_s + PERIOD_S))
        if self._left <= 0:
            self._begin(now_s)

    def _begin(self, now_s: float) -> None:
        self._words = np.zeros(WORDS, dtype=np.uint64)
        self._generations.appendleft(self._words.data)
        self._began_s, self._left = now_s, CAPACITY


def _bits(block: SequenceHash) -> int:
    return _PAIRS[block >> 20 & 4095] | _PAIRS[block >> 32 & 4095] | _PAIRS[block >> 44 & 4095]


def _further(chain: Sequence[SequenceHash], known: int, older: list[memoryview]) -> int:
    return max((_known(chain, known, words) for words in older), default=known)


def _known(chain: Sequence[SequenceHash], least: int, words: memoryview) -> int:
    low, high = least, len(chain)
    # Most look-ups end at one of the ends.
    at = high - 1
    while low < high:
        block = chain[at]
        bits = _bits(block)
        if words[block & (WORDS - 1)] & bits == bits:
            low = at + 1
        else:
            high = at
        at = low if at >= len(chain) - 1 else (low + high) // 2
    return low
