"""Everything fails, over and over, and reservations stay exact.

Polite and rude callers use a cluster of real processes behind Sentinel, while replicas and workers
are killed and paused and Redis fails over, in an order drawn from a seed. The wall clock of every
router and worker is hours off, each by a different amount: only the Redis clock may count.
"""

import asyncio
import random
import time
from collections import Counter
from contextlib import AsyncExitStack, suppress
from email.utils import parsedate_to_datetime
from functools import partial
from typing import TypeVar

import aiohttp
import pytest
from redis.asyncio import Redis

from app.core.errors import RedisUnavailable
from app.core.keys import MODELS
from app.core.settings.router import RouterSettings
from app.core.settings.worker import WorkerSettings
from app.local.cluster import Cluster
from app.ops import verify, workers
from app.state.connect import connect
from loadtest.client import TOKENS_TYPE, ClusterClient, FailureKind
from loadtest.topologies import SERVICE
from tests.e2e.conftest import BLOCK_SIZE, LEASE_TTL_S, prompt
from tests.eventually import eventually
from tests.redis_servers import SentinelServers, default_kind, stopped

T = TypeVar("T")

REPLICAS = 3
WORKERS = 3
SLOTS = 8
RESERVATION_TTL_S = 4.0
POLITE = 6
RUDE = 10
NUM_PROMPTS = 12
PROMPT_TOKENS = 20 * BLOCK_SIZE
ANSWER_S = 20.0
"""Every call is answered within this time, by one replica or another."""
PATIENCE_S = 2.0
"""How long to wait for one replica, which may be stopped."""
RECOVERY_S = 60.0
"""How long recovery may take. Of this, a sentinel takes 8 s before it makes a master that has
returned follow the new one."""
PAUSES = (30, 300)
"""How many calls are answered before the next step: too few for a lease to lapse, or more."""
ANSWERS = {
    (200, ""),
    (429, "all_workers_busy"),
    (429, "router_overloaded"),
    (503, "no_workers"),
    (503, "redis_unavailable"),
}
ZERO_AT_REST = (
    "active_requests",
    "active_blocks",
    "prefill_tokens",
    "queue_s",
    "kv_active_blocks",
    "num_requests_waiting",
)

SHIFTED_CLOCK = """
import os, time

_ahead_s = (os.getpid() % 47 - 23.5) * 3600
_time, _time_ns = time.time, time.time_ns
time.time = lambda: _time() + _ahead_s
time.time_ns = lambda: _time_ns() + int(_ahead_s * 1e9)
"""


@pytest.fixture
def shifted_clocks(tmp_path, monkeypatch):
    """Gives each process of a cluster started from now on its own wrong wall clock."""
    (tmp_path / "sitecustomize.py").write_text(SHIFTED_CLOCK)
    # These processes get our import path.
    monkeypatch.syspath_prepend(tmp_path)


