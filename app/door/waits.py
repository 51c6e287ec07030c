"""Waiting that others can end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, MutableSet
from typing import Any

from app.door.connection import UpstreamError


class Wait:
    """Of the task that enters it, which is in `open_waits` meanwhile. `end` may be called then, and
    has it leave by the error that `failure` makes."""

    __slots__ = ("_cancelling", "_failure", "_has_ended", "_open_waits", "_task")

    def __init__(self, open_waits: MutableSet[Any], failure: Callable[[], UpstreamError]) -> None:
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
