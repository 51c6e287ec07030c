"""Ways to copy scattered KV blocks between pools in memory, and a trial of which is fastest.

The fastest depends on the machine and on the block size, so they are tried at start-up.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np
import torch
from torch import Tensor

from workers.kv.arrival import CopyEvent
from workers.kv.memory import WORD_BYTES, CopyStream, Ids, MemoryPool, checked_map, new_stream

try:
    from cuda.bindings import driver
except ImportError:  # it comes with torch builds that can use a CUDA device
    driver = None

log = logging.getLogger(__name__)

Copier = Callable[[Tensor, Tensor, Ids, Ids], None]
"""A function that copies rows of a tensor of words, or some layers of each row, to rows of another
tensor. On CUDA the copy has only been started when the function returns."""

STAGED_BYTES = 32 << 20
"""Bytes that are gathered at once on the way between scattered slots."""
LONG_BYTES = 1 << 20
"""Bytes from which on torch's threads outweigh the overhead of a torch operation. No Python thread
runs while bytes are copied without torch."""
PIECE_BYTES = 16 << 10, 128 << 10
"""Least and most bytes of the pieces in which torch gathers blocks, if such a size divides them:
256 KiB at once take a quarter longer."""
TRIAL_BYTES = 16 << 20
TRIAL_BLOCKS = 8, 1024
"""Least and most blocks of a trial, which otherwise copies TRIAL_BYTES."""
TRIAL_SPREAD = 4
"""Slots for each block of a trial, so that small blocks are in no cache. Large ones are not in any
case, and would take memory that there may not be."""
TRIAL_ROUNDS = 7


def copy_runs(source: Tensor, target: Tensor, source_ids: Ids, target_ids: Ids) -> None:
    """Copies each run of blocks that are consecutive on both sides."""
    upwards = _upwards(source_ids, target_ids)
    runs = _runs(*upwards)
    if (source.is_cuda or target.is_cuda) and not source.is_contiguous():
        # Some layers only: torch copies memory with gaps through pageable memory, and waits for it.
        runs = *upwards, np.ones_like(source_ids)
    for s, t, n in zip(*(ids.tolist() for ids in runs), strict=True):
        target[t : t + n].copy_(source[s : s + n], non_blocking=True)


def copy_bytes(source: Tensor, target: Tensor, source_ids: Ids, target_ids: Ids) -> None:
    """Copies each run in host memory, without the overhead of a torch operation for short ones."""
    into, taken = _flat(target), _flat(source)
    pieces = _pieces(source, target, *_upwards(source_ids, target_ids))
    into_bytes, taken_bytes = (words.numpy().data.cast("B") for words in (into, taken))
    for t, s, n in zip(*(numbers.tolist() for numbers in pieces), strict=True):
        if n < LONG_BYTES:
            into_bytes[t : t + n] = taken_bytes[s : s + n]
        else:
            to, at, size = t // WORD_BYTES, s // WORD_BYTES, n // WORD_BYTES
            into[to : to + size].copy_(taken[at : at + size])


def copy_batched(source: Tensor, target: Tensor, source_ids: Ids, target_ids: Ids) -> None:
    """Hands all runs between host and device to the driver at once, on a stream other than the
    default one.

    Raises RuntimeError if the driver cannot do that (before CUDA 12.8) or fails.
    """
    if not hasattr(driver, "cuMemcpyBatchAsync"):
        raise RuntimeError("cuda.bindings is not installed, or older than 12.8")
    into, taken, sizes = _pieces(source, target, source_ids, target_ids)
    addresses = (target.data_ptr() + into).tolist(), (source.data_ptr() + taken).tolist()
    attributes = driver.CUmemcpyAttributes()
    attributes.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    device = target.device if target.is_cuda else source.device
    error, *_ = driver.cuMemcpyBatchAsync(
        *(list(map(driver.CUdeviceptr, those)) for those in addresses),
        sizes.tolist(),
        len(sizes),
        [attributes],
        [0],
        1,
        driver.CUstream(torch.cuda.current_stream(device).cuda_stream),
    )
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{len(sizes)} copies: {error.name}")


def copy_selected(source: Tensor, target: Tensor, source_ids: Ids, target_ids: Ids) -> None:
    """Gathers blocks of host memory straight into consecutive slots."""
    slots = _slots(target, target_ids)
    assert slots is not None, "the slots are scattered"
    least, most = (num_bytes // WORD_BYTES for num_bytes in PIECE_BYTES)
    row = source[0].numel()
    piece = math.gcd(row, most)
    if source.is_contiguous() and piece >= least:
        source, slots = source.view(-1, piece), slots.view(-1, piece)
        source_ids = (source_ids[:, None] * (row // piece) + np.arange(row // piece)).ravel()
    torch.index_select(source, 0, torch.from_numpy(source_ids), out=slots)


def copy_gathered(source: Tensor, target: Tensor, source_ids: Ids, target_ids: Ids) -> None:
    """Gathers blocks at the source, unless they lie together there, moves them between host and
    device in one piece, and scatters them into their slots."""
    step = max(1, STAGED_BYTES // (source[0].numel() * WORD_BYTES))
    to_device = source.is_cpu and target.is_cuda
    for at in range(0, len(source_ids), step):
        taken, given = source_ids[at : at + step], target_ids[at : at + step]
        staged = _slots(source, taken)
        if staged is None or not staged.is_contiguous() or (to_device and not staged.is_pinned()):
            shape = len(taken), *source.shape[1:]
            staged = source.new_empty(shape, pin_memory=to_device)
            chosen = torch.from_numpy(taken).to(source.device)
            torch.index_select(source, 0, chosen, out=staged)
        slots = _slots(target, given)
        if slots is not None and (slots.is_cuda or slots.is_contiguous()):
            slots.copy_(staged, non_blocking=True)
            continue
        # The host itself scatters what arrives in host memory, so the copy must be complete.
        moved = staged.to(target.device, non_blocking=to_device)
        if target.is_cpu:
            target.numpy()[given] = moved.numpy()
        else:
            target.index_copy_(0, torch.from_numpy(given).to(target.device), moved)


COPIERS: dict[str, Copier] = {
    "bytes": copy_bytes,
    "runs": copy_runs,
    "selected": copy_selected,
    "batched": copy_batched,
    "gathered": copy_gathered,
}
IN_HOST_MEMORY = "bytes", "selected", "runs"
WITH_DEVICE = "runs", "batched", "gathered"
"""The copiers that are tried; those that need fewer threads and less memory come first."""
CLEARLY_FASTER = 1.1
"""Factor by which a later copier must be faster to be taken, as trials are noisy."""


@dataclass(frozen=True, slots=True)
class Rates:
    """GB/s by copier name: into consecutive slots, and into scattered ones."""

    packed: dict[str, float]
    scattered: dict[str, float]


class PoolCopier:
    """A copier of blocks from one pool in memory to another, in the way that a trial found fastest.

    num_layers: of a block, as many as are copied together. stream: its own.
    """

    def __init__(
        self, source: MemoryPool, target: MemoryPool, num_layers: int | None = None
    ) -> None:
        self.source = source
        self.target = target
        self.stream = new_stream(source, target)
        self.rates = _try_copiers(source, target, self.stream, slice(num_layers))
        self._packed, self._scattered = (
            next(n for n, rate in rates.items() if rate * CLEARLY_FASTER >= max(rates.values()))
            for rates in (self.rates.packed, self.rates.scattered)
        )
        log.info(
            "copies from %s to %s, %sblocks of %d bytes: %s (%.1f GB/s) into "
            "contiguous slots, %s (%.1f GB/s) into scattered ones",
            _place(source),
            _place(target),
            "" if num_layers is None else f"{num_layers} layers of ",
            source.shape.block_bytes,
            self._packed,
            self.rates.packed[self._packed],
            self._scattered,
            self.rates.scattered[self._scattered],
        )

    def begin(self, source_ids: Ids, target_ids: Ids, layers: slice = slice(None)) -> CopyEvent:
        """Copies these layers of blocks, or on a CUDA device starts to; returns the event of that.

        The copy does not wait for what is computed, nor does it hold that up: the slots must be out
        of use. Where this raises, nothing more is copied.
        """
        name = self._packed if _are_consecutive(target_ids) else self._scattered
        words = self.source.words[:, layers], self.target.words[:, layers]
        return self.stream.submit(lambda: COPIERS[name](*words, source_ids, target_ids))

    def copy(self, source_ids: Sequence[int], target_ids: Sequence[int]) -> None:
        """Copies whole blocks, and returns when that is done. Raises ValueError for wrong slots."""
        checked = checked_map(
            source_ids, self.source.num_blocks, target_ids, self.target.num_blocks
        )
        if len(source_ids):
            self.begin(*checked).synchronize()


def _try_copiers(
    source: MemoryPool, target: MemoryPool, stream: CopyStream, layers: slice
) -> Rates:
    """Times each copier in turn, between pools like these."""
    shape = source.shape
    fewest, most = TRIAL_BLOCKS
    count = min(most, max(fewest, TRIAL_BYTES // shape.block_bytes))
    num_slots = max(2 * count, TRIAL_SPREAD * min(count, TRIAL_BYTES // shape.block_bytes))
    froms, intos = (
        MemoryPool(shape, num_slots, pool.device, pinned=pool.words.is_pinned())
        for pool in (source, target)
    )
    for pool in (froms, intos):
        pool.words.fill_(1)  # memory that was never written to is not allocated yet
    _synchronize(froms, intos)
    words = froms.words[:, layers], intos.words[:, layers]
    names: tuple[str, ...] = IN_HOST_MEMORY
    if words[0].is_cuda or words[1].is_cuda:
        names = copiers_with_device(*words, stream)
    num_bytes = count * words[0][0].numel() * WORD_BYTES
    rng = np.random.default_rng(0)
    rates = []
    for packed in (True, False):
        seconds: dict[str, list[float]] = {n: [] for n in names if packed or n != "selected"}
        for nth in range(1 + TRIAL_ROUNDS):
            for name in seconds:
                source_ids, scattered = (rng.permutation(num_slots)[:count] for _ in range(2))
                first = rng.integers(num_slots - count)
                target_ids = np.arange(first, first + count) if packed else scattered
                start = time.perf_counter()
                copy = partial(COPIERS[name], *words, source_ids, target_ids)
                stream.submit(copy).synchronize()
                if nth:  # the first round has to wake threads and allocate buffers
                    seconds[name].append(time.perf_counter() - start)
        rates.append({name: num_bytes / median(took) / 1e9 for name, took in seconds.items()})
    return Rates(*rates)


def copiers_with_device(source: Tensor, target: Tensor, stream: CopyStream) -> tuple[str, ...]:
    """Returns the copiers of WITH_DEVICE that work on this machine."""
    first = np.zeros(1, dtype=np.int64)
    try:
        stream.submit(lambda: copy_batched(source, target, first, first)).synchronize()
    except RuntimeError as error:
        log.info("not giving copies to the driver in batches: %s", error)
        return tuple(name for name in WITH_DEVICE if name != "batched")
    return WITH_DEVICE


def _flat(words: Tensor) -> Tensor:
    """Returns the memory from the first word to the last, including what lies between rows."""
    return words.as_strided(((len(words) - 1) * words.stride(0) + words[0].numel(),), (1,))


def _slots(target: Tensor, ids: Ids) -> Tensor | None:
    """Returns a view of those rows if they are consecutive."""
    return target[ids[0] : ids[0] + len(ids)] if _are_consecutive(ids) else None


def _upwards(source_ids: Ids, target_ids: Ids) -> tuple[Ids, Ids]:
    """Returns both in ascending order of the source, in which memory is read fastest: small blocks
    are copied a seventh faster, large ones a tenth."""
    order = np.argsort(source_ids)
    return source_ids[order], target_ids[order]


def _are_consecutive(ids: Ids) -> bool:
    return bool((np.diff(ids) == 1).all())


def _pieces(
    source: Tensor, target: Tensor, source_ids: Ids, target_ids: Ids
) -> tuple[Ids, Ids, Ids]:
    """Returns target offset, source offset and bytes of each piece that can be copied as one."""
    size = source[0].numel() * WORD_BYTES
    source_row, target_row = (tensor.stride(0) * WORD_BYTES for tensor in (source, target))
    if size == source_row == target_row:
        source_ids, target_ids, lengths = _runs(source_ids, target_ids)
    else:
        lengths = np.ones_like(source_ids)
    return target_ids * target_row, source_ids * source_row, lengths * size


def _runs(source_ids: Ids, target_ids: Ids) -> tuple[Ids, Ids, Ids]:
    """Returns first source, first target and length of each run that is consecutive in both."""
    breaks = np.flatnonzero((np.diff(source_ids) != 1) | (np.diff(target_ids) != 1)) + 1
    starts = np.concatenate(([0], breaks))
    lengths = np.diff(np.concatenate((starts, [len(source_ids)])))
    return source_ids[starts], target_ids[starts], lengths


def _synchronize(*pools: MemoryPool) -> None:
    """Waits for what was done to the pools on the stream that computes."""
    for pool in pools:
        if pool.words.is_cuda:
            torch.cuda.current_stream(pool.device).synchronize()


def _place(pool: MemoryPool) -> str:
    if pool.words.is_cuda:
        return str(pool.device)
    return "pinned memory" if pool.words.is_pinned() else "pageable memory"
