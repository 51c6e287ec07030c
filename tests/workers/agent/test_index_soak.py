"""A cluster that runs for long at constant occupancy uses constant memory.

Engines store and evict (LRU, in two tiers) at random; workers crash, return or lose their lease;
requests are routed, then released, abandoned or left to expire; agents publish metrics; a router
does maintenance. State in Redis, the agents and the router is bounded by the number of blocks held
and of live workers, and used_memory does not grow.
"""

import asyncio
import logging
import os
import random
import re
from collections import OrderedDict, deque
from collections.abc import Sized
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import count, cycle
from statistics import median
from unittest.mock import ANY

import pytest

from app.core import keys
from app.core.errors import RoutingError
from app.core.events import Removed, Stored
from app.core.keys import METRICS_MAXLEN, Keyspace
from app.core.settings.router import RouterSettings
from app.core.types import SequenceHash, Tier
from app.ops import namespaces, verify
from app.policy.decision import RouteRequest
from app.router import history, maintenance
from app.router.fleet import Fleet
from app.router.metrics import Telemetry
from app.router.router import Router
from app.state.connect import connect
from app.state.scripts import ScriptRunner
from tests.eventually import eventually
from tests.fake_worker import fake_agent, running
from workers.agent import agent as agents

KEYS = Keyspace("soak")
SHARDS = [KEYS.of_shard(n) for n in range(2)]
NUM_WORKERS = 3
BLOCK_SIZE = 256
DEVICE_BLOCKS = 6000
HOST_BLOCKS = 2000
INDEX_BLOCKS = 32_768
PREDICTIONS = 1000
MAX_CHAIN = 160
MAX_IN_FLIGHT = 20
STEP_S = 0.005
REQUEST_INTERVAL_S = 0.015
FEW_METRICS = 400
LEASE_TTL_S = 1.0
GRACE_MS = 500
TIMEOUT_S = 5.0
GROWTH = 0.05
CONTROL_KEYS = (
    "versions",
    "events",
    "meta",
    "workers",
    "current",
    "leases",
    "writers",
    "load",
    "metrics",
    "decisions",
)
DECISIONS = 200
OLD = 100_000
"""Incarnations to start from: all numbers have as many digits, so entries keep their size."""
SOAK_S = float(os.environ.get("KVROUTE_SOAK_S", "1800"))


class Engine:
    """A cache in two tiers, full once it is warm: the least recently used blocks are evicted to
    the host, and from there dropped."""

    def __init__(self, rng, system_prompts):
        self.num_evicted = 0
        self.device = OrderedDict()
        self.host = OrderedDict()
        """Blocks and their parents, in the order of eviction."""
        self.conversations = deque(maxlen=50)
        self._rng = rng
        self._system_prompts = system_prompts

    def serve(self):
        """Prefill and decode one request."""
        chain = self._next_turn()
        self.conversations.append(chain)
        onboarded = tuple(block for block in chain if self.host.pop(block, self) is not self)
        # The last block first, so that parents outlive their children.
        for block, parent in zip(reversed(chain), reversed([None, *chain[:-1]]), strict=True):
            self.device[block] = parent
            self.device.move_to_end(block)
        return [Stored(tuple(chain), None), Removed(onboarded, Tier.HOST), *self._evict()]

    def _evict(self):
        while len(self.device) > DEVICE_BLOCKS:
            block, parent = self.device.popitem(last=False)
            self.host[block] = parent
            yield Stored((block,), parent, Tier.HOST)
            yield Removed((block,))
        while len(self.host) > HOST_BLOCKS:
            block, _ = self.host.popitem(last=False)
            self.num_evicted += 1
            yield Removed((block,), Tier.HOST)

    def _next_turn(self):
        rng = self._rng
        if self.conversations and rng.random() < 0.5:
            before = rng.choice(self.conversations)
        else:
            before = rng.choice(self._system_prompts)
        return [*before, *new_blocks(rng, rng.randint(16, 64))][:MAX_CHAIN]

    def held(self):
        """Events that announce all held blocks to a new agent."""
        tiers = ((Tier.DEVICE, self.device), (Tier.HOST, self.host))
        return [Stored((b,), parent, tier) for tier, held in tiers for b, parent in held.items()]


def new_blocks(rng, number):
    return [SequenceHash(rng.getrandbits(64)) for _ in range(number)]


