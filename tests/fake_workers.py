"""Workers without engines: they register, publish blocks and report metrics, but answer nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from redis.asyncio import Redis

from app.core import worker_report
from app.core.hashing import compute_local_hashes, compute_sequence_hashes, seed_for
from app.core.keys import Keyspace
from app.core.loads import Load, Reservation, Wish
from app.core.types import Incarnation, Tier, WorkerKey
from app.core.worker_report import (
    DEFAULT_SPEED,
    NO_READINGS,
    ForwardPassMetrics,
    GpuReadings,
    Speed,
    WorkerInfo,
)
from app.state import index, leases, reservations
from app.state.leases import Registration
from app.state.scripts import Call, ScriptRunner

NAMESPACE = "test"
KEYS = Keyspace(NAMESPACE)
SHARD = KEYS.of_shard(0)
BLOCK_SIZE = 4
TTL_MS = 60_000


def register(keyspace: Keyspace, worker: str = "a") -> Call[Registration]:
    """The call that registers a worker, for tests of the calls themselves."""
    info = WorkerInfo(WorkerKey(worker), "http://a", 4, 1000, 256)
    return leases.register(keyspace, info, "nonce", ttl_ms=60_000)


def registered(keyspace: Keyspace) -> Call[set[Incarnation]]:
    """The call that finds out which of the incarnations 1 to 9 are registered."""
    asked = [Incarnation(number) for number in range(1, 10)]
    absent = leases.absent(keyspace, asked)
    return replace(absent, parse=lambda reply: set(asked) - set(absent.parse(reply)))


@dataclass(slots=True)
class FakeWorker:
    """One incarnation of a worker. batches: how many it has published."""

    info: WorkerInfo
    incarnation: Incarnation
    batches: int = 0


class FakeWorkers:
    """A fleet in one Redis. Workers are named by their key; `w1` means `w1:0`."""

    def __init__(self, redis: Redis) -> None:
        self.redis = redis
        self._runner = ScriptRunner(redis, timeout_s=5.0)
        self._workers: dict[WorkerKey, FakeWorker] = {}

    async def register(
        self, name: str, *, max_requests: int = 256, kv_total_blocks: int = 100_000
    ) -> Incarnation:
        """A new incarnation of `name` at http://<worker_id>-<dp_rank>:80, leased for a minute."""
        key = _key(name)
        info = WorkerInfo(
            key,
            address=f"http://{key.worker_id}-{key.dp_rank}:80",
            block_size=BLOCK_SIZE,
            kv_total_blocks=kv_total_blocks,
            max_requests=max_requests,
        )
        nonce = f"nonce-{name}"
        call = leases.register(KEYS, info, nonce, ttl_ms=TTL_MS)
        incarnation = (await self._runner.one(call)).incarnation
        assert await self._runner.one(index.open_shard(SHARD, incarnation, nonce, 4))
        assert await self._runner.one(leases.activate(KEYS, key, incarnation, nonce))
        self._workers[key] = FakeWorker(info, incarnation)
        return incarnation

    async def publish(
        self,
        name: str,
        tokens: Sequence[int],
        tier: Tier = Tier.DEVICE,
        *,
        lora_name: str | None = None,
        mm_hashes: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Have `name` hold the full blocks of `tokens` in `tier`."""
        worker = self._workers[_key(name)]
        local = compute_local_hashes(
            tokens, BLOCK_SIZE, seed=seed_for(lora_name), mm_hashes=mm_hashes
        )
        chain = compute_sequence_hashes(local)
        worker.batches += 1
        changes = index.chain_changes(chain, tier)
        call = index.apply(SHARD, worker.incarnation, f"nonce-{name}", worker.batches, changes)
        assert await self._runner.one(call)

    async def report(
        self,
        name: str,
        measured: ForwardPassMetrics,
        speed: Speed = DEFAULT_SPEED,
        gpu: GpuReadings = NO_READINGS,
    ) -> None:
        """Have `name` write one entry to the metrics stream."""
        incarnation = self._workers[_key(name)].incarnation
        entry: dict[Any, Any] = {
            "worker": str(_key(name)),
            "incarnation": str(incarnation),
            **worker_report.encode(measured, speed, gpu),
        }
        await self.redis.xadd(KEYS["metrics"], entry)

    async def occupy(
        self, name: str, *request_ids: str, blocks: int = 3, prefill_s: float = 0.001
    ) -> None:
        """Reserve other callers' requests on `name`, each with 4 tokens to prefill."""
        worker = self._workers[_key(name)]
        for request_id in request_ids:
            reservation = Reservation(request_id, 4, round(1e6 * prefill_s), blocks)
            wish = Wish(worker.incarnation, reservation, worker.info.max_requests, seen_total=None)
            reserve = reservations.reserve(KEYS, [wish], ttl_ms=TTL_MS)
            assert await self._runner.one(reserve) == [None]

    async def retire(self, name: str) -> None:
        worker = self._workers.pop(_key(name))
        call = leases.retire(KEYS, worker.info.key, worker.incarnation, f"nonce-{name}")
        assert await self._runner.one(call)

    async def load(self, name: str) -> Load:
        """The load reserved on `name`, as Redis has it."""
        snapshot = await self._runner.one(reservations.loads(KEYS))
        return snapshot.loads[self._workers[_key(name)].incarnation]

    async def reserved(self) -> dict[str, str]:
        """request_id -> worker key, for every reservation in Redis."""
        names = {str(w.incarnation): str(key) for key, w in self._workers.items()}
        found: dict[Any, Any] = await self.redis.hgetall(KEYS["reservations"])
        return {request.decode(): names[inc.decode()] for request, inc in found.items()}


def _key(name: str) -> WorkerKey:
    return WorkerKey.parse(name if ":" in name else f"{name}:0")
