"""A namespace whose index is spread over a Redis Cluster."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from app.core.chains import shard_of
from app.core.events import Removed, Stored
from app.core.hashing import compute_hashes
from app.core.keys import Keyspace
from app.core.settings.router import RouterSettings
from app.core.types import TierOverlap
from app.policy.decision import RouteRequest
from app.router.fleet import Fleet
from app.router.metrics import Telemetry
from app.router.router import Router
from app.state.connect import connect
from app.state.scripts import ScriptRunner
from tests.eventually import eventually
from tests.fake_worker import fake_agent, running
from tests.redis_servers import ClusterServers, default_kind

SHARDS = 12
BLOCK_SIZE = 4
NUM_PROMPTS = 60
BLOCKS = 5
PROMPTS = [list(range(n * 1000, n * 1000 + BLOCKS * BLOCK_SIZE)) for n in range(NUM_PROMPTS)]
CHAINS = [compute_hashes(prompt, BLOCK_SIZE)[1] for prompt in PROMPTS]
TIMEOUT_S = 5.0
FAILOVER_S = 30.0


@pytest.mark.slow
async def test_only_prompts_of_a_shard_that_fails_over_lose_their_overlap_for_a_while():
    with ClusterServers(default_kind()) as servers:
        keyspace = keyspace_away_from(servers, shard=1)
        async with AsyncExitStack() as stack:
            agents = [await started_agent(stack, servers.url, keyspace, n) for n in range(2)]
            router = await started_router(stack, servers.url, keyspace)
            for n, chain in enumerate(CHAINS):
                agents[n % 2].notify([Stored(tuple(chain), None)])
            whole = [(f"w{n % 2}", TierOverlap(device=BLOCKS)) for n in range(NUM_PROMPTS)]

            async def placed():
                return [(d.worker.key.worker_id, d.overlap) for d in await look_up(router)]

            await eventually(placed, lambda found: found == whole)
            assert {servers.shard_of(keyspace.of_shard(n)["shard"]) for n in range(SHARDS)} == {
                0,
                1,
                2,
            }
            lost = [n for n, chain in enumerate(CHAINS) if master_of(servers, keyspace, chain) == 1]
            assert 0 < len(lost) < NUM_PROMPTS

            servers.masters[1].kill()
            during = await look_up(router)
            assert [n for n, decision in enumerate(during) if decision.degraded] == lost
            assert [n for n, decision in enumerate(during) if decision.trust == "blind"] == lost
            assert [
                n for n, decision in enumerate(during) if decision.overlap == TierOverlap()
            ] == lost
            await eventually(placed, lambda found: found == whole, within_s=FAILOVER_S)
            assert router.telemetry.registry.get_sample_value("kvroute_blind_decisions_total")


async def test_an_unreachable_shard_does_not_keep_others_from_being_updated():
    with ClusterServers(default_kind()) as servers:
        keyspace = keyspace_away_from(servers, shard=1)
        async with AsyncExitStack() as stack:
            agent = await started_agent(stack, servers.url, keyspace, 0)
            router = await started_router(stack, servers.url, keyspace)
            for chain in CHAINS:
                agent.notify([Stored(tuple(chain), None)])

            async def overlaps():
                return [decision.overlap.total for decision in await look_up(router)]

            await eventually(overlaps, lambda found: found == [BLOCKS] * NUM_PROMPTS)
            for server in (servers.masters[1], servers.replicas[1]):
                server.kill()
            lost = {n for n, chain in enumerate(CHAINS) if master_of(servers, keyspace, chain) == 1}
            for gone in range(1, BLOCKS):
                # In order, so that the unreachable shard always has updates pending.
                for chain in CHAINS:
                    agent.notify([Removed((chain[-gone],))])
                left = [0 if n in lost else BLOCKS - gone for n in range(NUM_PROMPTS)]
                await eventually(overlaps, lambda found, left=left: found == left)
            assert agent.incarnation == 1


def keyspace_away_from(servers, shard):
    """A keyspace whose keys outside the index are not on that master."""
    names = (Keyspace(f"spread{n}") for n in range(100))
    return next(keyspace for keyspace in names if servers.shard_of(keyspace["meta"]) != shard)


def master_of(servers, keyspace, chain):
    return servers.shard_of(keyspace.of_shard(shard_of(chain[0], SHARDS))["shard"])


async def started_agent(stack, url, keyspace, n):
    redis = await stack.enter_async_context(connect(url))
    runner = ScriptRunner(redis, TIMEOUT_S)
    agent = fake_agent(runner, keyspace, f"w{n}", index_blocks=4000, shards=SHARDS)
    return await stack.enter_async_context(running(agent))


async def started_router(stack, url, keyspace):
    redis = await stack.enter_async_context(connect(url))
    settings = RouterSettings(namespace=keyspace.namespace, policy="latency", seed=1)
    fleet = Fleet(redis, keyspace, TIMEOUT_S)
    router = Router(ScriptRunner(redis, TIMEOUT_S), keyspace, settings, fleet, Telemetry())
    await keep_running(stack, router.run())
    return router


async def keep_running(stack, work):
    task = asyncio.ensure_future(work)

    async def stop():
        task.cancel()
        await asyncio.wait([task])

    stack.push_async_callback(stop)


async def look_up(router):
    return await asyncio.gather(
        *(
            router.route(RouteRequest(f"r{n}", chain, len(prompt), "latency", reserve=False))
            for n, (prompt, chain) in enumerate(zip(PROMPTS, CHAINS, strict=True))
        )
    )
