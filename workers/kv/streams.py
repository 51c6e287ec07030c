"""Streams: what is submitted to one runs in order, and events say when it has run.

On a CUDA device, copies run while the device computes: nothing waits for a copy but whoever waits
for its event. In host memory, all is done when `submit` returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from workers.kv.arrival import HAS_HAPPENED, Event
from workers.kv.memory import MemoryPool


class Stream(Protocol):
    def submit(self, work: Callable[[], None]) -> Event:
        """Run `work`, or have it run after what was submitted before.

        It does not wait for what is being computed: its memory must be out of use by then. Where
        this raises what `work` raises, nothing more of it runs.
        """


class HostStream:
    """Work runs at once."""

    def submit(self, work: Callable[[], None]) -> Event:
        work()
        return HAS_HAPPENED


class CudaStream:
    """A stream of its own on a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def submit(self, work: Callable[[], None]) -> Event:
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


def new_stream(*pools: MemoryPool) -> Stream:
    """On the CUDA device of one of the pools, if one is on any."""
    device = next((pool.device for pool in pools if pool.words.is_cuda), None)
    return HostStream() if device is None else CudaStream(device)
