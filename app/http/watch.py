"""Cancelling of work for a client that is gone."""

from __future__ import annotations

import asyncio

from starlette.types import Scope

ON_GONE = "kvroute.on_gone"
"""Key in a request's scope: a function that takes what to call once the client is gone, perhaps at
once; None: nothing. A task that waits for http.disconnect would cost each request a twentieth more.
"""


class watched:  # noqa: N801 - used like asyncio.timeout
    """Cancels work for a client, whose body has been read, as soon as it hangs up. is_gone: whether
    it did."""

    def __init__(self, scope: Scope) -> None:
        self.is_gone = False
        # Only servers of other makes, in tests, do not say.
        self._watch = scope.get(ON_GONE, lambda _: None)

    async def __aenter__(self) -> watched:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watch(self._cancel)
        return self

    def _cancel(self) -> None:
        self.is_gone = True
        self._task.cancel()

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        self._watch(None)
        if self.is_gone:
            self._task.uncancel()
        return self.is_gone and kind is not None and issubclass(kind, asyncio.CancelledError)
