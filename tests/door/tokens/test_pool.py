from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from app.door.tokens import Overloaded, TokenizerThreads


@pytest.fixture
def pool() -> Iterator[TokenizerThreads]:
    pool = TokenizerThreads(num_threads=1, max_waiting=2, max_size=100)
    yield pool
    pool.check()
    pool.close()


async def test_a_call_returns_and_raises_what_it_would_on_its_own(pool: TokenizerThreads) -> None:
    assert await pool.run(1, divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await pool.run(1, divmod, 7, 0)


async def test_beyond_as_many_calls_as_may_wait_one_is_refused(pool: TokenizerThreads) -> None:
    gate = threading.Event()
    async with asyncio.TaskGroup() as group:
        for _ in range(2):
            group.create_task(pool.run(1, gate.wait))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="2 prompts of 2 characters"):
            await pool.run(1, gate.wait)
        gate.set()
    assert await pool.run(1, int) == 0


async def test_beyond_as_much_text_as_may_wait_a_call_is_refused(pool: TokenizerThreads) -> None:
    gate = threading.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(pool.run(60, gate.wait))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await pool.run(60, gate.wait)
        gate.set()


async def test_a_text_longer_than_what_may_wait_is_accepted_alone(pool: TokenizerThreads) -> None:
    assert await pool.run(1_000, int) == 0


async def test_a_call_whose_caller_has_gone_before_it_began_never_runs(
    pool: TokenizerThreads,
) -> None:
    gate = threading.Event()
    ran: list[int] = []
    first = asyncio.ensure_future(pool.run(1, gate.wait))
    second = asyncio.ensure_future(pool.run(1, ran.append, 1))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    gate.set()
    await first
    await pool.run(1, int)
    assert ran == []
