"""A request of the torch engine: its tokens, its blocks, and how far it has got."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import numpy as np

from app.core.errors import InvalidRequest
from app.core.types import Tier
from app.simulation.steps import EngineStep, Finished, PromptTooLargeError
from workers.engines.base import CompletionRequest, Generation
from workers.engines.torch.llama_config import LlamaConfig
from workers.engines.torch.sampling import TokenSampler
from workers.kv.arrival import Arrival
from workers.kv.identity import BlockIdentity, identities_of
from workers.kv.tables import BlockTable


@dataclass(eq=False, slots=True)
class TokenSequence:
    """A request, from its arrival on. tokens: its prompt, then what was generated."""

    request: CompletionRequest
    tokens: list[int]
    num_prompt: int
    block_size: int
    blocks: list[BlockIdentity]
    """Full blocks of the prompt."""
    num_blocks: int
    """Device slots for the prompt and everything that may be generated."""
    sampler: TokenSampler
    generation: Generation = field(init=False)
    prefetched: bool = False
    admitting: asyncio.Task[BlockTable] | None = None
    table: BlockTable | None = None
    block_ids: list[int] = field(default_factory=list)
    prefilled: int = 0
    cached: tuple[Tier, ...] = ()
    """Tiers where the leading blocks were that the request did not compute."""
    arrival: Arrival | None = None
    """Arrival of blocks that are fetched from another worker."""
    num_fetched: int = 0
    """Blocks that came from another worker."""
    cancelled: bool = False

    @classmethod
    def of(
        cls, request: CompletionRequest, config: LlamaConfig, *, block_size: int, num_slots: int
    ) -> Self:
        """Returns a new request. num_slots: of the device.

        Raises InvalidRequest for tokens that are not in the vocabulary, and PromptTooLargeError.
        """
        ids = np.frombuffer(request.prompt, "<u4")
        if ids.max() >= config.vocab_size:
            raise InvalidRequest(
                "prompt", f"{ids.max()} is not a token id of a vocabulary of {config.vocab_size}"
            )
        num_tokens = len(ids) + request.max_tokens
        if num_tokens > config.max_position_embeddings:
            raise PromptTooLargeError(
                len(ids), request.max_tokens, "the model takes", config.max_position_embeddings
            )
        num_blocks = -(-num_tokens // block_size)
        if num_blocks > num_slots:
            raise PromptTooLargeError(
                len(ids), request.max_tokens, "the KV pool holds", num_slots * block_size
            )
        return cls(
            request,
            ids.tolist(),
            len(ids),
            block_size,
            identities_of(request.prompt, block_size, request.salt),
            num_blocks,
            TokenSampler(request.sampling),
        )

    def output(self, start: int, stop: int) -> list[int]:
        """Returns generated tokens from one index to another."""
        return self.tokens[self.num_prompt + start : self.num_prompt + stop]

    @property
    def fetched(self) -> Sequence[BlockIdentity]:
        """Blocks that are on their way to the request."""
        start = self.prefilled // self.block_size
        return self.blocks[start : start + self.arrival.num_blocks] if self.arrival else ()

    @property
    def arriving(self) -> list[Arrival]:
        """Arrivals of what comes from elsewhere, until the last has ended."""
        assert self.table is not None
        those = [load.arrival for load in self.table.loads]
        if self.arrival is not None:
            those.append(self.arrival)
        return [] if all(arrival.ended for arrival in those) else those

    @property
    def num_cached(self) -> int:
        return len(self.cached) + self.num_fetched

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    def reusable(self, chunk_tokens: int) -> Sequence[BlockIdentity]:
        """Returns the blocks of the prompt's whole chunks; its last token is always computed."""
        chunks = (self.num_prompt - 1) // chunk_tokens
        return self.blocks[: chunks * chunk_tokens // self.block_size]

    def finished(self, eos_token_ids: Collection[int]) -> Finished | None:
        """Returns how the request ended; None while more tokens are to come."""
        eos = not self.request.ignore_eos and self.tokens[-1] in eos_token_ids
        if not eos and self.num_generated < self.request.max_tokens:
            return None
        return Finished(
            self.request.request_id,
            self.num_prompt,
            self.num_cached * self.block_size,
            self.num_generated,
            host_tokens=self.cached.count(Tier.HOST) * self.block_size,
            disk_tokens=self.cached.count(Tier.DISK) * self.block_size,
            finish_reason="stop" if eos else "length",
        )


class Chunk(NamedTuple):
    """The prompt tokens of a step, from `start` to `stop`.

    arriving: blocks before it, which are used as they come.
    """

    sequence: TokenSequence
    start: int
    stop: int
    arriving: Sequence[Arrival] = ()

    @property
    def is_last(self) -> bool:
        return self.stop == self.sequence.num_prompt


def step_of(
    chunk: Chunk | None,
    decoding: Sequence[TokenSequence],
    duration_s: float,
    finished: list[Finished],
) -> EngineStep:
    """Returns what a step did, from which the times of steps are learnt."""
    num_prefilled = chunk.stop - chunk.start if chunk else 0
    first_tokens = [chunk.sequence.request.request_id] if chunk and chunk.is_last else []
    return EngineStep(
        duration_s=duration_s,
        load_s=0.0,
        loaded_tokens=0,
        prefill_tokens=num_prefilled,
        attention_pairs=num_prefilled * (chunk.start + num_prefilled / 2) if chunk else 0.0,
        decode_seqs=len(decoding),
        decode_context_tokens=sum(len(sequence.tokens) for sequence in decoding),
        emitted=[sequence.request.request_id for sequence in decoding] + first_tokens,
        first_tokens=first_tokens,
        finished=finished,
    )
