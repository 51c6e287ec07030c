"""Processes of a cluster are killed under load, and it recovers without help."""

import asyncio
from contextlib import asynccontextmanager
from functools import partial
from operator import eq

import orjson
import pytest

from loadtest.client import ClusterClient, FailureKind
from tests.e2e.conftest import (
    BLOCK_SIZE,
    LEASE_TTL_S,
    RESERVATION_TTL_S,
    prompt,
    small_cluster,
)
from tests.eventually import eventually
from tests.redis_servers import require_binary

PROMPT_TOKENS = 20 * BLOCK_SIZE
NUM_PROMPTS = 12
CALLERS = 4


class Load:
    """Callers that send one request after another until `stop`."""

    def __init__(self, client):
        self.outcomes = []
        self._client = client
        self._stop = False

    def stop(self):
        self._stop = True

    async def call(self, caller):
        turn = 0
        while not self._stop:
            turn += 1
            tokens = partial(prompt, (caller + turn) % NUM_PROMPTS, PROMPT_TOKENS)
            self.outcomes.append(
                await self._client.send(f"{caller}-{turn}", tokens, output_tokens=30)
            )

    async def wait_for_more(self, count):
        """Wait until `count` more requests are over."""
        enough = len(self.outcomes) + count

        async def over():
            return len(self.outcomes)

        await eventually(over, lambda seen: seen >= enough)


@asynccontextmanager
async def loaded(url):
    """Load on the cluster behind `url`, for as long as the context lasts."""
    async with ClusterClient(url, deadline_s=30.0) as client:
        load = Load(client)
        async with asyncio.TaskGroup() as callers:
            for caller in range(CALLERS):
                callers.create_task(load.call(caller))
            try:
                yield load
            finally:
                load.stop()


@pytest.mark.parametrize(
    "haproxy", [pytest.param(True, marks=pytest.mark.slow), False], ids=["haproxy", "shared socket"]
)
async def test_a_killed_replica_loses_no_request_and_leaves_nothing_behind(haproxy, open_probe):
    if haproxy:
        require_binary("haproxy")
    with small_cluster(
        num_workers=2, num_replicas=3, haproxy=haproxy, reservation_ttl_s=RESERVATION_TTL_S
    ) as cluster:
        probe = open_probe(cluster)
        async with loaded(cluster.balancer_url) as load:
            await load.wait_for_more(20)
            victim = cluster.routers[0]
            for i in range(5):
                answer = await probe.http.post(
                    f"{victim.url}/v1/route?request_id=orphan-{i}",
                    content=prompt(i, PROMPT_TOKENS),
                    headers={"content-type": "application/octet-stream"},
                )
                assert answer.json()["reserved"]
            victim.process.kill()
            orphans = {f"orphan-{i}" for i in range(5)}
            await load.wait_for_more(50)
            # Nobody will release them; they expire, even under load.
            await eventually(probe.reserved, lambda seen: not seen & orphans)
        assert [o for o in load.outcomes if o.failure] == []
        await probe.all_idle(2)
        assert await probe.reserved() == set()


@pytest.mark.slow
async def test_a_killed_worker_is_no_longer_chosen_and_its_blocks_are_swept(open_probe):
    with small_cluster(
        num_workers=3, num_replicas=2, haproxy=False, lease_ttl_s=LEASE_TTL_S
    ) as cluster:
        probe = open_probe(cluster)
        async with loaded(cluster.balancer_url) as load:

            async def used():
                return {outcome.worker for outcome in load.outcomes}

            await eventually(used, lambda seen: seen == {"w0:0", "w1:0", "w2:0"})
            dead = (await probe.workers())["w0"]["incarnation"]
            await eventually(probe.index_entries, lambda seen: seen.get(dead, 0) > 0)
            cluster.workers[0].process.kill()

            await eventually(probe.workers, lambda seen: set(seen) == {"w1", "w2"})
            at_lapse = len(load.outcomes)
            await eventually(probe.index_entries, lambda seen: dead not in seen)
            # By then, all requests in flight at the lapse have ended.
            await load.wait_for_more(60)
        assert {o.worker for o in load.outcomes[at_lapse + CALLERS :]} == {"w1:0", "w2:0"}
        # A stream that broke in the middle is for its caller to retry; all others got an answer.
        # Its callers reported that it failed, so nobody else had to find out.
        assert sum(o.attempts > 1 for o in load.outcomes) <= CALLERS
        failures = {o.failure for o in load.outcomes} - {None}
        assert failures <= {FailureKind.BROKEN_STREAM}
        await probe.all_idle(2)
        for key in ("leases", "writers", "load", "workers"):
            left = await probe.redis.execute_command(
                "ZSCORE" if key == "leases" else "HGET", cluster.keyspace[key], dead
            )
            assert left is None, key

        # It comes back as a new incarnation, which holds nothing.
        cluster.start_worker(0)
        workers = await eventually(probe.workers, lambda seen: len(seen) == 3)
        assert workers["w0"]["incarnation"] > dead
        assert workers["w0"]["incarnation"] not in await probe.index_entries()


