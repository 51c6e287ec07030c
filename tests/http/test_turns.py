import asyncio
from contextlib import AsyncExitStack

import pytest

from app.core.errors import Crowded
from app.http.turns import Turns


async def test_a_place_is_waited_for_and_given_back():
    turns, order = Turns(1, 10), list[str]()

    async def call(holder):
        async with turns.place(holder):
            order.append(holder)
            await asyncio.sleep(0)

    await asyncio.gather(call("a"), call("a"), call("a"), call("b"))
    assert order.index("b") < 3
    assert order.count("a") == 3
    turns._places.check()


async def test_who_is_cancelled_leaves_nothing():
    turns = Turns(1, 10)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(turns.place("a"))
        waiting = asyncio.create_task(turns.place("b").__aenter__())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        chosen = asyncio.create_task(turns.place("b").__aenter__())
        await asyncio.sleep(0)
    # Its turn has come, and it does not know yet.
    chosen.cancel()
    await asyncio.wait([chosen])
    async with turns.place("c"):
        pass


async def test_who_has_most_is_refused_when_too_many_wait():
    turns = Turns(1, 2)
    async with turns.place("a"):
        waiting = asyncio.create_task(turns.place("a").__aenter__())
        await asyncio.sleep(0)
        other = asyncio.create_task(turns.place("b").__aenter__())
        with pytest.raises(Crowded):
            await waiting
    await other