class Worker:
    """An engine that goes on serving whatever happens to its agent."""

    def __init__(self, redis, name, engine):
        self.engine = engine
        self._redis = redis
        self._name = name
        self._running = AsyncExitStack()

    @property
    def num_pending(self):
        return self.agent._publisher._ownership.num_pending

    async def start(self):
        self.agent = fake_agent(
            ScriptRunner(self._redis, TIMEOUT_S),
            KEYS,
            self._name,
            block_size=BLOCK_SIZE,
            kv_total_blocks=10_000,
            lease_ttl_s=LEASE_TTL_S,
            index_blocks=INDEX_BLOCKS,
            shards=len(SHARDS),
        )
        self.agent.notify(self.engine.held())
        await self._running.enter_async_context(running(self.agent))

    async def crash(self):
        await self._running.aclose()

    async def work(self):
        while True:
            self.agent.notify(self.engine.serve())
            await asyncio.sleep(STEP_S)

    async def lose_lease(self):
        """Expire the lease: the agent resyncs if it is retired before it renews the lease."""
        await self._redis.zadd(KEYS["leases"], {str(self.agent.incarnation): 1}, xx=True)

    async def lease(self):
        return await self._redis.zscore(KEYS["leases"], str(self.agent.incarnation))


class Cluster:
    """Some workers, a router, and a client that sends requests."""

    def __init__(self, redis):
        self.redis = redis
        self.rng = random.Random(7)
        system_prompts = [new_blocks(self.rng, 8 + n) for n in range(24)]
        self.workers = [
            Worker(redis, f"w{n}", Engine(random.Random(n), system_prompts))
            for n in range(NUM_WORKERS)
        ]
        settings = RouterSettings(
            namespace=KEYS.namespace,
            seed=7,
            reservation_ttl_s=1.0,
            prediction_ttl_s=2.0,
            decisions_kept=DECISIONS,
        )
        self.fleet = Fleet(redis, KEYS, TIMEOUT_S)
        self.router = Router(
            ScriptRunner(redis, TIMEOUT_S), KEYS, settings, self.fleet, Telemetry()
        )

    async def send(self):
        """Send requests, of which some are served, some abandoned and some left to expire."""
        in_flight = deque()
        for n in count():
            chain = self.rng.choice(self.rng.choice(self.workers).engine.conversations)
            request = RouteRequest(f"r{n}", chain, len(chain) * BLOCK_SIZE, "latency")
            with suppress(RoutingError):
                in_flight.append(await self.router.route(request))
            if len(in_flight) > MAX_IN_FLIGHT:
                await self._end(in_flight.popleft())
            await asyncio.sleep(REQUEST_INTERVAL_S)

    async def _end(self, decision):
        match self.rng.randrange(4):
            case 0:
                await self.router.prefill_complete(decision.request_id)
                await self.router.release(decision.request_id)
            case 1:
                await self.router.release(decision.request_id)
            case 2:
                self.router.abandon(decision)
            case _:
                pass  # it expires

    async def crash(self):
        worker = self.rng.choice(self.workers)
        await worker.crash()
        await worker.start()

    async def lose_lease(self):
        await self.rng.choice(self.workers).lose_lease()

    async def retire_and_return(self):
        """Stop a worker until it is retired, then start it again."""
        worker = self.rng.choice(self.workers)
        await worker.crash()
        await eventually(worker.lease, lambda lease: lease is None, within_s=60.0)
        await worker.start()

    async def age(self, turnovers, metrics_maxlen):
        """Wait until all is full, and caches have been replaced `turnovers` times."""

        async def num_turnovers():
            evicted = min(worker.engine.num_evicted for worker in self.workers)
            return evicted / (DEVICE_BLOCKS + HOST_BLOCKS)

        await eventually(num_turnovers, lambda n: n >= turnovers, within_s=300.0)
        await eventually(
            lambda: self.redis.xlen(KEYS["decisions"]),
            lambda entries: entries >= DECISIONS,
            within_s=300.0,
        )
        await eventually(
            lambda: self.redis.xlen(KEYS["metrics"]),
            lambda entries: entries >= metrics_maxlen,
            within_s=300.0,
        )

    async def memory(self):
        """Bytes that Redis uses for data, once nothing of dead incarnations is left: the median of
        some samples, without the memory of an empty server and of clients' buffers."""
        await eventually(self._leftovers, lambda found: not found, within_s=30.0)
        samples = []
        for _ in range(25):
            info = await self.redis.info("memory")
            overhead = info["used_memory_startup"] + info["mem_clients_normal"]
            samples.append(info["used_memory"] - overhead)
            await asyncio.sleep(0.04)
        return median(samples)

    async def _leftovers(self):
        """State that is left of dead incarnations, or still to be published."""
        sizes = {
            "workers": await self.redis.hlen(KEYS["workers"]),
            "current": await self.redis.hlen(KEYS["current"]),
            "leases": await self.redis.zcard(KEYS["leases"]),
            "writers": await self.redis.hlen(KEYS["writers"]),
            "load": await self.redis.hlen(KEYS["load"]),
        } | {shard["applied"]: await self.redis.hlen(shard["applied"]) for shard in SHARDS}
        found = [f"{name} has {size}" for name, size in sizes.items() if size != NUM_WORKERS]
        behind = [
            f"{w.agent.info.key} is behind" for w in self.workers if w.num_pending > MAX_CHAIN
        ]
        transient = [key for shard in SHARDS for key in (shard["dead"], shard["sweep"])]
        return found + behind + [key for key in transient if await self.redis.exists(key)]

    async def transient_keys(self):
        """Keys that exist only while requests are in flight, or shortly after."""
        kept = [KEYS[name] for name in CONTROL_KEYS]
        kept += [shard[name] for shard in SHARDS for name in ("shard", "applied", "predictions")]
        keys = [key.decode() async for key in self.redis.scan_iter(count=1000)]
        return [k for k in keys if k not in kept and not re.search(":(blocks|predicted):", k)]


