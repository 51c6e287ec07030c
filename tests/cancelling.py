"""Cancels a long-running task at random moments, of which some meet a future that is done."""

import asyncio
import random

TIMES = 80
STEPS = 5_000
"""Most steps of the loop before a task is cancelled; few are drawn as often as many."""
PATIENCE_S = 60.0


async def cancel_often(run):
    """Start `run` and cancel it, TIMES times. Raises AssertionError if it runs on.

    `run` should have something to do in each step of the loop: a task that sleeps ends always.
    """

    async def running():
        return await run()

    chance = random.Random(58)
    for number in range(TIMES):
        steps = round(STEPS ** chance.random())
        task = asyncio.create_task(running())
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=PATIENCE_S)
        is_over = task.done()
        task.cancel()
        assert is_over, f"cancellation {number} of {TIMES}, after {steps} steps, was lost"
        assert task.cancelled(), task.exception()
