"""Deadlines of several waits at once."""

import asyncio
from types import SimpleNamespace

import pytest

from app.door.engine.waits import Deadlines


async def test_each_wait_ends_by_its_own_deadline(monkeypatch):
    loop = asyncio.get_running_loop()
    clock = SimpleNamespace(now_s=loop.time())
    monkeypatch.setattr(loop, "time", lambda: clock.now_s)
    deadlines, ended = Deadlines(), list[str]()

    async def wait(name, after_s):
        with pytest.raises(TimeoutError):
            await deadlines.result(loop.create_future(), loop.time() + after_s)
        ended.append(name)

    async def ended_after(seconds):
        clock.now_s += seconds
        for _ in range(10):
            await asyncio.sleep(0)
        return ended

    async with asyncio.TaskGroup() as tasks:
        for name, after_s in (("late", 15.0), ("early", 5.0), ("at once", -1.0)):
            tasks.create_task(wait(name, after_s))
        assert await ended_after(0.0) == ["at once"]
        assert await ended_after(4.9) == ["at once"]
        assert await ended_after(0.2) == ["at once", "early"]
        assert await ended_after(9.8) == ["at once", "early"]
        assert await ended_after(0.2) == ["at once", "early", "late"]


async def test_what_comes_in_time_is_returned_and_its_deadline_forgotten():
    loop = asyncio.get_running_loop()
    deadlines, future = Deadlines(), loop.create_future()
    loop.call_soon(future.set_result, 7)
    assert await deadlines.result(future, loop.time() + 0.01) == 7
    with pytest.raises(TimeoutError):
        await deadlines.result(loop.create_future(), loop.time() + 0.05)
    deadlines.close()
