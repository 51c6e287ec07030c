"""Real engines on real sockets: a subscriber holds exactly the blocks that the engine holds."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from app.core.hashing import compute_hashes, token_bytes
from app.core.types import SequenceHash, Tier
from app.simulation.engine import SimEngine
from app.simulation.profiles import PROFILES
from tests.eventually import eventually
from tests.workers.engines.torch import test_engine as torch_engine
from tests.workers.vllm_face.mirror import Held, Mirror, Published, mirrored, publishing
from workers.bridge.events.stream import Fresh
from workers.engines.base import CompletionRequest, Engine, Generation
from workers.engines.sim.runner import EngineRunner
from workers.kv.identity import hash_of
from workers.kv.manager import BlockManager
from workers.kv.slots import block_of

SIZE = 4
DEVICE, HOST, DISK = Tier


def runner_of(published: Published, *, blocks: int = 48, host_blocks: int = 0) -> EngineRunner:
    """A simulated engine whose events are published."""
    engine = SimEngine(
        PROFILES["8b-1xh100"],
        block_size=SIZE,
        now=time.monotonic,
        kv_pool_tokens=blocks * SIZE,
        host_pool_tokens=host_blocks * SIZE,
    )
    runner = EngineRunner(engine, speedup=1000)
    runner.watcher = published.publisher
    runner.on_step = lambda: published.publisher.notify(runner.take_events())
    return runner


def held_by_sim(runner: EngineRunner) -> Held:
    pool = runner.engine.pool
    return {DEVICE: {*pool._references, *pool._cached}, HOST: {*pool._host}, DISK: set()}


def held_by_torch(manager: BlockManager) -> Held:
    held: Held = {tier: set() for tier in Tier}
    for tier, slots in manager.tiers.items():
        held[tier] = {hash_of(block_of(s)) for s in slots.registered() if s.published}
    return held


class Chat:
    """Random use: conversations that share a prefix, some cancelled, and resets in between."""

    def __init__(self, engine: Engine, seed: int, vocabulary: int = 1000) -> None:
        self.num_resets = 0
        self._engine = engine
        self._random = random.Random(seed)
        self._vocabulary = vocabulary
        self._talks: list[list[int]] = [[]]
        self._named = 0

    def _words(self, most: int) -> list[int]:
        count = self._random.randint(1, most)
        return [self._random.randrange(self._vocabulary) for _ in range(count)]

    async def turn(self) -> None:
        draw = self._random
        talk = draw.choice(self._talks)
        prompt = [*talk, *self._words(12)] if len(talk) < 60 else self._words(30)
        self._named += 1
        request = CompletionRequest(
            f"r{self._named}", token_bytes(prompt), draw.randint(1, 12), ignore_eos=True
        )
        answer = await self._read(self._engine.complete(request), draw.random() < 0.2)
        self._talks = [*self._talks[-6:], [*prompt, *answer]]

    async def _read(self, generation: Generation, hangs_up: bool) -> list[int]:
        tokens: list[int] = []
        try:
            async for output in generation:
                tokens += output.token_ids
                if hangs_up:
                    break
        finally:
            generation.cancel()
        return tokens

    async def run(self, rounds: int, at_once: int = 4) -> None:
        for _ in range(rounds):
            async with asyncio.TaskGroup() as tasks:
                for _ in range(at_once):
                    tasks.create_task(self.turn())
                await asyncio.sleep(0)
                if self._random.random() < 0.1:
                    self.num_resets += self._engine.reset_cache()
            if self._random.random() < 0.1:
                self.num_resets += self._engine.reset_cache()


async def shows(mirror: Mirror, published: Published, held: Held) -> None:
    """Every batch has come, and what they say is what the engine holds."""

    async def shown() -> tuple[bool, Held]:
        return bool(mirror.begun), mirror.held()

    await eventually(shown, lambda now: now == (True, held))
    assert not mirror.engine_blocks.is_blind
    assert published.blocks.num_blocks == len(set().union(*held.values()))


@pytest.mark.parametrize("announces_copies", [True, False])
@pytest.mark.parametrize("host_blocks", [0, 24])
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
async def test_a_subscriber_holds_what_the_simulated_engine_holds(
    seed: int, host_blocks: int, announces_copies: bool
) -> None:
    async with publishing(SIZE) as published, asyncio.TaskGroup() as tasks:
        runner = runner_of(published, host_blocks=host_blocks)
        tasks.create_task(runner.run())
        options = {"announces_copies": announces_copies}
        async with mirrored(published.socket, SIZE, **options) as mirror:
            chat = Chat(runner, seed)
            offloaded: set[SequenceHash] = set()
            for _ in range(6):
                await chat.run(16)
                await shows(mirror, published, held_by_sim(runner))
                offloaded |= held_by_sim(runner)[HOST]
            assert chat.num_resets > 0
            assert bool(offloaded) == bool(host_blocks)
            await chat.turn()

            async with mirrored(published.socket, SIZE, **options) as late:
                await shows(late, published, held_by_sim(runner))
        assert late.begun == [Fresh(joined_late=False, reason="the agent started")]
        runner.engine.check()
        runner.stop()


@pytest.mark.parametrize(
    "tiers",
    [
        *(pytest.param(few, marks=pytest.mark.slow) for few in ((DEVICE,), (DEVICE, HOST))),
        (DEVICE, HOST, DISK),
    ],
)
async def test_a_subscriber_holds_what_the_torch_engine_holds(
    tmp_path: Path, tiers: Sequence[Tier]
) -> None:
    async with (
        publishing(torch_engine.BLOCK_SIZE) as published,
        torch_engine.running(tmp_path, dict.fromkeys(tiers, 40), published.publisher) as served,
        mirrored(published.socket, torch_engine.BLOCK_SIZE) as mirror,
    ):
        served.engine.watcher = published.publisher
        chat = Chat(served.engine, seed=1, vocabulary=torch_engine.MODEL.config.vocab_size)
        used: set[Tier] = set()
        for _ in range(4):
            await chat.run(12)
            await served.settle()
            await served.ask([1])  # what left with the last step is forgotten with the next
            await served.settle()
            held = held_by_torch(served.manager)
            used |= {tier for tier in tiers if held[tier]}
            await shows(mirror, published, held)
        assert used == {*tiers}
        assert served.engine.reset_cache()
        await shows(mirror, published, {tier: set() for tier in Tier})

        async with mirrored(published.socket, torch_engine.BLOCK_SIZE) as late:
            await served.ask(torch_engine.prompt_of(1, 20))
            await served.settle()
            await shows(late, published, held_by_torch(served.manager))


async def test_a_subscriber_that_joined_after_the_buffer_has_wrapped_knows_it() -> None:
    async with publishing(SIZE) as published, asyncio.TaskGroup() as tasks:
        published.socket._batches = type(published.socket._batches)(maxlen=2)
        runner = runner_of(published)
        tasks.create_task(runner.run())
        await Chat(runner, 1).run(5)
        async with mirrored(published.socket, SIZE) as late:

            async def has_begun() -> bool:
                return bool(late.begun)

            await eventually(has_begun)
            assert late.begun[0].joined_late
        runner.stop()


async def test_a_reset_of_an_idle_engine_is_told_at_once_and_of_a_busy_one_is_refused() -> None:
    async with publishing(SIZE) as published, asyncio.TaskGroup() as tasks:
        runner = runner_of(published)
        tasks.create_task(runner.run())
        async with mirrored(published.socket, SIZE) as mirror:
            prompt = list(range(12))
            generation = runner.complete(CompletionRequest("r", token_bytes(prompt), 50))
            outputs = aiter(generation)
            tokens = (await anext(outputs)).token_ids
            assert not runner.reset_cache()
            async for output in outputs:
                tokens += output.token_ids
            _, chain = compute_hashes([*prompt, *tokens], SIZE)
            # The KV of the last token is never computed.
            await shows(mirror, published, {DEVICE: {*chain[:15]}, HOST: set(), DISK: set()})
            assert runner.reset_cache()
            await shows(mirror, published, {tier: set() for tier in Tier})
        runner.stop()
