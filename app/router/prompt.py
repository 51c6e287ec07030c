"""Prompts, by their tokens or by the hashes of their blocks, and the chains of blocks that they
are.

Chains seen lately are kept, so that of a prompt that goes on only the rest is hashed: a
conversation's next turn begins with all of its last one, and of 512 blocks perhaps 20 are new.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from xxhash import xxh3_64

from app.core.errors import InvalidRequest, shown
from app.core.hashing import (
    Tokens,
    compute_local_hashes,
    compute_sequence_hashes,
    seed_for,
    token_bytes,
)
from app.core.types import LocalHash, SequenceHash

BLOCKS_AT_ONCE = 8192
"""Blocks that are hashed before others have a turn: some 5 ms."""


BLOCKS_PER_MARK = 32
"""Prompts are found by each prefix of a multiple of so many blocks."""
MAX_BYTES = 32 * 1024 * 1024
"""Bytes that are kept: some 300,000 blocks of 16 tokens."""
BYTES_PER_HASH = 40
"""Bytes of an int in a list."""


@dataclass(slots=True, eq=False)
class MarkedPrompt:
    """A prompt whose prefixes can be found.

    tokens: little-endian u32. seed: of local hashes. marks: a digest of each prefix by which it is
    found, the shortest first. chain: of its full blocks, once known; not changed.
    """

    tokens: bytes
    block_size: int
    seed: int
    marks: Sequence[int]
    chain: list[SequenceHash]

    @property
    def num_bytes(self) -> int:
        return len(self.tokens) + BYTES_PER_HASH * len(self.chain)

    def begins_as(self, other: MarkedPrompt, num_blocks: int) -> bool:
        """Whether it begins as the other: digests can be made to collide."""
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
        """Latest prompt that begins so, by mark."""
        self._kept: OrderedDict[int, MarkedPrompt] = OrderedDict()
        """Prompts by their id(), the least lately used first."""
        self._num_bytes = 0

    def prefix(self, prompt: MarkedPrompt) -> list[SequenceHash]:
        """Returns the longest chain known that the prompt begins with."""
        for number in range(len(prompt.marks), 0, -1):
            known = self._at.get(prompt.marks[number - 1])
            num_blocks = number * BLOCKS_PER_MARK
            if known is not None and known.begins_as(prompt, num_blocks):
                self._kept.move_to_end(id(known))
                return known.chain[:num_blocks]
        return []

    def keep(self, prompt: MarkedPrompt) -> None:
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


@dataclass(slots=True)
class Prompt:
    """A prompt of a permitted length, by its tokens or by the hashes of its blocks, whichever is
    not None.

    may_be_longer: whether it may have full blocks without a hash, as in a lookup, which reserves
    nothing. mm_hashes: for each full block, those of images and the like that touch it.
    """

    num_tokens: int
    tokens: Tokens | None = None
    local_hashes: list[int] | None = None
    may_be_longer: bool = False
    mm_hashes: list[list[int]] | None = None
    lora_name: str | None = None
    cache_namespace: str | None = None

    async def chain(self, block_size: int, known: KnownChains | None = None) -> list[SequenceHash]:
        """Returns sequence hashes of the full blocks; other tasks run after every BLOCKS_AT_ONCE.

        known: what need not be hashed again, and keeps this chain.
        Raises InvalidRequest if the hashes that the client gave do not fit `block_size`.
        """
        num_blocks = self.num_tokens // block_size
        self._check(num_blocks, block_size)
        if self.local_hashes is not None:
            num_blocks = len(self.local_hashes)
        is_kept = known is not None and num_blocks >= BLOCKS_PER_MARK and not self.mm_hashes
        if known is None or not is_kept or not isinstance(self.tokens, bytes | np.ndarray):
            return await self._hashed([], num_blocks, block_size)
        self.tokens = token_bytes(self.tokens)
        prompt = marked(self.tokens, block_size, seed_for(self.lora_name, self.cache_namespace))
        prefix = known.prefix(prompt)
        is_new = len(prefix) < len(prompt.marks) * BLOCKS_PER_MARK
        prompt.chain = await self._hashed(prefix, num_blocks, block_size)
        if is_new:
            known.keep(prompt)
        return prompt.chain

    async def _hashed(
        self, chain: list[SequenceHash], num_blocks: int, block_size: int
    ) -> list[SequenceHash]:
        """Returns the chain that begins with `chain`, which is changed."""
        for start in range(len(chain), num_blocks, BLOCKS_AT_ONCE):
            if start >= BLOCKS_AT_ONCE:
                await asyncio.sleep(0)
            local = self._local(start, min(start + BLOCKS_AT_ONCE, num_blocks), block_size)
            # A chain begins with its first local hash, so this one goes on from the last.
            last = cast(list[LocalHash], chain[-1:])
            chain += compute_sequence_hashes(last + local)[len(last) :]
        return chain

    def _check(self, num_blocks: int, block_size: int) -> None:
        if self.local_hashes is not None:
            given = len(self.local_hashes)
            if given > num_blocks or (given < num_blocks and not self.may_be_longer):
                relation = "do not fit into" if given > num_blocks else "do not fill"
                raise InvalidRequest(
                    "local_hashes",
                    f"{given} full blocks of {block_size} tokens {relation} "
                    f"num_tokens {self.num_tokens}",
                )
        if self.mm_hashes is not None and len(self.mm_hashes) != num_blocks:
            raise InvalidRequest(
                "mm_hashes",
                f"got {len(self.mm_hashes)} lists, but {self.num_tokens} tokens are {num_blocks} "
                f"full blocks of {block_size}",
            )
        if isinstance(self.tokens, bytes):
            token_bytes(self.tokens)

    def _local(self, start: int, end: int, block_size: int) -> list[LocalHash]:
        """Returns local hashes of the blocks from `start` to `end`, `end` excluded."""
        if self.local_hashes is not None:
            return cast(list[LocalHash], self.local_hashes[start:end])
        assert self.tokens is not None
        stride = (4 if isinstance(self.tokens, bytes) else 1) * block_size
        return compute_local_hashes(
            self.tokens[start * stride : end * stride],
            block_size,
            seed=seed_for(self.lora_name, self.cache_namespace),
            mm_hashes=self.mm_hashes[start:end] if self.mm_hashes else None,
        )


def check_length(field: str, num_tokens: int, max_tokens: int) -> None:
    """Raises InvalidRequest, naming `field`, if a prompt of that length is not permitted."""
    if not 1 <= num_tokens <= max_tokens:
        raise InvalidRequest(
            field, f"got {shown(num_tokens)} tokens; 1 to {max_tokens} are allowed"
        )
