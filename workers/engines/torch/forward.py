"""Forward passes of the torch engine, on the thread of its model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from app.core.errors import BlockLost
from workers.engines.torch.llama import Llama
from workers.engines.torch.sampling import sample
from workers.engines.torch.sequence import Chunk, TokenSequence
from workers.kv.memory import MemoryPool


class ForwardPasses:
    """Forward passes of a model over KV pools on the device, by rank."""

    def __init__(self, model: Llama, pools: Sequence[MemoryPool]) -> None:
        self._model = model
        self._kv = [pool.kv for pool in pools]
        self._waited_s = 0.0
        self._gpus = {pool.device for pool in pools if pool.words.is_cuda}
        # Always the same thread, so that torch keeps one pool of threads for it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="torch-engine")

    def close(self) -> None:
        """Returns once nothing is computed any more."""
        self._thread.shutdown()

    async def run(
        self, chunk: Chunk | None, decoding: Sequence[TokenSequence]
    ) -> tuple[list[int], Chunk | None, float]:
        """Computes in the thread, which goes on if this is cancelled."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self.compute, chunk, decoding)

    def compute(
        self, chunk: Chunk | None, decoding: Sequence[TokenSequence]
    ) -> tuple[list[int], Chunk | None, float]:
        """Returns the next token of each decoding request, then that after the prompt; the chunk,
        unless blocks before it do not arrive; seconds of waiting for these."""
        tokens = []
        computed, self._waited_s = chunk, 0.0
        if decoding:
            logits = self._model.decode(
                self._kv,
                [sequence.tokens[-1] for sequence in decoding],
                [len(sequence.tokens) - 1 for sequence in decoding],
                [sequence.block_ids for sequence in decoding],
            )
            tokens = sample(logits, [sequence.sampler for sequence in decoding])
        if chunk is not None:
            try:
                tokens += self._prefill(chunk)
            except BlockLost:
                computed, fetched = None, chunk.sequence.arrival
                if fetched is not None and fetched.num_good == fetched.num_blocks:
                    fetched.limit(0)  # it stalls, or blocks before it were lost
        for gpu in self._gpus:
            # Later work may read what was written, and the caller measures how long the step took.
            torch.cuda.current_stream(gpu).synchronize()
        return tokens, computed, self._waited_s

    def _prefill(self, chunk: Chunk) -> list[int]:
        """Returns the token after the prompt, if the chunk is its last. Raises BlockLost."""
        sequence = chunk.sequence

        def wait(layer: int) -> None:
            began_s = time.perf_counter()
            for arrival in chunk.arriving:
                arrival.wait_layer(layer)
            self._waited_s += time.perf_counter() - began_s

        logits = self._model.prefill(
            self._kv,
            sequence.tokens[chunk.start : chunk.stop],
            chunk.start,
            sequence.block_ids,
            *((wait,) if chunk.arriving else ()),
        )
        return sample(logits[None], [sequence.sampler]) if chunk.is_last else []
