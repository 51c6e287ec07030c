"""Waits for what other processes and tasks do, instead of sleeping for a fixed time."""

import asyncio

FIRST_PAUSE_S = 0.01
MAX_PAUSE_S = 0.05
"""Seconds between looks: often enough for who waits, and a starting process has the machine."""


async def eventually(look, until=bool, *, within_s=60.0):
    """The first value from `look` that `until` accepts.

    Raises AssertionError, with the last value seen, if that takes longer than `within_s`.
    """
    deadline, pause_s = asyncio.get_running_loop().time() + within_s, FIRST_PAUSE_S
    while True:
        seen = await look()
        if until(seen):
            return seen
        assert asyncio.get_running_loop().time() < deadline, f"after {within_s:g} s still {seen!r}"
        await asyncio.sleep(pause_s)
        pause_s = min(1.1 * pause_s, MAX_PAUSE_S)