class Traffic:
    """Polite and rude callers of a cluster, until `stop`."""

    def __init__(self, cluster, seed, http, balanced):
        self.answers = Counter()
        self.outcomes = []
        self._cluster = cluster
        self._rng = random.Random(seed)
        self._http = http
        self._balanced = balanced
        self._stopping = False
        self._num_ids = 0

    def stop(self):
        self._stopping = True

    async def wait_for_more(self, count):
        """Wait until `count` more calls have been answered."""

        async def answered():
            return self.answers.total() + len(self.outcomes)

        enough = await answered() + count
        await eventually(answered, lambda seen: seen >= enough, within_s=RECOVERY_S)

    async def call_politely(self):
        """Send requests through the balancer, from routing to release, as a good client does."""
        while not self._stopping:
            self.outcomes.append(
                await self._balanced.send(self._new_id(), self._prompt, output_tokens=20)
            )

    async def call_rudely(self):
        """Call random replicas, in ways that no client should."""
        misuses = [
            self._release_twice,
            self._release_late,
            self._release_too_early,
            self._route_everywhere,
            self._hang_up,
            self._forget,
        ]
        while not self._stopping:
            await self._rng.choice(misuses)(self._new_id())

    async def _release_twice(self, request):
        await self._route(request)
        await self._prefill_complete(request)
        await asyncio.gather(self._release(request), self._release(request))
        await asyncio.gather(self._prefill_complete(request), self._release(request))

    async def _release_late(self, request):
        await self._route(request)
        await asyncio.sleep(RESERVATION_TTL_S * self._rng.uniform(0.8, 1.2))
        await self._prefill_complete(request)
        await self._release(request)

    async def _release_too_early(self, request):
        await asyncio.gather(self._release(request), self._route(request))
        await asyncio.gather(self._prefill_complete(request), self._release(request))

    async def _route_everywhere(self, request):
        await asyncio.gather(*(self._route(request) for _ in range(3)))
        await self._prefill_complete(request)
        await asyncio.gather(self._route(request), self._release(request))
        await self._route(request)
        await self._release(request)

    async def _hang_up(self, request):
        routing = asyncio.ensure_future(self._route(request))
        await asyncio.wait([routing], timeout=self._rng.uniform(0, 0.01))
        routing.cancel()
        await asyncio.wait([routing])

    async def _forget(self, request):
        await self._route(request)
        if self._rng.random() < 0.5:
            await self._prefill_complete(request)

    async def _route(self, request):
        await self._call("POST", f"/v1/route?request_id={request}", self._prompt())

    async def _prefill_complete(self, request):
        await self._call("POST", f"/v1/requests/{request}/prefill_complete")

    async def _release(self, request):
        await self._call("DELETE", f"/v1/requests/{request}")

    async def _call(self, method, path, body=b""):
        """Call random replicas until one answers. Raises TimeoutError after ANSWER_S."""
        async with asyncio.timeout(ANSWER_S):
            while True:
                url = self._rng.choice(self._cluster.routers).url
                with suppress(aiohttp.ClientError, TimeoutError, OSError):
                    async with (
                        asyncio.timeout(PATIENCE_S),
                        self._http.request(
                            method, url + path, data=body, headers=TOKENS_TYPE
                        ) as response,
                    ):
                        answer = await response.json()
                        self.answers[response.status, answer.get("error", {}).get("code", "")] += 1
                        return
                await asyncio.sleep(0.05)

    def _prompt(self):
        return prompt(self._rng.randrange(NUM_PROMPTS), PROMPT_TOKENS)

    def _new_id(self):
        self._num_ids += 1
        return f"chaos-{self._num_ids}"


