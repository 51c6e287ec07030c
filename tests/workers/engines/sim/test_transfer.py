"""Prompts that one simulated engine computes and another goes on from, over a real connection."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from app.core.events import CacheEvent, Stored
from app.core.hashing import token_bytes
from app.core.worker_report import DEFAULT_SPEED
from app.http.server import listen
from app.simulation.engine import SimEngine
from app.simulation.profiles import USUAL, Sending
from app.simulation.profiles import Link as SimLink
from tests.eventually import eventually
from workers.engines.base import CompletionRequest
from workers.engines.sim import transfer
from workers.engines.sim.runner import EngineRunner
from workers.engines.sim.transfer import SimTransfer
from workers.kv.transfer.kv_lease import KvPort

SIZE = 4
PROMPT = list(range(100, 110))  # the ten tokens A to J: two blocks and two tokens
QUICK = 1e12
SLOW = 1.0
"""Bytes per second: nothing ever arrives."""


@dataclass
class Worker:
    runner: EngineRunner
    events: list[CacheEvent]

    async def ask(self, prompt=PROMPT, source=None, keep_s=0.0, max_tokens=3):
        request = CompletionRequest(
            "r", token_bytes(prompt), max_tokens, source=source, keep_s=keep_s
        )
        generation = self.runner.complete(request)
        tokens = []
        async for output in generation:
            tokens += output.token_ids
            finished = output.finished
        assert finished is not None
        return tokens, finished, generation.kept

    def is_idle(self):
        self.runner.engine.check()
        return self.runner.engine.pool.num_used == 0


@asynccontextmanager
async def running(bytes_per_s=QUICK, kind="one"):
    with listen("127.0.0.1", 0) as listening:
        engine = SimEngine(USUAL, block_size=SIZE, now=time.monotonic)
        sending = Sending(SimLink(bytes_per_s, first_s=0.0), USUAL)
        link = KvPort(listening, "127.0.0.1", {"profile": kind})
        runner = EngineRunner(engine, speedup=1e4, transfer=SimTransfer(engine, link, sending))
        worker = Worker(runner, [])
        runner.on_step = lambda: worker.events.extend(runner.take_events())
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(runner.run())
            await eventually(lambda: _runs(runner))
            yield worker
            runner.stop()


async def _runs(runner):
    return runner.running


async def until_idle(worker):
    async def is_idle():
        return worker.is_idle()

    await eventually(is_idle)


async def kept_by(worker, keep_s=60.0):
    _, _, kept = await worker.ask(keep_s=keep_s, max_tokens=1)
    assert kept is not None
    return kept


async def test_the_one_token_of_a_source_says_nothing_of_how_long_answers_are():
    async with running() as worker:
        await kept_by(worker)
        assert worker.runner.speed().mean_output_tokens == DEFAULT_SPEED.mean_output_tokens
        await worker.ask()
        assert worker.runner.speed().mean_output_tokens < DEFAULT_SPEED.mean_output_tokens


async def test_a_prompt_computed_elsewhere_is_cached_here_as_if_computed():
    async with running() as source, running() as target, running() as alone:
        kept = await kept_by(source)
        assert kept.num_tokens == 8
        assert not source.is_idle()

        tokens, finished, _ = await target.ask(source=kept)

        expected, _, _ = await alone.ask()
        assert tokens == expected
        assert finished.cached_tokens == 8
        stored = [event for event in target.events if isinstance(event, Stored)]
        assert stored == [event for event in alone.events if isinstance(event, Stored)]
        assert target.runner.speed().transfer_s != DEFAULT_SPEED.transfer_s
        await until_idle(source)
        await until_idle(target)


async def test_what_is_held_of_a_prompt_is_handed_on_without_computing():
    async with running() as source, running() as target:
        await source.ask(PROMPT[:8])
        kept = await source.runner.hand_on(token_bytes(PROMPT), 60.0)
        assert kept is not None
        assert kept.num_tokens == 8

        _, finished, _ = await target.ask(source=kept)

        assert finished.cached_tokens == 8
        await until_idle(source)


async def test_a_worker_that_holds_nothing_hands_nothing_on():
    async with running() as source:
        assert await source.runner.hand_on(token_bytes(PROMPT), 60.0) is None
        assert source.is_idle()


async def test_a_target_that_lacks_nothing_has_its_source_let_go():
    async with running() as source, running(kind="other") as target:
        await target.ask()
        kept = await kept_by(source)

        _, finished, _ = await target.ask(source=kept)

        assert finished.cached_tokens == 8
        await until_idle(source)


async def test_only_what_is_lacking_is_fetched():
    async with running() as source, running() as target:
        await target.ask(PROMPT[:4], max_tokens=1)
        kept = await kept_by(source)

        _, finished, _ = await target.ask(source=kept)

        assert finished.cached_tokens == 8
        stored = [event for event in target.events if isinstance(event, Stored)]
        # The first was its own, the second came, and the output has filled the third.
        assert [len(event.blocks) for event in stored] == [1, 1, 1]


@pytest.mark.parametrize("what", ["let go", "another prompt's", "another model's", "gone"])
async def test_what_does_not_come_is_computed(what):
    async with (
        running(kind="other" if what == "another model's" else "one") as source,
        running() as target,
        running() as alone,
    ):
        kept = await kept_by(source, keep_s=0.001 if what == "let go" else 60.0)
        if what == "let go":
            await until_idle(source)
        prompt = PROMPT[::-1] if what == "another prompt's" else PROMPT
        if what == "gone":
            with listen("127.0.0.1", 0) as closed:
                kept = replace(kept, port=closed.getsockname()[1])

        tokens, finished, _ = await target.ask(prompt, source=kept)

        assert finished.cached_tokens == 0
        assert tokens == (await alone.ask(prompt))[0]
        await until_idle(target)


@pytest.mark.parametrize("comes", [True, False])
async def test_a_prefix_that_another_request_fetches_is_waited_for(comes):
    longer = [*PROMPT, *PROMPT]
    async with running(QUICK if comes else SLOW) as source, running() as target:
        kept = await kept_by(source)
        request = CompletionRequest("fetching", token_bytes(PROMPT), 3, source=kept)
        fetching = target.runner.complete(request)
        await asyncio.sleep(0)
        waiting = asyncio.create_task(target.ask(longer))
        await asyncio.sleep(0)
        assert len(target.runner._fetching) == 2
        if not comes:
            fetching.cancel()
        _, finished, _ = await waiting
        assert finished.cached_tokens == (8 if comes else 0)


async def test_what_another_request_fetches_is_not_fetched_again():
    async with running() as first, running() as second, running() as target:
        kept = await kept_by(first)
        also_kept = await kept_by(second)
        request = CompletionRequest("fetching", token_bytes(PROMPT), 3, source=kept)
        target.runner.complete(request)
        await asyncio.sleep(0)

        _, finished, _ = await target.ask(source=also_kept)

        assert finished.cached_tokens == 8
        # It was told that nothing is needed of it, and would else keep it for a minute.
        await until_idle(second)
        assert second.runner._transfer is not None
        assert second.runner._transfer._sending._free_s == 0.0, "nothing was sent"


@pytest.mark.parametrize("fetches", [False, True])
async def test_a_request_cancelled_while_it_waits_for_kv_leaves_nothing(fetches, monkeypatch):
    monkeypatch.setattr(transfer, "BEAT_S", 0.01)
    async with running(SLOW) as source, running() as target:
        kept = await kept_by(source)
        request = CompletionRequest("r", token_bytes(PROMPT), 3, source=kept)
        generation = target.runner.complete(request)
        if fetches:
            await eventually(lambda: _hands_on(source))

        generation.cancel()

        assert target.is_idle()
        await target.ask()
        await until_idle(source)


async def _hands_on(source):
    assert source.runner._transfer is not None
    return source.runner._transfer._sending._free_s > 0
