"""Threads that share the parts of a batch, so that some are hashed while others are copied."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from itertools import chain
from typing import TypeVar

P = TypeVar("P")
T = TypeVar("T")

THREADS = min(4, os.cpu_count() or 1)


class DiskThreads:
    """Whoever calls `share` works along."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="disk-tier")

    def close(self) -> None:
        self._threads.shutdown()

    def share(self, act: Callable[[P], list[T]], parts: Sequence[P]) -> list[T]:
        """The results of `act` for all parts, in order."""
        untaken = iter(enumerate(parts))
        results: dict[int, list[T]] = {}

        def take_parts() -> None:
            for n, part in untaken:
                results[n] = act(part)

        begun = []
        try:
            with suppress(RuntimeError):  # no thread can be started: those there are do more
                for _ in parts[1:THREADS]:
                    begun.append(self._threads.submit(take_parts))
            take_parts()
        finally:
            # Even if it failed: once this ends, slots and memory may go to other blocks. A task for
            # which no thread could be started runs all the same, after others: it finds nothing.
            deque(untaken, maxlen=0)
            # Those that have not begun wait behind other copies.
            running = [other for other in begun if not other.cancel()]
            wait(running)
        for other in running:
            other.result()
        return list(chain.from_iterable(results[n] for n in range(len(parts))))
