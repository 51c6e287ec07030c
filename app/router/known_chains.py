"""Chains of prompts seen lately, so that of one that goes on, only the rest is hashed.

A conversation's next turn begins with all of its last one: of 512 blocks perhaps 20 are new.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from xxhash import xxh3_64

from app.core.types import SequenceHash

BLOCKS_PER_MARK = 32
"""A prompt is found by each prefix of a multiple of so many blocks."""
MAX_BYTES = 32 * 1024 * 1024
"""Of what is kept: some 300,000 blocks of 16 tokens."""
BYTES_PER_HASH = 40
"""Of a list of ints."""


@dataclass(slots=True, eq=False)
class MarkedPrompt:
    """A prompt. tokens: little-endian u32. seed: of local hashes. marks: a digest of each prefix by
    which it is found, the shortest first. chain: of its full blocks, once known; not changed."""

    tokens: bytes
    block_size: int
    seed: int
    marks: Sequence[int]
    chain: list[SequenceHash]

    @property
    def num_bytes(self) -> int:
        return len(self.tokens) + BYTES_PER_HASH * len(self.chain)

    def begins_as(self, other: MarkedPrompt, num_blocks: int) -> bool:
        """Digests can be made to collide."""
        return (
            self.block_size == other.block_size
            and self.seed == other.seed
            and self.tokens.startswith(other.tokens[: 4 * self.block_size * num_blocks])
        )


def marked(tokens: bytes, block_size: int, seed: int) -> MarkedPrompt:
    stride = 4 * block_size * BLOCKS_PER_MARK
    digest = xxh3_64(seed=seed)
    marks = []
    for end in range(stride, len(tokens) + 1, stride):
        digest.update(tokens[end - stride : end])
        marks.append(digest.intdigest())
    return MarkedPrompt(tokens, block_size, seed, marks, [])


class KnownChains:
    """Keeps MAX_BYTES of prompts' tokens and chains, the latest used ones."""

    def __init__(self) -> None:
        self._at: dict[int, MarkedPrompt] = {}
        """By mark, the latest prompt that begins so."""
        self._kept: OrderedDict[int, MarkedPrompt] = OrderedDict()
        """By their id(), the least lately used first."""
        self._num_bytes = 0

    def prefix(self, prompt: MarkedPrompt) -> list[SequenceHash]:
        """The longest chain known of what it begins with."""
        for number in range(len(prompt.marks), 0, -1):
            known = self._at.get(prompt.marks[number - 1])
            num_blocks = number * BLOCKS_PER_MARK
            if known is not None and known.begins_as(prompt, num_blocks):
                self._kept.move_to_end(id(known))
                return known.chain[:num_blocks]
        return []

    def keep(self, prompt: MarkedPrompt) -> None:
        """From now on, find its chain."""
        if prompt.num_bytes > MAX_BYTES // 8:
            return
        self._kept[id(prompt)] = prompt
        self._num_bytes += prompt.num_bytes
        self._at.update(dict.fromkeys(prompt.marks, prompt))
        while self._num_bytes > MAX_BYTES:
            self._forget(self._kept.popitem(last=False)[1])

    def _forget(self, prompt: MarkedPrompt) -> None:
        self._num_bytes -= prompt.num_bytes
        for mark in prompt.marks:
            if self._at.get(mark) is prompt:
                del self._at[mark]
