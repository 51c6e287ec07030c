"""For engines you write, as none here calls it: copies layer by layer, as others are computed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from workers.kv.copiers import PoolCopier, on_stream
from workers.kv.memory import WORD_BYTES, MemoryPool, checked_map

GROUP_BYTES = 64 << 10
"""A copy stream moves this much of a block at once, or all of it: smaller copies cost more."""


class CopyStream(ABC):
    """Copies blocks layer by layer while the caller does something else.

    Call `prepare`, then `trigger_layer`, `trigger_group` or `trigger_all` in any order, then
    `wait_layer` before a layer is used, and `wait` at the end; then trigger again, or prepare other
    blocks. Layers are copied in groups of at least 64 KiB per block: a layer is triggered and
    waited for together with its group.
    """

    def __init__(self, source: MemoryPool, target: MemoryPool) -> None:
        layer_bytes = source.shape.layer_words * WORD_BYTES
        self.layers_per_group = min(source.shape.num_layers, -(-GROUP_BYTES // layer_bytes))
        self.num_groups = -(-source.shape.num_layers // self.layers_per_group)
        self._copier = PoolCopier(source, target, self.layers_per_group)
        self._source_ids = self._target_ids = np.empty(0, np.int64)
        self._triggered = [False] * self.num_groups

    def prepare(self, source_ids: Sequence[int], target_ids: Sequence[int]) -> None:
        """Set which blocks go where. Raises ValueError, also if the last ones were not awaited."""
        if any(self._triggered):
            raise ValueError("the blocks prepared before were triggered but not waited for")
        source, target = self._copier.source, self._copier.target
        self._source_ids, self._target_ids = checked_map(
            source_ids, source.num_blocks, target_ids, target.num_blocks
        )

    def group_of(self, layer: int) -> int:
        """The group of a layer. Raises ValueError if there is no such layer."""
        if not 0 <= layer < self._copier.source.shape.num_layers:
            raise ValueError(f"layer {layer} of {self._copier.source.shape.num_layers}")
        return layer // self.layers_per_group

    def trigger_layer(self, layer: int) -> None:
        self.trigger_group(self.group_of(layer))

    def trigger_group(self, group: int) -> None:
        """Start copying a group, unless it is already triggered. Raises ValueError."""
        if not 0 <= group < self.num_groups:
            raise ValueError(f"group {group} of {self.num_groups}")
        if not self._triggered[group]:
            first = group * self.layers_per_group
            self._trigger(group, slice(first, first + self.layers_per_group))
            self._triggered[group] = True

    def trigger_all(self) -> None:
        for group in range(self.num_groups):
            self.trigger_group(group)

    def wait_layer(self, layer: int) -> None:
        """Wait until that layer is copied; on CUDA, make later work on the current stream wait for
        it.

        Raises ValueError for a layer that was not triggered, and whatever made its copy fail.
        """
        group = self.group_of(layer)
        if not self._triggered[group]:
            raise ValueError(f"layer {layer} was not triggered")
        self._wait(group)

    def wait(self) -> None:
        """Wait until all that was triggered is copied. Raises whatever made a copy fail."""
        triggered = [group for group, begun in enumerate(self._triggered) if begun]
        self._triggered = [False] * self.num_groups
        self._finish(triggered)

    def close(self) -> None:
        """Wait for any copies under way, and shut down."""
        self.wait()

    @abstractmethod
    def _trigger(self, group: int, layers: slice) -> None: ...

    @abstractmethod
    def _wait(self, group: int) -> None: ...

    @abstractmethod
    def _finish(self, groups: Sequence[int]) -> None: ...


class ThreadCopyStream(CopyStream):
    """Copies on a thread of its own: between host memory where there is no CUDA device."""

    def __init__(self, source: MemoryPool, target: MemoryPool) -> None:
        super().__init__(source, target)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="copy-stream")
        self._copies: dict[int, Future[None]] = {}

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._thread.shutdown()

    def _trigger(self, group: int, layers: slice) -> None:
        self._copies[group] = self._thread.submit(
            self._copier.begin, self._source_ids, self._target_ids, layers
        )

    def _wait(self, group: int) -> None:
        self._copies[group].result()

    def _finish(self, groups: Sequence[int]) -> None:
        errors = [self._copies.pop(group).exception() for group in groups]
        for error in errors:
            if error is not None:
                raise error


class CudaCopyStream(CopyStream):
    """Copies on a CUDA stream of its own, with an event for each group of layers."""

    def __init__(self, source: MemoryPool, target: MemoryPool) -> None:
        super().__init__(source, target)
        self._device = target.device if target.device.type == "cuda" else source.device
        self._events: list[torch.cuda.Event] = [
            torch.cuda.Event()  # type: ignore[no-untyped-call]
            for _ in range(self.num_groups)
        ]

    def _trigger(self, group: int, layers: slice) -> None:
        # What the caller has begun to write to the source, or read from the target, comes first.
        with on_stream(self._copier.stream):
            self._copier.begin(self._source_ids, self._target_ids, layers)
            self._events[group].record()

    def _wait(self, group: int) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._events[group])

    def _finish(self, groups: Sequence[int]) -> None:
        for group in groups:
            self._events[group].synchronize()


def copy_stream(source: MemoryPool, target: MemoryPool) -> CopyStream:
    """A CUDA copy stream if either pool is on a CUDA device, otherwise a thread."""
    on_cuda = "cuda" in (source.device.type, target.device.type)
    return CudaCopyStream(source, target) if on_cuda else ThreadCopyStream(source, target)
