"""Waits that a deadline or another task ends. There may be thousands of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Wait(Generic[T]):
    """Context manager around an await, listed in `open_waits` while it is open. `end` cancels the
    await, which then raises the error that `failure` returns. about: what the wait is for."""

    __slots__ = ("_cancelling", "_failure", "_has_ended", "_open_waits", "_task", "about")

    def __init__(
        self, open_waits: set[Wait[T]], failure: Callable[[], Exception], about: T
    ) -> None:
        self.about = about
        self._open_waits = open_waits
        self._failure = failure
        self._has_ended = False

    def end(self) -> None:
        self._has_ended = True
        self._task.cancel()

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancelling = task, task.cancelling()
        self._open_waits.add(self)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._open_waits.discard(self)
        # As in asyncio.timeout: the task may have been cancelled by others, too.
        if (
            self._has_ended
            and self._task.uncancel() <= self._cancelling
            and kind is asyncio.CancelledError
        ):
            raise self._failure() from None


LATE_S = 0.005
"""Seconds by which a wait may end after its deadline; one look ends all within them."""


class Deadlines:
    """Waits for futures, each for a time.

    An asyncio.timeout for each takes a timer, and ten times as long. The timer here is set anew
    only for a deadline that is earlier than all others, and once it is over.
    """

    def __init__(self) -> None:
        self._until_s: dict[asyncio.Future[Any], float] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def result(self, future: asyncio.Future[T], until_s: float) -> T:
        """Returns what the future is set to. Only one may wait for it. Raises TimeoutError if it is
        not set by `until_s`, of the event loop's clock."""
        self._until_s[future] = until_s
        if self._timer is None or until_s < self._timer.when() - LATE_S:
            self._set_timer(until_s)
        try:
            return await future
        finally:
            del self._until_s[future]

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _set_timer(self, at_s: float) -> None:
        self.close()
        self._timer = asyncio.get_running_loop().call_at(at_s + LATE_S, self._look)

    def _look(self) -> None:
        self._timer = None
        now_s = asyncio.get_running_loop().time()
        earliest_s = min(
            (until_s for until_s in self._until_s.values() if until_s > now_s), default=None
        )
        for future, until_s in self._until_s.items():
            if until_s <= now_s and not future.done():
                future.set_exception(TimeoutError())
        if earliest_s is not None:
            self._set_timer(earliest_s)
