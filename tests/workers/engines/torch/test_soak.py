"""A torch engine under random requests, many of them cancelled, with so few slots that all tiers
overflow.

However blocks are reused, shared, moved and evicted, each prompt gets bit for bit the logits that
it gets alone. Once the engine is idle, each slot is free or holds a block that Redis shows.
"""

import asyncio
import os
import random
from contextlib import suppress

import pytest
import torch

from app.core.errors import InvalidRequest
from app.core.events import Stored
from app.core.keys import Keyspace
from app.core.types import TierOverlap
from app.state.overlap import match
from app.state.scripts import ScriptRunner
from tests.fake_worker import fake_agent
from tests.workers.engines.torch.test_engine import (
    BLOCK_SIZE,
    CHUNK,
    DEVICE,
    DISK,
    HOST,
    MODEL,
    Spy,
    hashes_of,
    output_of,
    prompt_of,
    running,
)
from tests.workers.kv.cache_model import CacheModel
from workers.kv.identity import hash_of
from workers.kv.memory import MemoryPool
from workers.kv.moves import WritePolicy
from workers.kv.slots import block_of

KEYS = Keyspace("soak")
SOAK_S = float(os.environ.get("KVROUTE_SOAK_S", "300"))
LARGEST = 16
"""The number of slots that the longest request takes."""


class CheckedSpy(Spy):
    """Compares the logits of each prompt's last chunk with those of the prompt alone."""

    def __init__(self, prompts):
        super().__init__(MODEL)
        self.num_compared = 0
        self._expected = {}
        for prompt in prompts:
            pool = MemoryPool(MODEL.kv_shape(BLOCK_SIZE), LARGEST)
            for start in range(0, len(prompt), CHUNK):
                chunk = prompt[start : start + CHUNK]
                logits = MODEL.prefill([pool.kv], chunk, start, range(LARGEST))
            self._expected[start, tuple(chunk)] = logits

    def prefill(self, kv, tokens, start, *where):
        logits = self.model.prefill(kv, tokens, start, *where)
        expected = self._expected.get((start, tuple(tokens)))
        if expected is not None:
            assert torch.equal(logits, expected)
            self.num_compared += 1
        return logits


def prompts_of(rng):
    """Prompts that branch off each other anywhere. Each ends with a token of its own: by its last
    chunk, which may be that token alone, it is known."""
    prompts = []
    for n in range(40):
        stem = rng.choice(prompts)[: rng.randrange(48)] if n > 4 else []
        prompts.append([*stem, *prompt_of(1000 + n, rng.randint(3, 55 - len(stem))), n])
    return prompts


async def run_client(served, prompts, rng):
    """One client's requests, one after another; the id of a cancelled one may be reused at once."""
    for _ in range(30):
        name = f"r{rng.randrange(12)}"
        try:
            generation = served.submit(name, rng.choice(prompts), rng.randint(1, 6))
        except InvalidRequest:
            await asyncio.sleep(0)
            continue
        patience_s = rng.choice((0.0, 0.0, 0.001, 0.01, 0.05, 60.0, 60.0))
        try:
            async with asyncio.timeout(patience_s):
                await output_of(generation)
        except TimeoutError:
            assert patience_s < 60, "a request took more than a minute"
        finally:
            generation.cancel()


async def soak(folder, redis, seed):
    """Run one worker from start to stop; returns how often logits were compared."""
    rng = random.Random(seed)
    num_slots = {DEVICE: rng.randint(LARGEST, 40)}
    if rng.random() < 0.8:
        num_slots[HOST] = rng.randint(1, 24)
    if rng.random() < 0.6:
        num_slots[DISK] = rng.randint(1, 40)
    prompts = prompts_of(rng)
    spy = CheckedSpy(prompts)
    scripts = ScriptRunner(redis, timeout_s=5.0)
    agent = fake_agent(scripts, KEYS, "w0", block_size=BLOCK_SIZE)
    await agent.start()
    async with asyncio.TaskGroup() as tasks:
        running_agent = tasks.create_task(agent.run())
        write = rng.choice(list(WritePolicy))
        async with running(folder, num_slots, agent, write=write, spy=spy) as served:
            for _ in range(3):
                async with asyncio.TaskGroup() as clients:
                    for _ in range(rng.choice((1, 4, 16))):
                        clients.create_task(
                            run_client(served, prompts, random.Random(rng.random()))
                        )
                await served.settle()
                await agent.published()
                await check_idle(served, agent, scripts, prompts)
        running_agent.cancel()
    with suppress(asyncio.CancelledError):
        await running_agent
    await agent.stop()
    return spy.num_compared


async def check_idle(served, agent, scripts, prompts):
    """No request holds a slot, and Redis shows exactly the blocks that the worker holds."""
    held = CacheModel()
    for tier, slots in served.manager.tiers.items():
        assert slots.num_free + slots.num_idle == slots.num_slots
        held.take(Stored(tuple(hash_of(block_of(s)) for s in slots.registered()), None, tier))
    chains = [hashes_of(prompt) for prompt in prompts]
    found, _ = await match(scripts, KEYS, chains, 1)
    assert agent.incarnation is not None
    shown = [(of_chain or {}).get(agent.incarnation, TierOverlap()) for of_chain in found]
    assert shown == [held.scan(chain) for chain in chains]
    assert served.engine.metrics().kv_active_blocks == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
async def test_logits_stay_exact_and_no_slot_leaks(tmp_path, redis, seed):
    assert await soak(tmp_path, redis, seed) > 50


@pytest.mark.slow
@pytest.mark.timeout(SOAK_S + 120)
async def test_logits_stay_exact_and_no_slot_leaks_in_a_long_run(tmp_path, redis):
    loop = asyncio.get_running_loop()
    end = loop.time() + SOAK_S
    seed = 100
    while loop.time() < end:
        await soak(tmp_path / str(seed), redis, seed)
        seed += 1
