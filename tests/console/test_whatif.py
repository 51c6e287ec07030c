"""Who may run a what-if when; what it answers is tested with the console."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from app.console.whatif import MAX_CALLS, Busy, WhatIf


class Gated(WhatIf):
    """Runs nothing: each ends once `may_end` is set."""

    def __init__(self) -> None:
        super().__init__("redis://nowhere", "test")
        self.may_end = asyncio.Event()
        self.running = self.most = 0

    async def _run(self, options: list[str]) -> Any:
        self.running += 1
        self.most = max(self.most, self.running)
        await self.may_end.wait()
        self.running -= 1
        return options


async def ask(whatif: WhatIf, holder: str) -> Any:
    return await whatif.run(holder, "latency", None, None, 10)


async def test_a_caller_has_one_and_others_wait_for_their_turn() -> None:
    whatif = Gated()
    first, other = (asyncio.create_task(ask(whatif, holder)) for holder in "ab")
    await asyncio.sleep(0)
    for holder in "ab":
        with pytest.raises(Busy, match="of yours"):
            await ask(whatif, holder)
    whatif.may_end.set()
    assert await first == await other == ["--last=10", "--policy=latency"]
    assert whatif.most == 1
    assert await ask(whatif, "a")


async def test_beyond_some_callers_the_next_is_told_to_come_again() -> None:
    whatif = Gated()
    asking = [asyncio.create_task(ask(whatif, f"{number}")) for number in range(MAX_CALLS)]
    await asyncio.sleep(0)
    with pytest.raises(Busy, match="of others"):
        await ask(whatif, "next")
    whatif.may_end.set()
    assert len(await asyncio.gather(*asking)) == MAX_CALLS
