"""What runs beside a server."""

import asyncio
import logging

import pytest

from app.http import supervisor
from app.http.metrics import Table
from app.http.supervisor import TASK_FAILURES, supervised


class Failures(Table):
    failures = TASK_FAILURES


class Task:
    """Fails `times` times, and then runs until it is told to end."""

    def __init__(self, times):
        self.begun = 0
        self.runs, self.ends = asyncio.Event(), asyncio.Event()
        self._times = times

    async def run(self):
        self.begun += 1
        if self.begun <= self._times:
            raise RecursionError(f"number {self.begun}")
        self.runs.set()
        await self.ends.wait()


async def test_a_task_that_fails_is_logged_counted_and_begun_anew_until_it_returns(
    monkeypatch, caplog
):
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.001)
    table, task = Failures(), Task(3)
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        tasks.create_task(supervised("keys", task.run, table.failures))
        await task.runs.wait()
        task.ends.set()
    counted = table.registry.get_sample_value("kvroute_task_failures_total", {"task": "keys"})
    assert (counted, task.begun) == (3, 4)
    told = [record.exc_text for record in caplog.records if record.levelno == logging.ERROR]
    assert [f"RecursionError: number {n}" in (text or "") for n, text in enumerate(told, 1)] == [
        True
    ] * 3


async def test_pauses_grow_up_to_the_longest_and_begin_anew_after_a_good_run(monkeypatch):
    now_s, pauses = 0.0, list[float]()

    async def sleep(pause_s):
        pauses.append(pause_s)

    async def run():
        nonlocal now_s
        if len(pauses) == 8:
            now_s += supervisor.LONGEST_PAUSE_S
        if len(pauses) == 10:
            return
        raise ValueError("no")

    monkeypatch.setattr(supervisor.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(supervisor.asyncio, "sleep", sleep)
    await supervised("keys", run, Failures().failures)
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 0.5, 1.0]


async def test_a_task_ends_when_it_is_cancelled():
    task = Task(0)
    supervising = asyncio.create_task(supervised("keys", task.run, Failures().failures))
    await task.runs.wait()
    supervising.cancel()
    with pytest.raises(asyncio.CancelledError):
        await supervising


async def test_a_task_that_fails_as_it_is_cancelled_ends_all_the_same(caplog):
    runs = asyncio.Event()

    async def run():
        assert not runs.is_set(), "it is begun anew"
        try:
            runs.set()
            await asyncio.Event().wait()
        finally:
            raise ValueError("in the cleanup")

    supervising = asyncio.create_task(supervised("keys", run, Failures().failures))
    await runs.wait()
    supervising.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(supervising, 30)
    assert "keys failed unexpectedly as it ended" in caplog.text
