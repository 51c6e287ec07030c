"""Blocks on their way to the device, which are used layer by layer as they come.

Blocks from host memory, from disk and from another worker arrive in one way: whoever brings them
says how many layers are there, and the forward pass waits for each layer in turn.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable
from typing import Protocol

from app.core.errors import BlockLost

STALL_S = 2.0
"""Seconds for which a forward pass waits for a layer at most."""


class CopyEvent(Protocol):
    """An event that happens once all that was submitted to a stream before has run."""

    def wait(self) -> None:
        """Has what this thread computes from now on, on the device, wait for the event."""

    def synchronize(self) -> None:
        """Returns once the event has happened."""


class _Past:
    def wait(self) -> None: ...

    def synchronize(self) -> None: ...


HAS_HAPPENED: CopyEvent = _Past()


class Arrival:
    """Blocks that arrive in slots of this worker, all of a layer before the next layer.

    num_good: leading blocks whose layers were right so far. share: part of their layers that is
    there; 0 to 1. seconds: from the beginning to the last layers that came. on_change: called after
    each change, by the thread that makes it. Calls may come from any thread.
    """

    def __init__(self, num_blocks: int, on_change: Callable[[], object] = lambda: None) -> None:
        self.num_blocks = self.num_good = num_blocks
        self.share = 0.0
        self.ended = False
        """True once nothing more is written to the slots."""
        self.seconds = 0.0
        self.on_change = on_change
        self._layers: list[int] = []
        """Number of layers that were there after each call of `arrive`."""
        self._events: list[CopyEvent] = []
        self._changed = threading.Condition()
        self._began_s = time.monotonic()

    @property
    def remaining_s(self) -> float:
        """Seconds until the rest is there, at the pace so far; infinite if unknown or blocks were
        lost."""
        if not self.share or self.num_good < self.num_blocks:
            return float("inf")
        return (1 / self.share - 1) * (time.monotonic() - self._began_s)

    def wait_layer(self, layer: int) -> None:
        """Returns once what is computed from now on, on the device, has all blocks' layer.

        Raises BlockLost if the layer does not come: what was computed from the blocks must be
        computed again, once this has ended.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.ended or self._has(layer), STALL_S)
            if not self._has(layer) or self.num_good < self.num_blocks:
                raise BlockLost(f"{self.num_good} of {self.num_blocks} blocks came whole")
            event = self._events[bisect_right(self._layers, layer)]
        event.wait()

    def limit(self, num_good: int) -> None:
        """Says that at most so many leading blocks are of use; with 0, no more need come."""
        with self._changed:
            self.num_good = min(self.num_good, num_good)

    def arrive(self, num_layers: int, of: int, event: CopyEvent = HAS_HAPPENED) -> None:
        """Says that the first `num_layers` of `of` are in the slots once `event` has happened."""
        with self._changed:
            self._layers.append(num_layers)
            self._events.append(event)
            self.share = num_layers / of
            self.seconds = time.monotonic() - self._began_s
            self._changed.notify_all()
        self.on_change()

    def end(self) -> None:
        """Says that nothing more comes."""
        with self._changed:
            if self.share < 1:
                self.num_good = 0
            self.ended = True
            self._changed.notify_all()
        self.on_change()

    def _has(self, layer: int) -> bool:
        return bool(self._layers) and self._layers[-1] > layer