async def test_a_stopped_worker_ends_answers_that_take_too_long_with_an_error(open_probe, capfd):
    with small_cluster(
        num_workers=1, num_replicas=1, haproxy=False, speedup=1.0, drain_s=0.2
    ) as cluster:
        probe, worker = open_probe(cluster), cluster.workers[0]

        async def ask(request_id, stream):
            return await probe.http.post(
                f"{worker.url}/v1/completions",
                # They take half a minute.
                params={"max_tokens": "1500", "request_id": request_id, "stream": stream},
                content=prompt(0, PROMPT_TOKENS),
                headers={"content-type": "application/octet-stream"},
            )

        async def both_running():
            metrics = (await probe.http.get(f"{worker.url}/metrics")).text
            return 'kvroute_engine_requests{state="running"} 2.0' in metrics

        async with asyncio.TaskGroup() as callers:
            whole = callers.create_task(ask("whole", "false"))
            stream = callers.create_task(ask("stream", "true"))
            await eventually(both_running)
            worker.process.terminate()
        assert await asyncio.to_thread(worker.process.wait, 60) == 0
        assert not await probe.redis.exists(cluster.keyspace["current"])  # it has retired

    assert whole.result().status_code == 503
    assert whole.result().json()["error"]["code"] == "stopping"
    last = stream.result().text.strip().splitlines()[-1]
    assert orjson.loads(last.removeprefix("data: "))["error"]["code"] == "stopping"
    assert capfd.readouterr().err == ""


async def test_a_redis_that_lost_everything_is_refilled_while_requests_are_served(open_probe):
    with small_cluster(num_workers=2, num_replicas=2, haproxy=False) as cluster:
        probe = open_probe(cluster)
        assert cluster.redis is not None
        prompts = [prompt(seed, 64 * BLOCK_SIZE) for seed in range(100, 106)]
        for tokens in prompts:
            # By cost, all may go to a worker that learned on a busy machine that it is the fastest.
            await probe.complete(tokens, policy="round_robin")
        held = [await eventually(partial(probe.overlaps, t)) for t in prompts]
        assert [list(h.values()) for h in held] == [[64]] * 6
        assert len({name for h in held for name in h}) > 1

        cluster.redis.kill()
        for tokens in prompts:
            answer = await probe.route(tokens)
            assert (answer["degraded"], answer["reserved"]) == (True, False)
        async with loaded(cluster.balancer_url) as load:
            await load.wait_for_more(30)
            assert {o.degraded for o in load.outcomes} == {True}
            cluster.redis.start()
            for tokens, known in zip(prompts, held, strict=True):
                await eventually(partial(probe.overlaps, tokens), partial(eq, known))
            await load.wait_for_more(30)
        assert [o for o in load.outcomes if o.failure] == []
        assert load.outcomes[-1].degraded is False
        # A worker that held none of the prompts may be the last to register again.
        await eventually(probe.workers, lambda seen: set(seen) == {"w0", "w1"})
        assert [m.name for m in cluster.members if m.process.poll() is not None] == []
        await probe.all_idle(2)
