import asyncio
import threading

import pytest

from app.tokens import Overloaded, TokenizerThreads
from app.tokens.pool import LARGE


@pytest.fixture
def pool():
    pool = TokenizerThreads(num_threads=1, max_waiting=2, max_size=100)
    yield pool
    pool.check()
    pool.close()


async def test_a_call_returns_and_raises_what_it_would_on_its_own(pool):
    assert await pool.run(1, divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await pool.run(1, divmod, 7, 0)


@pytest.mark.parametrize("sizes", [(0, 0), (5, 0), (0, 5), (0,) * 40])
async def test_empty_texts_are_made_beside_others(sizes):
    pool = TokenizerThreads()
    async with asyncio.timeout(30):
        made = await asyncio.gather(*(pool.run(size, lambda: "made") for size in sizes))
    assert made == ["made"] * len(sizes)
    pool.check()
    pool.close()


async def test_beyond_as_many_calls_as_may_wait_one_is_refused(pool):
    gate = threading.Event()
    async with asyncio.TaskGroup() as group:
        for _ in range(2):
            group.create_task(pool.run(1, gate.wait))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="2 prompts of 2 characters"):
            await pool.run(1, gate.wait)
        gate.set()
    assert await pool.run(1, int) == 0


async def test_beyond_as_much_text_as_may_wait_a_call_is_refused(pool):
    gate = threading.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(pool.run(60, gate.wait))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await pool.run(60, gate.wait)
        gate.set()


async def test_a_text_longer_than_what_may_wait_is_accepted_alone(pool):
    assert await pool.run(1_000, int) == 0


async def test_a_call_whose_caller_has_gone_before_it_began_never_runs(pool):
    gate = threading.Event()
    ran = []
    first = asyncio.ensure_future(pool.run(1, gate.wait))
    second = asyncio.ensure_future(pool.run(1, ran.append, 1))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    gate.set()
    await first
    await pool.run(1, int)
    assert ran == []


async def test_callers_are_served_in_turn_and_the_latest_of_who_has_most_goes():
    pool = TokenizerThreads(num_threads=1, max_waiting=4)
    gate, order = threading.Event(), list[str]()
    async with asyncio.TaskGroup() as group:
        group.create_task(pool.run(1, gate.wait, holder="a"))
        await asyncio.sleep(0)
        many = [
            group.create_task(_outcome(pool.run(1, order.append, f"a{n}", holder="a")))
            for n in range(3)
        ]
        await asyncio.sleep(0)
        others = [
            group.create_task(_outcome(pool.run(1, order.append, holder, holder=holder)))
            for holder in "bc"
        ]
        await asyncio.sleep(0)
        gate.set()
    assert [task.result() for task in many] == ["made", "refused", "refused"]
    assert [task.result() for task in others] == ["made", "made"]
    assert order.index("b") <= 1, "one of the others' was served before at most"
    pool.check()
    pool.close()


async def _outcome(running):
    try:
        await running
    except Overloaded:
        return "refused"
    return "made"


async def test_a_callers_large_texts_keep_no_others_waiting_for_all_of_them():
    pool = TokenizerThreads(num_threads=1)
    gate, order = threading.Event(), list[str]()
    async with asyncio.TaskGroup() as group:
        group.create_task(pool.run(LARGE, gate.wait, holder="a"))
        await asyncio.sleep(0)
        for number in range(5):
            group.create_task(pool.run(LARGE, order.append, f"a{number}", holder="a"))
        await asyncio.sleep(0)
        group.create_task(pool.run(LARGE, order.append, "b", holder="b"))
        await asyncio.sleep(0)
        gate.set()
    assert order.index("b") <= 1
    pool.check()
    pool.close()


async def test_a_pool_that_is_closed_drops_what_waits():
    pool = TokenizerThreads(num_threads=1)
    gate = threading.Event()
    first = asyncio.ensure_future(pool.run(1, gate.wait))
    second = asyncio.ensure_future(pool.run(1, int))
    await asyncio.sleep(0)
    closing = asyncio.create_task(asyncio.to_thread(pool.close))
    with pytest.raises(asyncio.CancelledError):
        await second
    gate.set()
    await closing
    assert await first