def sizes(of):
    """The length of each collection that an object keeps."""
    kept = vars(of).items()
    return {n: len(v) for n, v in kept if isinstance(v, Sized) and not isinstance(v, str)}


async def soak(redis, duration_s, turnovers, metrics_maxlen=METRICS_MAXLEN):
    """Run for `duration_s` after a warm-up in which caches are replaced `turnovers` times."""
    await redis.hset(KEYS["meta"], "incarnations", str(OLD))
    cluster = Cluster(redis)
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        for worker in cluster.workers:
            await worker.start()
            stack.push_async_callback(worker.crash)
        routing = tasks.create_task(cluster.router.run())
        working = [tasks.create_task(worker.work()) for worker in cluster.workers]
        working.append(tasks.create_task(cluster.send()))
        await cluster.age(turnovers, metrics_maxlen)
        before = await cluster.memory()
        end = loop.time() + duration_s
        for disturb in cycle((cluster.crash, cluster.lose_lease, cluster.retire_and_return)):
            await disturb()
            if loop.time() >= end:
                break
        after = await cluster.memory()
        assert after == pytest.approx(before, rel=GROWTH)
        assert await redis.xlen(KEYS["metrics"]) < 1.1 * metrics_maxlen + 100
        assert await redis.hlen(KEYS["reservations"]) < 4 * MAX_IN_FLIGHT
        for task in working:
            task.cancel()
        await eventually(cluster.transient_keys, lambda keys: not keys)
        await check_bounded(cluster)
        routing.cancel()


async def check_bounded(cluster):
    """With all engines idle, state is bounded by what they hold, and the index is consistent."""
    engines = [worker.engine for worker in cluster.workers]
    held = set().union(*(engine.device.keys() | engine.host.keys() for engine in engines))

    async def unique_blocks():
        summary = await namespaces.summary(cluster.redis, KEYS)
        assert summary is not None
        return summary.unique_blocks

    await eventually(unique_blocks, lambda number: number == len(held))
    assert await verify.verify(cluster.redis, KEYS, 1 << 24) == ([], ANY)
    for worker in cluster.workers:
        ownership = sizes(worker.agent._publisher._ownership)
        assert max(ownership.values()) == DEVICE_BLOCKS + HOST_BLOCKS, ownership
    for keeper in (cluster.fleet, cluster.router, cluster.router._maintenance):
        assert all(size <= NUM_WORKERS for size in sizes(keeper).values()), sizes(keeper)


@asynccontextmanager
async def only_data_uses_memory(redis):
    """Turn off what Redis records of commands, which takes more memory than all our data: the
    arguments of slow commands, of which a busy machine has more, and, from Redis 7 on, a histogram
    of each command's latency from its first use on."""
    settings_before = await redis.config_get("latency-tracking")
    settings_before |= await redis.config_get("slowlog-max-len")
    for name in settings_before:
        await redis.config_set(name, "no" if name == "latency-tracking" else 0)
    await redis.slowlog_reset()
    yield
    for name, value in settings_before.items():
        await redis.config_set(name, value)


@pytest.fixture(autouse=True)
def no_warnings(caplog):
    """pytest keeps every record, its exception's traceback and so all that a crashed agent had."""
    caplog.set_level(logging.ERROR)


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    monkeypatch.setattr(maintenance, "RETIRE_GRACE_MS", GRACE_MS)


@pytest.mark.slow
async def test_memory_does_not_grow_at_constant_occupancy(one_redis_server, monkeypatch):
    # A short stream, which fills as soon as the caches do.
    monkeypatch.setattr(agents, "METRICS_MAXLEN", FEW_METRICS)
    monkeypatch.setattr(history, "MAX_PREDICTIONS", PREDICTIONS)
    monkeypatch.setattr(keys, "METRICS_INTERVAL_S", 0.02)
    async with connect(one_redis_server.url) as redis, only_data_uses_memory(redis):
        await soak(redis, 3.0, turnovers=2, metrics_maxlen=FEW_METRICS)


@pytest.mark.slow
@pytest.mark.timeout(SOAK_S + 900)
async def test_memory_does_not_grow_at_constant_occupancy_over_half_an_hour(redis_server):
    """Takes KVROUTE_SOAK_S seconds on each kind of server, by default 1800."""
    async with connect(redis_server.url) as redis, only_data_uses_memory(redis):
        await soak(redis, SOAK_S, turnovers=10)
