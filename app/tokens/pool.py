"""Threads that render and tokenize, a few for all models."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from app.core.places import Places
from app.tokens.errors import Overloaded

T = TypeVar("T")


LARGE = 128 * 1024


@dataclass(slots=True, eq=False)
class _Call:
    holder: str
    size: int
    run: Callable[[], Any]
    result: Future[Any] = field(default_factory=Future)


class TokenizerThreads:
    """Threads for all callers.

    num_threads: at work at once, besides one for large texts, lest these keep others waiting, or
    take memory all at once; the tokenizer itself runs without the interpreter's lock. max_waiting,
    max_size: calls, and their characters, that may be waiting or at work, of large texts and of
    others. Beyond, the latest call of the holder with most is refused; a call of any size is
    accepted when there is no other. Holders are served in turn.
    """

    def __init__(
        self, num_threads: int = 2, max_waiting: int = 256, max_size: int = 64 << 20
    ) -> None:
        self._small = _Threads("tokens", num_threads, max_waiting, max_size)
        self._large = _Threads("large texts", 1, max_waiting, max_size)

    async def run(self, size: int, call: Callable[..., T], *args: Any, holder: str = "") -> T:
        """Returns or raises what `call(*args)` does, in a thread; a call not begun is dropped with
        its caller. size: of its text, in characters. Raises Overloaded."""
        threads = self._large if size >= LARGE else self._small
        made = _Call(holder, size, partial(call, *args))
        threads.enter(made)
        return await asyncio.wrap_future(made.result)

    def check(self) -> None:
        self._small.check()
        self._large.check()

    def close(self) -> None:
        """Drops what has not begun and waits for what has."""
        self._small.close()
        self._large.close()


class _Threads:
    def __init__(self, name: str, num_threads: int, max_waiting: int, max_size: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        # Calls end in their threads.
        self._lock = threading.Lock()
        self._places: Places[_Call] = Places(num_threads, max_waiting, max_size)

    def enter(self, call: _Call) -> None:
        with self._lock:
            gone = self._places.enter(call.holder, call, call.size)
            num, size = self._places.num_calls, self._places.size
            self._begin()
        for each in gone:
            if each.result.set_running_or_notify_cancel():
                each.result.set_exception(
                    Overloaded(f"{num} prompts of {size:.0f} characters wait to be tokenized")
                )
        call.result.add_done_callback(lambda _: self._drop(call))

    def _begin(self) -> None:
        while (call := self._places.next()) is not None:
            self._threads.submit(self._make, call)

    def _make(self, call: _Call) -> None:
        made: Any = None
        failure: BaseException | None = None
        is_wanted = call.result.set_running_or_notify_cancel()
        if is_wanted:
            try:
                made = call.run()
            except BaseException as error:
                failure = error
        # First, so that there is a place for what its caller asks next.
        try:
            with self._lock:
                self._places.leave(call.holder, call.size)
                self._begin()
        finally:
            if failure is not None:
                call.result.set_exception(failure)
            elif is_wanted:
                call.result.set_result(made)

    def _drop(self, call: _Call) -> None:
        """Drops a call that still waits."""
        with self._lock:
            self._places.withdraw(call.holder, call)

    def check(self) -> None:
        with self._lock:
            self._places.check()

    def close(self) -> None:
        with self._lock:
            waiting = self._places.waiting()
        for call in waiting:
            call.result.cancel()
        self._threads.shutdown(cancel_futures=True)
