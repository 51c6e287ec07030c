"""Device and host memory for KV blocks.

A pool has one row per block, with all of its layers together, keys before values:
`(num_blocks, num_layers, 2, block_size, num_heads, head_size)`. So a block moves between tiers in
one piece. The disk tier is in `disk.py`; `copies.py` moves blocks between tiers.
"""

from __future__ import annotations

import logging
import math
import mmap
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from xxhash import xxh3_64_intdigest

from app.core.errors import ConfigError
from workers.kv.arrival import HAS_HAPPENED, CopyEvent

log = logging.getLogger(__name__)

WORD_BYTES = 8
"""Bytes of an int64, as which blocks are moved: torch moves narrower types several times slower."""
GROUP_BYTES = 64 << 10
"""Bytes of a block that are copied at once where it goes layer by layer: with less, each piece
costs more than its bytes."""

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class KVShape:
    """The part of each block that one rank of a model keeps.

    num_kv_heads: of the whole model; they are split evenly among the tp_size ranks, in order.
    block_size: tokens per block.
    """

    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    block_size: int
    tp_size: int = 1
    tp_rank: int = 0

    def __post_init__(self) -> None:
        """Raises ConfigError unless the ranks share the heads evenly."""
        if self.num_kv_heads % self.tp_size:
            raise ConfigError(
                f"tp_size: {self.tp_size} ranks cannot share {self.num_kv_heads} KV heads evenly"
            )

    @property
    def whole(self) -> KVShape:
        return replace(self, tp_size=1, tp_rank=0)

    def split(self, tp_size: int) -> list[KVShape]:
        """Returns the parts of so many ranks. Raises ConfigError: they cannot share the heads."""
        return [replace(self, tp_size=tp_size, tp_rank=rank) for rank in range(tp_size)]

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads // self.tp_size

    @property
    def layer_shape(self) -> tuple[int, int, int, int]:
        """Shape of one layer of a block: (2, block_size, num_heads, head_size)."""
        return 2, self.block_size, self.num_heads, self.head_size

    @property
    def layer_bytes(self) -> int:
        return 2 * self.block_size * self.num_heads * self.head_size * self.dtype.itemsize

    @property
    def layer_words(self) -> int:
        """Words that a layer of a block takes up in a pool: its bytes, rounded up to whole ones."""
        return -(-self.layer_bytes // WORD_BYTES)

    @property
    def block_bytes(self) -> int:
        return self.num_layers * self.layer_words * WORD_BYTES

    @property
    def layer_groups(self) -> list[slice]:
        """Layers that are copied together, first layers first: as few as have GROUP_BYTES."""
        step = -(-GROUP_BYTES // (self.layer_words * WORD_BYTES))
        return [
            slice(at, min(at + step, self.num_layers)) for at in range(0, self.num_layers, step)
        ]

    @property
    def fingerprint(self) -> int:
        """Returns a u64 that two shapes share only if their blocks are laid out alike."""
        return xxh3_64_intdigest(repr(self).encode())


class MemoryPool:
    """`num_blocks` blocks in the memory of a device, initially zero.

    words: int64, (num_blocks, num_layers, layer_words); this is what gets copied.
    kv: the same memory as numbers, (num_blocks, num_layers, *shape.layer_shape). Index it for
    elements, and use `kv.cpu()` and `kv.copy_()` for all of them at once.
    """

    def __init__(
        self,
        shape: KVShape,
        num_blocks: int,
        device: torch.device | str = "cpu",
        *,
        pinned: bool = False,
    ) -> None:
        """Raises ConfigError if there is not so much memory."""
        self.shape = shape
        self.num_blocks = num_blocks
        try:
            # Zeros, as attention multiplies what it masks: a NaN in an unfilled slot would survive.
            size = (num_blocks, shape.num_layers, shape.layer_words)
            if torch.device(device).type == "cpu" and not pinned:
                self.words = _pageable_zeros(math.prod(size)).view(size)
            else:
                self.words = torch.zeros(size, dtype=torch.int64, device=device, pin_memory=pinned)
        # OverflowError, TypeError: a number beyond 64 bits.
        except (OSError, OverflowError, RuntimeError, TypeError) as error:
            first_line = str(error).partition("\n")[0]
            raise ConfigError(
                f"num_blocks: {device} has no room for {num_blocks} blocks of {shape.block_bytes} "
                f"bytes: {first_line}"
            ) from error
        self.kv = as_numbers(self.words, shape)

    @property
    def device(self) -> torch.device:
        return self.words.device


def _pageable_zeros(num_words: int) -> Tensor:
    """Returns zeroed host memory, in huge pages where there are any: with small pages, finding 16
    KiB costs a fifth of what copying them does. Raises OSError, OverflowError."""
    memory = mmap.mmap(-1, num_words * WORD_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.int64)


def as_numbers(words: Tensor, shape: KVShape) -> Tensor:
    """Returns the memory as (num_blocks, num_layers, *shape.layer_shape), whatever the layers."""
    used = words.view(torch.uint8)[..., : shape.layer_bytes]
    return used.view(shape.dtype).view(*words.shape[:2], *shape.layer_shape)


def host_pool(shape: KVShape, num_blocks: int) -> MemoryPool:
    """Returns a pool in host memory, pinned if there is a CUDA device: only then do copies to the
    device overlap with compute, and run at the full rate."""
    return MemoryPool(shape, num_blocks, pinned=_pins_host_memory())


def checked_ids(block_ids: Iterable[int], num_blocks: int) -> Ids:
    """Returns an array. Raises ValueError unless these are distinct blocks of such a pool."""
    ids = np.fromiter(block_ids, np.int64)
    wrong = ids[(ids < 0) | (ids >= num_blocks)]
    if len(wrong):
        raise ValueError(f"block {wrong[0]} is not in a pool of {num_blocks} blocks")
    in_order = np.sort(ids)
    twice = in_order[1:][in_order[1:] == in_order[:-1]]
    if len(twice):
        raise ValueError(f"block {twice[0]} is named twice")
    return ids


def checked_map(
    source_ids: Sequence[int], num_sources: int, target_ids: Sequence[int], num_targets: int
) -> tuple[Ids, Ids]:
    """Returns arrays. Raises ValueError unless these pair distinct blocks of the pools."""
    if len(source_ids) != len(target_ids):
        raise ValueError(f"{len(source_ids)} blocks for {len(target_ids)} slots")
    return checked_ids(source_ids, num_sources), checked_ids(target_ids, num_targets)


@cache
def _pins_host_memory() -> bool:
    pins = torch.cuda.is_available()
    log.info("host memory for KV blocks is %s", "pinned" if pins else "pageable: no CUDA device")
    return pins


class CopyStream(Protocol):
    """A stream that runs in order what is submitted to it; events say when it has run.

    On a CUDA device, copies run while the device computes: nothing waits for a copy but whoever
    waits for its event. In host memory, all is done when `submit` returns.
    """

    def submit(self, work: Callable[[], None]) -> CopyEvent:
        """Runs `work`, or has it run after what was submitted before; returns the event of that.

        It does not wait for what is being computed: its memory must be out of use by then. Where
        this raises what `work` raises, nothing more of it runs.
        """


class HostStream:
    """A stream in host memory: work runs at once."""

    def submit(self, work: Callable[[], None]) -> CopyEvent:
        work()
        return HAS_HAPPENED


class CudaStream:
    """A stream of its own on a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def submit(self, work: Callable[[], None]) -> CopyEvent:
        stream = self._stream
        # The device first: leaving only the stream would make a thread set up its default device,
        # 0, which takes hundreds of megabytes there even if everything is on another device.
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            try:
                work()
            except BaseException:  # once this raises, others may get the memory
                stream.synchronize()
                raise
        return _CudaEvent(stream.record_event(), stream.device)


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def synchronize(self) -> None:
        self._event.synchronize()


def new_stream(*pools: MemoryPool) -> CopyStream:
    """Returns a stream on the CUDA device of one of the pools, or in host memory."""
    device = next((pool.device for pool in pools if pool.words.is_cuda), None)
    return HostStream() if device is None else CudaStream(device)
