"""Deadlines of several waits at once."""

from __future__ import annotations

import asyncio

import pytest

from app.door.deadlines import Deadlines


async def test_each_wait_ends_by_its_own_deadline() -> None:
    loop = asyncio.get_running_loop()
    deadlines, ended = Deadlines(), []

    async def wait(name: str, after_s: float) -> None:
        with pytest.raises(TimeoutError):
            await deadlines.result(loop.create_future(), loop.time() + after_s)
        ended.append(name)

    async with asyncio.TaskGroup() as tasks:
        for name, after_s in (("late", 0.15), ("early", 0.05), ("at once", -1.0)):
            tasks.create_task(wait(name, after_s))
    assert ended == ["at once", "early", "late"]


async def test_what_comes_in_time_is_returned_and_its_deadline_forgotten() -> None:
    loop = asyncio.get_running_loop()
    deadlines, future = Deadlines(), loop.create_future()
    loop.call_soon(future.set_result, 7)
    assert await deadlines.result(future, loop.time() + 0.01) == 7
    with pytest.raises(TimeoutError):
        await deadlines.result(loop.create_future(), loop.time() + 0.05)
    deadlines.close()
