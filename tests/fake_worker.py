"""A worker without an engine: it registers, publishes and reports metrics, but answers nothing.

`FakeWorker` takes one step at a time, each a script, as a test tells it; `FakeWorkers` is a fleet
of them by name. `fake_agent` is the real agent of such a worker, which does all that by itself.
"""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

from app.core import registration
from app.core.hashing import compute_local_hashes, compute_sequence_hashes, seed_for
from app.core.keys import Keyspace
from app.core.loads import Reservation
from app.core.trust import TOP
from app.core.types import Incarnation, Tier, WorkerKey
from app.core.worker_report import (
    DEFAULT_SPEED,
    NO_READINGS,
    ForwardPassMetrics,
    WorkerInfo,
)
from app.state import index, leases, reservations
from app.state.scripts import ScriptRunner
from workers.agent.agent import Agent, AgentSettings

NAMESPACE = "test"
KEYS = Keyspace(NAMESPACE)
SHARD = KEYS.of_shard(0)
BLOCK_SIZE = 4
TTL_MS = 3_600_000


def worker_info(name, *, block_size=BLOCK_SIZE, kv_total_blocks=1000, max_requests=256, **given):
    """A worker at http://<worker_id>-<dp_rank>:80, named by its key; `w1` means `w1:0`.

    given: other fields that are not the defaults.
    """
    key = _key(name)
    address = f"http://{key.worker_id}-{key.dp_rank}:80"
    if "kv_transfer" in given:
        given.setdefault("kv_compatible", "fakes")
    return WorkerInfo(key, address, block_size, kv_total_blocks, max_requests, **given)


def register(keyspace, worker="a"):
    """The call that registers a worker, for tests of the calls themselves."""
    return leases.register(keyspace, worker_info(worker), "nonce", ttl_ms=TTL_MS)


def registered(keyspace):
    """The call that finds out which of the incarnations 1 to 9 are registered."""
    asked = [Incarnation(number) for number in range(1, 10)]
    absent = leases.absent(keyspace, asked)
    return replace(absent, parse=lambda reply: set(asked) - set(absent.parse(reply)))


class FakeWorker:
    """One process of a worker, leased for an hour, whose index has one shard.

    incarnation: the latest that it registered, active or not.
    num_batches: how many batches this incarnation has published.
    """

    def __init__(self, runner, keyspace, info, *, bucket_bits=4):
        self.info = info
        self.nonce = f"nonce-{info.key}"
        self.num_batches = 0
        self._runner = runner
        self._keys = keyspace
        self._shard = keyspace.of_shard(0)
        self._bucket_bits = bucket_bits
        self._incarnation = None
        self._previous = None

    @property
    def incarnation(self):
        assert self._incarnation is not None, f"{self.info.key} was never registered"
        return self._incarnation

    async def register(self, *, resync=False):
        """Register a new incarnation, which has to be activated.

        resync: the process that had the last one registers again. Else it is a new process.
        """
        self._previous = self.incarnation if resync else None
        registration = await self._runner.one(
            leases.register(
                self._keys, self.info, self.nonce, ttl_ms=TTL_MS, previous=self._previous
            )
        )
        self._incarnation, self.num_batches = registration.incarnation, 0
        opened = index.open_shard(self._shard, self.incarnation, self.nonce, self._bucket_bits)
        assert await self._runner.one(opened)
        return registration

    async def activate(self):
        call = leases.activate(
            self._keys, self.info.key, self.incarnation, self.nonce, previous=self._previous
        )
        assert await self._runner.one(call)

    async def publish(self, changes):
        """Publish the next batch."""
        self.num_batches += 1
        assert await self.apply(self.num_batches, changes)

    async def apply(self, seq, changes):
        """Send a batch of any number. Returns whether this incarnation may publish."""
        call = index.apply(self._shard, self.incarnation, self.nonce, seq, list(changes))
        return await self._runner.one(call)

    async def retire(self):
        call = leases.retire(self._keys, self.info.key, self.incarnation, self.nonce)
        assert await self._runner.one(call)


