"""Names of namespaces, and the state of one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from app.core.chains import BLOCKS_PER_BUCKET
from app.core.errors import ConfigError
from app.core.keys import NAMESPACE, Keyspace
from app.ops.holders import held_blocks
from app.ops.workers import WorkerStatus, with_blocks
from app.state.client import RedisClient
from app.state.connect import deadline
from app.state.reading import (
    STEP_TIMEOUT_S,
    bucket_bits_of,
    number_of,
    read_control,
    readable,
    scan,
)

FULL_FACTOR = 4
"""Times the blocks that an index was laid out for, beyond which it is called overfull."""


@dataclass(frozen=True, slots=True)
class Summary:
    """State of a namespace. laid_out_blocks: how many the buckets were laid out for, where that can
    be read. memory_bytes: used by the servers, including whatever else they hold."""

    namespace: str
    block_size: int
    shards: int
    workers: list[WorkerStatus]
    unique_blocks: int
    laid_out_blocks: int
    memory_bytes: int

    @property
    def overfull(self) -> bool:
        return 0 < FULL_FACTOR * self.laid_out_blocks < self.unique_blocks


async def names(redis: RedisClient) -> list[str]:
    """Returns the names of all namespaces, in order. Raises RedisUnavailable."""
    namespaces = set()
    async for _, keys in scan(redis, "kvroute:1:{*}:meta"):
        namespaces |= {readable(key)[len("kvroute:1:{") : -len("}:meta")] for key in keys}
    # A key that ends in a tenant's name may match as well.
    return sorted(filter(NAMESPACE.fullmatch, namespaces))


async def summary(redis: RedisClient, keyspace: Keyspace) -> Summary | None:
    """Returns a namespace's state, or None if there is none. Reads the whole index. Raises
    RedisUnavailable."""
    control = await read_control(redis, keyspace)
    if b"block_size" not in control.meta or b"shards" not in control.meta:
        return None
    shards = number_of(keyspace, control.meta, "shards")
    held, unique = await held_blocks(redis, keyspace)
    laid_out = memory = 0
    async with deadline(STEP_TIMEOUT_S):
        for shard in range(shards):
            bits = await bucket_bits_of(redis, keyspace.of_shard(shard))
            laid_out += BLOCKS_PER_BUCKET << bits if bits else 0
        for master in await redis.masters():
            memory += int((await master.info("memory"))["used_memory"])
    return Summary(
        namespace=keyspace.namespace,
        block_size=number_of(keyspace, control.meta, "block_size"),
        shards=shards,
        workers=await with_blocks(redis, keyspace, control, held),
        unique_blocks=unique,
        laid_out_blocks=laid_out,
        memory_bytes=memory,
    )


async def block_size(redis: RedisClient, keyspace: Keyspace) -> int:
    """Returns tokens per block. Raises ConfigError for a missing namespace, RedisUnavailable."""
    async with deadline(STEP_TIMEOUT_S):
        meta: Any = await redis.hgetall(keyspace["meta"])
    if b"block_size" not in meta:
        raise ConfigError(f"namespace {keyspace.namespace!r} does not exist")
    return number_of(keyspace, meta, "block_size")
