"""Waits for what other processes and tasks do, instead of sleeping for a fixed time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")

POLL_S = 0.01


async def eventually(
    look: Callable[[], Awaitable[T]], until: Callable[[T], Any] = bool, *, within_s: float = 30.0
) -> T:
    """The first value from `look` that `until` accepts.

    Raises AssertionError, with the last value seen, if that takes longer than `within_s`.
    """
    deadline = asyncio.get_running_loop().time() + within_s
    while True:
        seen = await look()
        if until(seen):
            return seen
        assert asyncio.get_running_loop().time() < deadline, f"after {within_s:g} s still {seen!r}"
        await asyncio.sleep(POLL_S)