class FakeWorkers:
    """A fleet in namespace `test` of one Redis."""

    def __init__(self, redis):
        self.redis = redis
        self._runner = ScriptRunner(redis, timeout_s=5.0)
        self._workers = {}

    async def register(self, name, *, max_requests=256, kv_total_blocks=100_000, **given):
        """A new process of `name`, whose incarnation is routed to."""
        info = worker_info(
            name, kv_total_blocks=kv_total_blocks, max_requests=max_requests, **given
        )
        worker = FakeWorker(self._runner, KEYS, info)
        await worker.register()
        await worker.activate()
        self._workers[info.key] = worker
        return worker.incarnation

    async def publish(self, name, tokens, tier=Tier.DEVICE, *, lora_name=None, mm_hashes=None):
        """Have `name` hold the full blocks of `tokens` in `tier`; None: no longer."""
        local = compute_local_hashes(
            tokens, BLOCK_SIZE, seed=seed_for(lora_name), mm_hashes=mm_hashes
        )
        chain = compute_sequence_hashes(local)
        await self._workers[_key(name)].publish(index.chain_changes(chain, tier))

    async def report(self, name, measured, speed=DEFAULT_SPEED, gpu=NO_READINGS):
        """Have `name` write one entry to the metrics stream."""
        incarnation = self._workers[_key(name)].incarnation
        entry = {
            "worker": str(_key(name)),
            "incarnation": str(incarnation),
            **registration.encode_metrics(measured, speed, gpu),
        }
        await self.redis.xadd(KEYS["metrics"], entry)

    async def occupy(self, name, *request_ids, blocks=3, prefill_s=0.001):
        """Reserve other callers' requests on `name`, each with 4 tokens to prefill."""
        worker = self._workers[_key(name)]
        for request_id in request_ids:
            promised = Reservation(
                *(request_id, 4, round(1e6 * prefill_s), blocks),
                incarnation=worker.incarnation,
                max_requests=worker.info.max_requests,
            )
            reserve = reservations.reserve(KEYS, [promised], ttl_ms=TTL_MS)
            assert await self._runner.one(reserve) == [None]

    async def renew(self, name, **given):
        """Have `name` say something else of itself from now on."""
        worker = self._workers[_key(name)]
        worker.info = replace(worker.info, **given)
        call = leases.renew(KEYS, worker.info, worker.incarnation, worker.nonce, ttl_ms=TTL_MS)
        assert (await self._runner.one(call)).num_leases

    async def retire(self, name):
        await self._workers.pop(_key(name)).retire()

    async def load(self, name):
        """The load reserved on `name`, as Redis has it."""
        snapshot = await self._runner.one(reservations.loads(KEYS))
        return snapshot.loads[self._workers[_key(name)].incarnation]

    async def reserved(self):
        """request_id -> worker key, for every reservation in Redis."""
        names = {str(w.incarnation): str(key) for key, w in self._workers.items()}
        found = await self.redis.hgetall(KEYS["reservations"])
        return {request.decode(): names[inc.decode()] for request, inc in found.items()}


def fake_agent(
    runner,
    keyspace,
    name,
    *,
    block_size=BLOCK_SIZE,
    kv_total_blocks=1000,
    lease_ttl_s=20.0,
    index_blocks=1024,
    shards=1,
    rung=TOP,
    **given,
):
    """The agent, not started, of a worker whose engine is idle and does what the test says.

    given: as for `worker_info`.
    """
    measured = ForwardPassMetrics(kv_total_blocks=kv_total_blocks)
    return Agent(
        runner,
        keyspace,
        worker_info(name, block_size=block_size, kv_total_blocks=kv_total_blocks, **given),
        AgentSettings(lease_ttl_s, index_blocks, shards),
        lambda: (measured, DEFAULT_SPEED),
        judge=lambda: rung,
    )


@asynccontextmanager
async def running(agent):
    """Start the agent and run it. At the end it dies, as if killed: nothing is retired."""
    await agent.start()
    task = asyncio.ensure_future(agent.run())
    try:
        yield agent
    finally:
        task.cancel()
        # Not awaited, which would take somebody's wish to end the caller for the task's end.
        await asyncio.wait([task])
        assert task.cancelled(), task.exception()


def _key(name):
    return WorkerKey.parse(name if ":" in name else f"{name}:0")