class Trouble:
    """Causes failures, and undoes each after callers have been answered in spite of it."""

    def __init__(self, cluster, servers, traffic, seed):
        self._cluster = cluster
        self._servers = servers
        self._traffic = traffic
        self._rng = random.Random(seed)

    async def disrupt_processes(self, count):
        """Kill or pause `count` routers and workers, one after another."""
        for disrupt in self._shuffled([self._kill, self._stop], count):
            members, start = self._rng.choice(
                [
                    (self._cluster.routers, self._cluster.start_router),
                    (self._cluster.workers, self._cluster.start_worker),
                ]
            )
            await disrupt(members, start)
            await self._pause()

    async def disrupt_redis(self, count):
        """Make the other server the master, `count` times."""
        kinds = [self._kill_master, self._stop_master, self._hand_over]
        for disrupt in self._shuffled(kinds, count):
            await disrupt(*await self._roles())
            await eventually(self._is_in_step, within_s=RECOVERY_S)
            await self._pause()

    def _shuffled(self, kinds, count):
        """`count` of them in random order, each kind as often as the others."""
        drawn = (kinds * -(-count // len(kinds)))[:count]
        self._rng.shuffle(drawn)
        return drawn

    async def _pause(self):
        """A short pause or a long one, equally often."""
        await self._traffic.wait_for_more(self._rng.choice(PAUSES))

    async def _kill(self, members, start):
        member = members.pop(self._rng.randrange(len(members)))
        member.process.kill()
        member.process.wait()
        await self._pause()
        start(int(member.name[-1]))

    async def _stop(self, members, _):
        member = self._rng.choice(members)
        with stopped(member.process.pid):
            await self._pause()

    async def _kill_master(self, master, successor):
        master.kill()
        await eventually(partial(self._is_master, successor), within_s=RECOVERY_S)
        await self._pause()
        await asyncio.to_thread(master.start)

    async def _stop_master(self, master, successor):
        """Once resumed, it considers itself the master until a sentinel makes it a replica."""
        assert master.pid is not None
        with stopped(master.pid):
            await eventually(partial(self._is_master, successor), within_s=RECOVERY_S)
            await self._pause()

    async def _hand_over(self, _, __):
        await self._servers.hand_over(within_s=RECOVERY_S)

    async def _roles(self):
        """The master and its replica."""
        master, replica = self._servers.master, self._servers.replica
        return (master, replica) if await self._is_master(master) else (replica, master)

    async def _is_master(self, server):
        return await self._servers.named_masters() == {server.port}

    async def _is_in_step(self):
        """Whether the replica follows the master, and the sentinels would promote it next."""
        master, replica = await self._roles()
        async with Redis(port=replica.port) as client:
            seen = await client.info("replication")
        async with Redis(port=self._servers.sentinels[0].port) as sentinel:
            replicas = await sentinel.sentinel_slaves(SERVICE)
        return (
            seen.get("master_link_status") == "up"
            and seen["master_port"] == master.port
            and any(r["port"] == replica.port and r["flags"] == "slave" for r in replicas)
        )


async def watch_reservations(redis, cluster):
    while True:
        with suppress(RedisUnavailable):
            for worker in await workers.everyone(redis, cluster.keyspace):
                assert worker.load is None or worker.load.requests <= SLOTS
            findings, _ = await verify.verify(redis, cluster.keyspace, 0)
            assert findings == []
        await asyncio.sleep(0.1)


async def hours_ahead(http, member):
    """How far the wall clock of a process is ahead of ours."""
    async with http.get(f"{member.url}/health") as response:
        theirs = parsedate_to_datetime(response.headers["date"]).timestamp()
    return (theirs - time.time()) / 3600


async def at_rest(http, cluster):
    """Whether all replicas see all workers, with nothing reserved or running on any of them."""
    for router in cluster.routers:
        async with http.get(f"{router.url}/v1/workers") as response:
            workers = (await response.json())["workers"] if response.status == 200 else []
        if sorted(w["worker_id"] for w in workers) != sorted(f"w{i}" for i in range(WORKERS)):
            return False
        if any(w[field] for w in workers for field in ZERO_AT_REST):
            return False
    return True


async def strays(redis, cluster):
    """Keys that a cluster at rest should not have."""
    keys = cluster.keyspace
    shard = keys.of_shard(0)
    of_workers = ("meta", "workers", "current", "leases", "writers", "load", "versions", "metrics")
    kept = ("decisions", "endings", "events", "history", "history_minutes", "replicas")
    used = {MODELS, shard["shard"], shard["applied"], *(keys[name] for name in of_workers + kept)}
    found = {key.decode() async for key in redis.scan_iter(count=1000)}
    return {key for key in found - used if not key.startswith(shard["blocks:"])}


async def survive(seed, *, disruptions, failovers):
    """Put a cluster through this many failures; then check that it recovers in full."""
    kind = default_kind()
    async with AsyncExitStack() as stack:
        servers = stack.enter_context(SentinelServers(kind))
        cluster = stack.enter_context(
            Cluster(
                num_workers=WORKERS,
                num_replicas=REPLICAS,
                haproxy=False,
                redis_url=servers.url,
                router=RouterSettings(reservation_ttl_s=RESERVATION_TTL_S, log_level="error"),
                worker=WorkerSettings(
                    speedup=20.0,
                    block_size=BLOCK_SIZE,
                    lease_ttl_s=LEASE_TTL_S,
                    kv_pool_tokens=1024 * BLOCK_SIZE,
                    max_requests=SLOTS,
                    log_level="error",
                ),
            )
        )
        redis = await stack.enter_async_context(connect(servers.url))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        balanced = await stack.enter_async_context(
            ClusterClient(cluster.balancer_url, deadline_s=60.0)
        )
        for member in cluster.members:
            assert abs(await hours_ahead(http, member)) > 0.4, member.name

        traffic = Traffic(cluster, seed, http, balanced)
        trouble = Trouble(cluster, servers, traffic, seed)
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(watch_reservations(redis, cluster))
            for _ in range(POLITE):
                tasks.create_task(traffic.call_politely())
            for _ in range(RUDE):
                tasks.create_task(traffic.call_rudely())
            await traffic.wait_for_more(max(PAUSES))
            await asyncio.gather(
                trouble.disrupt_processes(disruptions), trouble.disrupt_redis(failovers)
            )
            traffic.stop()
            watching.cancel()

        # A stream that broke in the middle is for its caller to retry; all others got an answer.
        failures = {outcome.failure for outcome in traffic.outcomes} - {None}
        assert failures <= {FailureKind.BROKEN_STREAM}
        assert set(traffic.answers) <= ANSWERS
        assert traffic.answers[200, ""] > traffic.answers.total() / 2

        await eventually(partial(at_rest, http, cluster), within_s=RECOVERY_S)
        await eventually(partial(strays, redis, cluster), lambda s: not s, within_s=RECOVERY_S)
        findings, _ = await verify.verify(redis, cluster.keyspace, 1 << 20)
        assert findings == []


@pytest.mark.slow
@pytest.mark.usefixtures("shifted_clocks")
async def test_reservations_stay_exact_whatever_fails():
    await survive(1, disruptions=4, failovers=2)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("shifted_clocks")
@pytest.mark.parametrize("seed", [2, 3])
async def test_reservations_stay_exact_through_minutes_of_failures(seed):
    await survive(seed, disruptions=24, failovers=9)
