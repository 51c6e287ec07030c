"""Nothing grows without bound: blocks come and go at constant occupancy, workers die and come back,
requests are routed and some never ended; Redis's memory stays what it was after warm-up."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from contextlib import AsyncExitStack
from statistics import median

import pytest
from redis.asyncio import Redis

from app.core.config import RouterSettings
from app.core.embedded import EmbeddedRedis
from app.core.events import Removed, Stored
from app.core.keys import METRICS_MAXLEN, Keyspace
from app.core.metrics import DEFAULT_SPEED, ForwardPassMetrics
from app.core.redis import connect
from app.core.scripts import ScriptRunner
from app.core.types import SequenceHash, WorkerInfo, WorkerKey
from app.fleet import Fleet
from app.router import Router, RouteRequest
from app.telemetry import Telemetry
from tests.eventually import eventually
from workers.agent import Agent, AgentSettings

KEYS = Keyspace("soak")
WORKERS = 3
CHAINS_HELD = 60
CHAIN = 64
BLOCK_SIZE = 4
TIMEOUT_S = 5.0
RESERVATION_S = 2.0
STEP_S = 0.01
SAMPLES = 15


class Engine:
    """Holds the last CHAINS_HELD chains."""

    def __init__(self, agent: Agent, rng: random.Random) -> None:
        self.agent = agent
        self._rng = rng
        self.chains: deque[list[SequenceHash]] = deque()

    def turn(self) -> list[SequenceHash]:
        """One chain comes and, at full occupancy, one goes, its leaf first."""
        chain = [SequenceHash(self._rng.getrandbits(64)) for _ in range(CHAIN)]
        self.chains.append(chain)
        self.agent.notify([Stored(tuple(chain), None)])
        if len(self.chains) > CHAINS_HELD:
            self.agent.notify([Removed(tuple(reversed(self.chains.popleft())))])
        return chain


async def start(stack: AsyncExitStack, url: str, n: int, rng: random.Random) -> Engine:
    redis = await stack.enter_async_context(connect(url))
    info = WorkerInfo(WorkerKey(f"w{n}"), f"http://w{n}:80", BLOCK_SIZE, 4000, 64)
    agent = Agent(
        ScriptRunner(redis, TIMEOUT_S),
        KEYS,
        info,
        AgentSettings(lease_ttl_s=2.0, index_blocks=WORKERS * CHAINS_HELD * CHAIN, shards=2),
        lambda: (ForwardPassMetrics(), DEFAULT_SPEED),
    )
    await agent.start()
    task = asyncio.ensure_future(agent.run())
    stack.push_async_callback(asyncio.wait, [task])
    stack.callback(task.cancel)
    return Engine(agent, rng)


async def memory(redis: Redis) -> float:
    """Bytes that Redis uses without its clients' buffers; median of some samples."""
    samples = []
    for _ in range(SAMPLES):
        info = await redis.info("memory")
        samples.append(info["used_memory"] - info["mem_clients_normal"])
        await asyncio.sleep(STEP_S)
    return median(samples)


@pytest.mark.parametrize(
    "duration_s",
    [
        12.0,
        pytest.param(
            1800.0, marks=[pytest.mark.slow, pytest.mark.timeout(2400)], id="half an hour"
        ),
    ],
)
async def test_memory_stays_what_it_was_after_warm_up(
    own_redis_server: EmbeddedRedis, duration_s: float
) -> None:
    rng = random.Random(3)
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        redis = await stack.enter_async_context(connect(own_redis_server.url))
        settings = RouterSettings(
            namespace=KEYS.namespace,
            reservation_ttl_s=RESERVATION_S,
            seed=1,
            count_in_flight=True,
            prediction_ttl_s=2.0,
            prediction_entries=2000,
        )
        fleet = Fleet(redis, KEYS, TIMEOUT_S)
        router = Router(ScriptRunner(redis, TIMEOUT_S), KEYS, settings, fleet, Telemetry())
        task = asyncio.ensure_future(router.run())
        stack.push_async_callback(asyncio.wait, [task])
        stack.callback(task.cancel)
        homes = [await stack.enter_async_context(AsyncExitStack()) for _ in range(WORKERS)]
        engines = [await start(homes[n], own_redis_server.url, n, rng) for n in range(WORKERS)]

        async def churn(until: float) -> None:
            turns = 0
            while loop.time() < until:
                turns += 1
                for engine in engines:
                    chain = engine.turn()
                    request = RouteRequest(f"r{turns % 500}", chain, CHAIN * BLOCK_SIZE, "latency")
                    decision = await router.route(request)
                    assert not decision.degraded
                    if turns % 3:  # the others are left to expire
                        await router.release(decision.request_id)
                if turns % 300 == 0:
                    # A worker is killed, and comes back with an empty cache.
                    n = rng.randrange(WORKERS)
                    await homes[n].aclose()
                    engines[n] = await start(homes[n], own_redis_server.url, n, rng)
                await asyncio.sleep(STEP_S)

        async def settled() -> float:
            """All engines are full, nothing is to be swept and nothing reserved."""
            while any(len(engine.chains) < CHAINS_HELD for engine in engines):
                for engine in engines:
                    if len(engine.chains) < CHAINS_HELD:
                        engine.turn()
            await eventually(lambda: redis.zcard(KEYS["expiry"]), lambda n: n == 0, within_s=20)
            for shard in (0, 1):
                names = KEYS.of_shard(shard)
                await eventually(lambda n=names: redis.exists(n["dead"]), lambda n: n == 0)
                await eventually(
                    lambda n=names: redis.hlen(n["applied"]), lambda n: n == WORKERS, within_s=20
                )
            await eventually(
                lambda: unique_blocks(redis), lambda n: n == WORKERS * CHAINS_HELD * CHAIN
            )
            # How much was foreseen depends on the last seconds' traffic.
            await eventually(lambda: predicted(redis), lambda n: n == 0, within_s=20)
            assert await redis.xlen(KEYS["metrics"]) < 1.1 * METRICS_MAXLEN
            await redis.xtrim(KEYS["metrics"], maxlen=0)
            return await memory(redis)

        await churn(loop.time() + 5.0)
        before = await settled()
        await churn(loop.time() + duration_s)
        after = await settled()
        assert after == pytest.approx(before, rel=0.05)
        assert await redis.hlen(KEYS["workers"]) == WORKERS
        assert await redis.hlen(KEYS["reservations"]) == 0


async def predicted(redis: Redis) -> int:
    return len([key async for key in redis.scan_iter(match=KEYS.pattern + ":predicted:*")])


async def unique_blocks(redis: Redis) -> int:
    keys = [key async for key in redis.scan_iter(match=KEYS.pattern + ":blocks:*", count=1000)]
    return sum([await redis.hlen(key) for key in keys])
