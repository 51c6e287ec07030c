"""A prompt, by its tokens or by the hashes of its blocks, and the chain of blocks that it is."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import cast

import numpy as np

from app.core.errors import InvalidRequest, shown
from app.core.hashing import (
    Tokens,
    compute_local_hashes,
    compute_sequence_hashes,
    seed_for,
    token_bytes,
)
from app.core.types import LocalHash, SequenceHash
from app.router.known_chains import BLOCKS_PER_MARK, KnownChains, marked

BLOCKS_AT_ONCE = 8192
"""How many blocks are hashed before others have a turn: some 5 ms."""


@dataclass(slots=True)
class Prompt:
    """A prompt of a permitted length, by its tokens or by the hashes of its blocks, whichever is
    not None."""

    num_tokens: int
    tokens: Tokens | None = None
    local_hashes: list[int] | None = None
    may_be_longer: bool = False
    """Whether it may have full blocks without a hash, as in a lookup, which reserves nothing."""
    mm_hashes: list[list[int]] | None = None
    """For each full block, those of images and the like that touch it."""
    lora_name: str | None = None
    cache_namespace: str | None = None

    async def chain(self, block_size: int, known: KnownChains | None = None) -> list[SequenceHash]:
        """Sequence hashes of the full blocks; other tasks run after every BLOCKS_AT_ONCE.

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
        """The chain that begins with `chain`, which is changed."""
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
        """Local hashes of the blocks from `start` to `end`, `end` excluded."""
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
