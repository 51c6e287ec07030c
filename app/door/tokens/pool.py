"""The threads that render and tokenize, a few for all models."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from app.door.tokens.errors import Overloaded

T = TypeVar("T")


LARGE = 128 * 1024
"""Characters from which on a text waits for its turn with others like it."""


class TokenizerThreads:
    """num_threads: at work at once, besides one for large texts, lest these keep others waiting, or
    take memory all at once; the tokenizer itself runs without the interpreter's lock.

    max_waiting, max_size: how many calls, and how many characters of theirs, may be waiting or at
    work. Beyond, `run` refuses; a call of any size is accepted when there is no other.
    """

    def __init__(
        self, num_threads: int = 2, max_waiting: int = 256, max_size: int = 64 << 20
    ) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokens")
        self._for_large = ThreadPoolExecutor(1, thread_name_prefix="large texts")
        self._max_waiting = max_waiting
        self._max_size = max_size
        # Calls end in their threads.
        self._lock = threading.Lock()
        self._num_calls = 0
        self._size = 0

    async def run(self, size: int, call: Callable[..., T], *args: Any) -> T:
        """What `call(*args)` returns or raises; a call not begun is dropped with its caller.

        size: of its text, in characters. Raises Overloaded.
        """
        with self._lock:
            if self._num_calls and (
                self._num_calls >= self._max_waiting or self._size + size > self._max_size
            ):
                raise Overloaded(
                    f"{self._num_calls} prompts of {self._size} characters wait to be tokenized"
                )
            self._num_calls += 1
            self._size += size
        threads = self._for_large if size >= LARGE else self._threads
        future = threads.submit(call, *args)
        future.add_done_callback(lambda _: self._ended(size))
        return await asyncio.wrap_future(future)

    def _ended(self, size: int) -> None:
        with self._lock:
            self._num_calls -= 1
            self._size -= size

    def check(self) -> None:
        """Raises AssertionError if what is counted as waiting cannot be."""
        assert 0 <= self._num_calls <= self._max_waiting
        assert self._size >= 0
        assert self._num_calls or not self._size

    def close(self) -> None:
        """Drops what has not begun and waits for what has."""
        for threads in (self._threads, self._for_large):
            threads.shutdown(cancel_futures=True)
