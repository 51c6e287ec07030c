"""Inputs of a simulated engine, what it refuses, and what one step of any engine reports."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Self

from xxhash import xxh3_64_intdigest

from app.core.hashing import (
    BASE_SEED,
    U64,
    Tokens,
    compute_local_hashes,
    compute_sequence_hashes,
    seed_for,
    token_bytes,
)
from app.core.types import SequenceHash


@dataclass(frozen=True, slots=True)
class SimRequest:
    """A request. blocks: hashes of the prompt's full blocks; tail_tokens: the prompt tokens after
    them.

    The engine writes exactly `max_tokens` tokens, at least one. seed: of the hashes of blocks.
    """

    request_id: str
    blocks: tuple[SequenceHash, ...]
    tail_tokens: tuple[int, ...]
    prompt_tokens: int
    max_tokens: int
    seed: int = BASE_SEED
    priority: str = "normal"
    tenant: str = ""

    @classmethod
    def from_tokens(
        cls, request_id: str, prompt: Tokens, max_tokens: int, *, block_size: int, salt: str = ""
    ) -> Self:
        """salt: prompts with other ones share no blocks. Raises InvalidRequest for tokens that are
        not integers in [0, 2^32)."""
        raw, seed = token_bytes(prompt), seed_for(cache_namespace=salt)
        blocks = compute_sequence_hashes(compute_local_hashes(raw, block_size, seed=seed))
        tail = raw[4 * block_size * len(blocks) :]
        tail_tokens = struct.unpack(f"<{len(tail) // 4}I", tail)
        return cls(request_id, tuple(blocks), tail_tokens, len(raw) // 4, max_tokens, seed)

    def output_tokens(self, start: int, stop: int) -> list[int]:
        """Returns token ids `start` to `stop` of the output: 15 bits each, set by the prompt
        alone."""
        tail = struct.pack(f"<{len(self.tail_tokens)}I", *self.tail_tokens)
        seed = xxh3_64_intdigest(tail, self.blocks[-1] if self.blocks else 0)
        # A Weyl sequence: multiples of 2^64 / golden ratio, whose high bits look random.
        return [(seed + i * 0x9E3779B97F4A7C15 & U64) >> 49 for i in range(start, stop)]


class PromptTooLargeError(ValueError):
    """A request that could never be admitted: prompt and output exceed the whole KV pool, or what
    the model takes.

    limit_of: says what has the limit. field: of the request, that must become smaller.
    """

    def __init__(self, prompt_tokens: int, max_tokens: int, limit_of: str, limit: int) -> None:
        super().__init__(
            f"needs {prompt_tokens} prompt + {max_tokens} output tokens, but {limit_of} {limit}"
        )
        self.field = "prompt" if prompt_tokens >= limit else "max_tokens"


@dataclass(frozen=True, slots=True)
class Finished:
    request_id: str
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that were not computed, but held by a tier at admission, or received."""
    output_tokens: int
    host_tokens: int = 0
    """Cached tokens that were loaded from the host tier."""
    disk_tokens: int = 0
    finish_reason: str = "length"
    """Reason as in the OpenAI API: `length`, or `stop` after an end-of-sequence token."""


@dataclass(frozen=True, slots=True)
class EngineStep:
    """One step: how long it took, in engine seconds, what it did, and why it took that long.

    load_s: the part of `duration_s` spent loading from the host tier. attention_pairs: Σ chunk*(ctx
    + chunk/2), pairs of a prefill token and a token it attends to.
    emitted: requests that got one token each, the first tokens last; first_tokens: those of them
    that got their first one.
    begun: requests whose prompt it began to compute, and how many tokens of each were cached.
    preempted: requests that it put off, as others needed their blocks; the last one is the oldest.
    """

    duration_s: float
    load_s: float
    loaded_tokens: int
    prefill_tokens: int
    attention_pairs: float
    decode_seqs: int
    decode_context_tokens: int
    emitted: list[str]
    first_tokens: list[str]
    finished: list[Finished]
    begun: list[tuple[str, int]] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
