"""Workers without engines: they register, hold what they are told to, and answer nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import click
import numpy as np

from app.core.chains import bucket_bits_for
from app.core.keys import Keyspace
from app.core.overlaps import Overlaps
from app.core.types import Incarnation, SequenceHash, Tier, WorkerKey
from app.core.worker_report import WorkerInfo
from app.state import index, leases
from app.state.scripts import Call, ScriptRunner

BLOCK_SIZE = 16
NUM_BLOCKS = 25_000
NONCE = "bench"
LEASE_TTL_MS = 3_600_000
BATCH = 64


class Holders:
    """The workers `w0`, `w1` and so on of one namespace.

    index_blocks: unique blocks that the namespace's index is laid out for.
    """

    def __init__(
        self, runner: ScriptRunner, keyspace: Keyspace, *, index_blocks: int = 2048
    ) -> None:
        self.incarnations: list[Incarnation] = []
        self._runner = runner
        self._keyspace = keyspace
        self._shard = keyspace.of_shard(0)
        self._bucket_bits = bucket_bits_for(index_blocks)
        self._seqs: Counter[Incarnation] = Counter()

    async def register(
        self,
        count: int,
        *,
        address: str = "http://127.0.0.1:1",
        max_requests: int = 256,
        **about: Any,
    ) -> None:
        """about: of each worker, besides; fields of WorkerInfo."""
        do = self._runner.one
        for n in range(count):
            key = WorkerKey(f"w{n}")
            info = WorkerInfo(key, address, BLOCK_SIZE, NUM_BLOCKS, max_requests, **about)
            made = await do(
                leases.register(self._keyspace, info, NONCE, ttl_ms=LEASE_TTL_MS, shards=1)
            )
            inc = made.incarnation
            assert await do(index.open_shard(self._shard, inc, NONCE, self._bucket_bits))
            assert await do(leases.activate(self._keyspace, key, inc, NONCE))
            self.incarnations.append(inc)

    async def store(
        self,
        worker: int,
        chain: Sequence[SequenceHash],
        tier: Tier | None = Tier.DEVICE,
        start: int = 0,
    ) -> None:
        """Put the blocks of `chain`, from position `start` on, in `tier` of `w<worker>`; None
        removes them."""
        inc = self.incarnations[worker]
        changes = index.chain_changes(chain, tier, start)
        calls: list[Call[bool]] = []
        for at in range(0, len(changes), BATCH):
            self._seqs[inc] += 1
            batch = changes[at : at + BATCH]
            calls.append(index.apply(self._shard, inc, NONCE, self._seqs[inc], batch))
        assert all(await self._runner.run(calls))


def check_found(looked_up: Sequence[Overlaps | None], held: Sequence[int]) -> None:
    """Raises ClickException unless each lookup found as many blocks on a worker as one holds."""
    for overlaps, due in zip(looked_up, held, strict=True):
        most = max((overlap.total for overlap in (overlaps or {}).values()), default=0)
        if most != due:
            raise click.ClickException(f"a lookup found {most} blocks; a worker holds {due}")


def hashes(rng: np.random.Generator, count: int) -> list[SequenceHash]:
    return [SequenceHash(h) for h in rng.integers(0, 2**64, count, np.uint64).tolist()]
