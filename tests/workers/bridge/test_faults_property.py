"""Whatever is lost, repeated, late or cut on the way: at rest, routers see what the engine holds.

A small engine on real sockets, the rank beside it, and real Redis. The engine stores and removes as
vLLM does, in a tree of prompts; blocks may go before those that follow them.
"""

import asyncio
from contextlib import suppress

import pytest
import zmq.asyncio
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from app.core.keys import Keyspace
from app.core.types import TierOverlap, WorkerKey
from app.core.worker_report import WorkerInfo
from app.http.server import run
from app.state.connect import connect
from app.state.overlap import match
from app.state.scripts import ScriptRunner
from tests.eventually import eventually
from tests.fakes.events import EventSockets
from tests.workers.bridge.holder import SIZE, chain_of
from workers.agent.agent import AgentSettings
from workers.bridge.events import stream
from workers.bridge.events.events import AllBlocksCleared, BlockRemoved, BlockStored
from workers.bridge.health import EngineHealth
from workers.bridge.http.facts import EngineFacts
from workers.bridge.rank import Rank
from workers.bridge.speed import EngineSpeed

KEYS = Keyspace("faults")
TOKENS = list(range(100, 100 + 8 * SIZE))
PROMPTS = [
    TOKENS,
    [*TOKENS[: 5 * SIZE], *range(200, 200 + 3 * SIZE)],
    [*TOKENS[:SIZE], *range(300, 300 + 4 * SIZE)],
    list(range(400, 400 + 6 * SIZE)),
]
NAMES = [[hash(tuple(p[:end])) for end in range(SIZE, len(p) + 1, SIZE)] for p in PROMPTS]
"""What the engine calls the blocks of each prompt: those of shared prefixes alike."""
ALL_NAMES = sorted({name for names in NAMES for name in names})
CAPACITY = len(ALL_NAMES)
FACTS = EngineFacts(
    kind="vllm",
    version="0.33.0",
    models=("m",),
    adapters=(),
    max_model_len=None,
    block_size=SIZE,
    capacity_tokens=CAPACITY * SIZE,
    reuse_tokens=SIZE,
    recomputed_tokens=0,
    sources=(),
    announces_copies=True,
    started_s=None,
)

Step = tuple[str, int, int]


class Engine:
    """What it holds, and what it publishes of it."""

    def __init__(self, publisher):
        self.publisher = publisher
        self.held = set()

    def store(self, prompt, length, times):
        """The first `length` blocks of the prompt, those that it holds already excepted."""
        names = NAMES[prompt][:length]
        events = []
        for n, name in enumerate(names):
            if name not in self.held:
                parent = names[n - 1] if n else None
                tokens = PROMPTS[prompt][n * SIZE : (n + 1) * SIZE]
                events.append(BlockStored([name], parent, tokens, SIZE, medium="GPU"))
        self.held.update(names)
        if events:
            self.publisher.publish(events, times=times)

    def remove(self, number, times):
        name = ALL_NAMES[number]
        if name in self.held:
            self.held.discard(name)
            self.publisher.publish([BlockRemoved([name], "GPU")], times=times)

    def clear(self, times):
        self.held.clear()
        self.publisher.publish([AllBlocksCleared()], times=times)

    def restart(self):
        self.held.clear()
        self.publisher.restart()

    def overlap(self, prompt):
        names = NAMES[prompt]
        return next((n for n, name in enumerate(names) if name not in self.held), len(names))


async def step(engine, name, number, times):
    match name:
        case "store":
            engine.store(number % len(PROMPTS), 1 + number // len(PROMPTS) % 8, times)
        case "remove":
            engine.remove(number % CAPACITY, times)
        case "clear":
            engine.clear(times)
        case "restart":
            engine.restart()
        case "late":
            engine.publisher.send_late(number % 4)
        case "cut":
            with suppress(zmq.ZMQError):  # it is cut already
                engine.publisher.cut()
        case "mend":
            with suppress(zmq.ZMQError):  # it is whole
                engine.publisher.mend()
        case "silence":
            engine.publisher.answers = not engine.publisher.answers
        case "pause":
            await asyncio.sleep(number * 0.005)


STEPS = st.tuples(
    st.sampled_from(
        ["store"] * 6
        + ["remove"] * 4
        + ["late"] * 2
        + ["pause"] * 2
        + ["clear", "restart", "cut", "mend", "silence"]
    ),
    st.integers(0, 31),
    st.sampled_from([1, 1, 1, 0, 2, 3]),
)


async def run_steps(url, buffer, steps):
    context = zmq.asyncio.Context()
    async with connect(url) as redis, EventSockets(buffer) as publisher:
        await redis.flushall()
        runner = ScriptRunner(redis, timeout_s=5.0)
        rank = Rank(
            context,
            publisher.source,
            FACTS,
            WorkerInfo(WorkerKey("w0"), "http://127.0.0.1:1", SIZE, CAPACITY, 8),
            AgentSettings(lease_ttl_s=30.0, index_blocks=128),
            runner,
            KEYS,
            EngineSpeed(128),
            EngineHealth(0.0, stall_s=0.0),
            None,
        )
        running = asyncio.create_task(rank.run())
        try:
            engine = Engine(publisher)

            async def hears():
                engine.clear(times=1)
                counters = rank.stream.counters
                return rank.agent.incarnation is not None and counters.batches > counters.replayed

            async def has_caught_up():
                # After a loss, `joined_late` holds until the engine has been asked for everything;
                # one that still has all batches may leave nothing unknown.
                is_learning = rank.joined_late and buffer != 2
                return (
                    rank.stream.position == publisher.position
                    and rank.stream.is_current
                    and not is_learning
                )

            await eventually(hears)
            # So that as many batches may come from another process.
            engine.restart()
            await eventually(has_caught_up)
            for one in steps:
                await step(engine, *one)
            publisher.answers = True
            await step(engine, "mend", 0, 0)
            await eventually(has_caught_up)
            assert await rank.agent.published()
            chains = [chain_of(prompt) for prompt in PROMPTS]
            seen, _ = await match(runner, KEYS, chains)
            for prompt, found in enumerate(seen):
                assert found is not None
                shown = found.get(rank.agent.incarnation, TierOverlap()).total
                if rank.joined_late:
                    assert shown <= engine.overlap(prompt)
                else:
                    assert shown == engine.overlap(prompt)
        finally:
            running.cancel()
            await asyncio.wait([running])
            context.destroy(linger=0)


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    for name in ("PROBE_S", "RETRY_S", "MIN_WAIT_S", "MAX_WAIT_S"):
        monkeypatch.setattr(stream, name, 0.05)
    # Longer than a busy machine holds up an answer, which would count as an engine that is gone.
    monkeypatch.setattr(stream, "REPLY_S", 1.5)


@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
# A process whose lost batches make its numbers fit those of the one before.
@example(
    buffer=2,
    steps=[
        *(("store", 0, 1), ("store", 3, 1), ("restart", 0, 1)),
        *(("store", 0, 0), ("store", 4, 0), ("store", 3, 1)),
    ],
)
@given(buffer=st.sampled_from([2, 10_000]), steps=st.lists(STEPS, max_size=30))
def test_at_rest_routers_see_what_the_engine_holds(one_redis_server, buffer, steps):
    run(run_steps(one_redis_server.url, buffer, steps))
