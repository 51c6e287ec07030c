"""Steps that decode, of usual sizes, as CUDA graphs: one launch takes the place of a thousand.

A graph repeats what was recorded, on the same memory. So a batch is written to where the graph
reads it, and padded to a size of which there is a graph: in sequences, by repeating the last one,
and in blocks of each. Each size is recorded when it first comes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from workers.engines.torch.attention import padded
from workers.engines.torch.llama import Llama

log = logging.getLogger(__name__)

MOST_SEQS, MOST_TOKENS = 64, 1 << 16
"""Sequences of a graph, and tokens of context, with padding. To read more takes a GPU longer than
to launch kernel after kernel, so that padding would cost more than it saves."""
FEWEST_BLOCKS = 8
"""Blocks between two sizes of a context at least."""

Decode = Callable[[Sequence[int], Sequence[int], Sequence[Sequence[int]]], Tensor]
"""Tokens, positions and block ids of sequences -> logits, which stay until the next call."""
Record = Callable[[Callable[[], object]], Callable[[], None]]
"""Work -> what repeats it on the same memory. Raises RuntimeError if it cannot."""


class GraphSize(NamedTuple):
    seqs: int
    blocks: int
    """Blocks of each sequence."""


def decoder(model: Llama, kv: Sequence[Tensor]) -> Decode:
    """Returns what decodes, with graphs where all KV is on one CUDA device. kv: by rank."""
    record = recorder({rank.device for rank in kv})
    return partial(model.decode, kv) if record is None else DecodeGraphs(model, kv, record).decode


def recorder(devices: set[torch.device]) -> Record | None:
    if len(devices) > 1 or any(device.type != "cuda" for device in devices):
        return None
    return _CudaGraphs(*devices).record


def size_of(positions: Sequence[int], block_size: int) -> GraphSize | None:
    """Returns the size of the graph for tokens at these positions, if there is one."""
    num_blocks = max(positions) // block_size + 1
    step = max(FEWEST_BLOCKS, 1 << (num_blocks - 1).bit_length() >> 3)  # a quarter more at most
    size = GraphSize(1 << (len(positions) - 1).bit_length(), -(-num_blocks // step) * step)
    fits = size.seqs <= MOST_SEQS and size.seqs * size.blocks * block_size <= MOST_TOKENS
    return size if fits else None


@dataclass(frozen=True, slots=True)
class _Graph:
    """batch: int64, (seqs, 2 + blocks): the token, its position and the blocks of each sequence."""

    batch: Tensor
    replay: Callable[[], None]


class DecodeGraphs:
    """Graphs of a model over KV on its device; call it on one thread."""

    def __init__(self, model: Llama, kv: Sequence[Tensor], record: Record) -> None:
        self._model = model
        self._kv = kv
        self._record = record
        self._block_size = kv[0].shape[3]
        self._graphs: dict[GraphSize, _Graph] = {}
        self._can_record = True
        size = MOST_SEQS, model.config.vocab_size
        self._logits = torch.empty(size, dtype=torch.float32, device=kv[0].device)
        """Logits of whichever graph ran last: each is read before the next one runs."""

    def decode(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        block_ids: Sequence[Sequence[int]],
    ) -> Tensor:
        size = size_of(positions, self._block_size)
        if size is None or not self._can_record:
            return self._model.decode(self._kv, tokens, positions, block_ids)
        rows = [
            [token, position, *padded(own[: position // self._block_size + 1], size.blocks)]
            for token, position, own in zip(tokens, positions, block_ids, strict=True)
        ]
        # The KV of the last sequence is written again, with the same values.
        batch = torch.tensor(rows + rows[-1:] * (size.seqs - len(rows)))
        if size in self._graphs:
            self._graphs[size].batch.copy_(batch)
        elif not self._recorded(size, batch):
            return self.decode(tokens, positions, block_ids)
        self._graphs[size].replay()
        return self._logits[: len(tokens)]

    def _recorded(self, size: GraphSize, batch: Tensor) -> bool:
        """Whether a graph could be recorded; if not, none is recorded or used from then on."""
        batch = batch.to(self._logits.device)
        tokens, positions, blocks = batch[:, 0], batch[:, 1], batch[:, 2:]

        def step() -> None:
            logits = self._model.decode_padded(self._kv, tokens, positions, [blocks])
            self._logits[: size.seqs].copy_(logits)

        try:
            self._graphs[size] = _Graph(batch, self._record(step))
        except RuntimeError as error:  # such as: no memory left
            log.warning("decoding without CUDA graphs: %s", str(error).partition("\n")[0])
            self._can_record = False
            self._graphs.clear()
        return self._can_record


class _CudaGraphs:
    """Graphs that share their memory, as one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._memory = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], object]) -> Callable[[], None]:
        work()  # loads kernels, which cannot be recorded
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.device(self._stream.device),
            torch.cuda.stream(self._stream),  # a recording that fails would not leave its stream
            # Other threads copy blocks, and wait for that: only what this one does counts.
            torch.cuda.graph(graph, self._memory, self._stream, "thread_local"),
        ):
            work()
        replay: Callable[[], None] = graph.replay
        return replay
