"""A stream that orders as CUDA does, and no more than that, in host memory."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable

from workers.kv.arrival import CopyEvent
from workers.kv.memory import MemoryPool

LATE_S = 0.003
"""Each piece of work begins up to so much later than it could."""


class LateStream:
    """Work runs in order, on a thread of its own: late, and in no order to other streams' work.

    A thread that computes does so at once, so it waits where it would have the device wait.
    """

    def __init__(self, *_: MemoryPool, seed: int = 0, late_s: float = LATE_S) -> None:
        self.num_late = 0
        """Pieces of work that had not run when `submit` returned."""
        self._late_s = late_s
        self._rng = random.Random(seed)
        self._work: queue.Queue[tuple[Callable[[], None], LateEvent]] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, work: Callable[[], None]) -> CopyEvent:
        event = LateEvent()
        self._work.put((work, event))
        self.num_late += not event.happened.is_set()
        return event

    def _run(self) -> None:
        while True:
            work, event = self._work.get()
            time.sleep(self._rng.random() * self._late_s)
            try:
                work()
            except BaseException as error:
                event.error = error
            event.happened.set()


class LateEvent:
    def __init__(self) -> None:
        self.happened = threading.Event()
        self.error: BaseException | None = None

    def wait(self) -> None:
        self.synchronize()

    def synchronize(self) -> None:
        assert self.happened.wait(30), "a stream stands still"
        if self.error is not None:
            raise RuntimeError(str(self.error)) from self.error
