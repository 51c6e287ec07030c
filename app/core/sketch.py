"""Which chains of blocks were added in about the last hour, in a fixed amount of memory."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from app.core.types import SequenceHash

PERIOD_S = 1200.0
GENERATIONS = 4
"""The newest takes what is added for PERIOD_S. So a block is known for 60 to 80 minutes."""
WORDS = 1 << 19
"""Of 64 bits, in one generation: 4 MiB."""
CAPACITY = 2 * WORDS
"""Blocks of one generation. Faster prompts make generations shorter, not less exact."""
ERROR = 0.005
"""Of the blocks of a chain, so many at most look added that were not, on average, once all
generations are full. None that was added looks as if it were not."""
FEW = 8
"""Blocks that are added faster one by one."""
_PAIRS = [1 << (n & 63) | 1 << (n >> 6) for n in range(4096)]
_PAIRS_ARRAY = np.array(_PAIRS, dtype=np.uint64)
"""Two bits of a word for each twelve of a hash. Its last bits say which word."""


class ChainSketch:
    """A Bloom filter in generations; all bits of a block are in one word. Times: monotonic seconds.

    Who adds a chain adds all of its beginnings: what is known of a chain ends in one place.
    """

    def __init__(self) -> None:
        self._generations: deque[memoryview] = deque(maxlen=GENERATIONS)
        """The newest first."""
        self._words: NDArray[np.uint64]
        self._began_s = 0.0
        self._left = 0

    def leading(self, chain: Sequence[SequenceHash], now_s: float) -> int:
        """How many leading blocks of a chain were added lately."""
        self._age(now_s)
        return _leading(chain, list(self._generations))

    def add(self, chain: Sequence[SequenceHash], now_s: float) -> None:
        """Add a chain."""
        self._age(now_s)
        # Most of a prompt is as new as the prompt before it.
        new = chain[_leading(chain, [self._generations[0]]) :]
        if not new:
            return
        self._left -= len(new)
        if len(new) <= FEW:
            words = self._generations[0]
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
    """Those of its word that are its own."""
    return _PAIRS[block >> 20 & 4095] | _PAIRS[block >> 32 & 4095] | _PAIRS[block >> 44 & 4095]


def _leading(chain: Sequence[SequenceHash], generations: list[memoryview]) -> int:
    def is_new(block: SequenceHash) -> bool:
        word, bits = block & (WORDS - 1), _bits(block)
        return all(words[word] & bits != bits for words in generations)

    if not chain or not is_new(chain[-1]):
        return len(chain)
    return bisect_left(chain, True, key=is_new)
